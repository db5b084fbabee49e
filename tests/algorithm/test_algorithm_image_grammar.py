"""The grammar of pictures written as tokens: allowed kinds, logit masks and forced flags."""

from dataclasses import replace

import pytest
import torch

from rl.api.image_grammar import (
    ANY,
    LANGUAGE,
    NO_IMAGE_YET,
    VISUAL,
    advance,
    allowed_kinds,
    forced_tokens,
    mask_logits_,
)
from rl.api.types import ImageVocabulary

EOL, EOF, EOI, EOS, IMAGE = 3, 4, 5, 6, 7
VOCABULARY = ImageVocabulary(
    image=IMAGE,
    end_of_row=EOL,
    end_of_frame=EOF,
    end_of_image=EOI,
    end_of_sequence=EOS,
    visual_start=10,
    visual_end=14,
)
NUM_IDS = 16
"""The last two ids come after the image codes."""


def kinds_of(num_after_image: list[int], height: int, width: int) -> list[int]:
    num = torch.tensor(num_after_image)
    grid = (torch.full_like(num, height), torch.full_like(num, width))
    return allowed_kinds(num, *grid, VOCABULARY).tolist()


def test_only_language_before_the_image_token_and_anything_without_a_grid():
    assert kinds_of([NO_IMAGE_YET], 2, 3) == [LANGUAGE]
    assert kinds_of([NO_IMAGE_YET, 0, 5, 100], 0, 0) == [ANY] * 4


def test_every_small_grid_allows_exactly_its_own_sequence():
    for height in range(1, 6):
        for width in range(1, 6):
            expected = ([VISUAL] * width + [EOL]) * height + [EOF, EOI] + [EOS] * 3
            assert kinds_of(list(range(len(expected))), height, width) == expected


def test_the_count_starts_at_the_first_image_token():
    before = torch.tensor([NO_IMAGE_YET, NO_IMAGE_YET, 0, 5])
    written = torch.tensor([IMAGE, EOL, 10, IMAGE])
    assert advance(before, written, VOCABULARY).tolist() == [0, NO_IMAGE_YET, 1, 6]


def test_rows_of_different_grids_do_not_mix():
    num = torch.tensor([2, 2, 2, -1, 2])
    heights, widths = torch.tensor([[1, 1, 3, 3, 0], [1, 2, 3, 3, 0]])
    kinds = allowed_kinds(num, heights, widths, VOCABULARY)
    assert kinds.tolist() == [EOF, EOL, VISUAL, LANGUAGE, ANY]


def test_a_mask_keeps_only_the_ids_of_its_kind():
    kinds = torch.tensor([LANGUAGE, VISUAL, ANY, EOL, 0])
    before = torch.randn(5, NUM_IDS, generator=torch.Generator().manual_seed(0))
    logits = before.clone()
    mask_logits_(logits, kinds, VOCABULARY)
    assert torch.equal(logits[0, :10], before[0, :10])
    assert torch.equal(logits[1, 10:14], before[1, 10:14])
    assert torch.equal(logits[2], before[2])
    open_ids = [torch.isfinite(row).nonzero().flatten().tolist() for row in logits]
    assert open_ids == [list(range(10)), [10, 11, 12, 13], list(range(NUM_IDS)), [EOL], [0]]


@pytest.mark.parametrize("temperature", [0.1, 1.0, 7.0])
def test_a_forced_id_has_logprob_exactly_zero_even_when_it_was_banned(temperature):
    logits = torch.full((1, NUM_IDS), 3.0)
    logits[0, EOL] = -1e9
    mask_logits_(logits, torch.tensor([EOL]), VOCABULARY)
    assert float((logits / temperature).log_softmax(-1)[0, EOL]) == 0.0


def test_flags_of_a_thought_then_a_picture_cut_in_the_middle():
    thought = [1, EOL, 2, EOF]
    tokens = [*thought, IMAGE, 10, 11, EOL, 12, 13, EOL, EOF]
    flags = forced_tokens(tokens, (2, 2), VOCABULARY)
    assert [i for i, flag in enumerate(flags) if flag] == [7, 10, 11]
    assert forced_tokens(tokens[:7], (2, 2), VOCABULARY) == (False,) * 7
    assert forced_tokens(thought, (2, 2), VOCABULARY) == (False,) * 4
    assert forced_tokens((), (2, 2), VOCABULARY) == ()
    assert forced_tokens(tuple(tokens), (2, 2), VOCABULARY) == flags


def test_the_mask_follows_the_slices_of_the_vocabulary():
    """Here the codes are the ids 8 to 15, and every smaller id is language."""
    shifted = replace(VOCABULARY, visual_start=8, visual_end=16)
    logits = torch.zeros(2, NUM_IDS)
    mask_logits_(logits, torch.tensor([LANGUAGE, VISUAL]), shifted)
    assert torch.isfinite(logits).sum(-1).tolist() == [8, 8]
