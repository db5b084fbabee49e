"""The tiny Qwen-Image-2.1: what it was trained with is what the real classes do."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLQwenImage21, QwenImage21Transformer2DModel
from PIL import Image
from tiny_config import WEIGHTS
from transformers import AutoTokenizer

from tiny_world.builder.image21_editor import Exam, read
from tiny_world.builder.image21_flow import LATENTS, Condition, velocity
from tiny_world.builder.image21_models import (
    LATENT_CHANNELS,
    SLOTS,
    load_policy,
    make_policy,
    make_transformer,
)
from tiny_world.builder.image21_policy import make_case, p_right, quarters_of
from tiny_world.builder.image21_reader import PicturesReader
from tiny_world.builder.image21_tokenizer import editing_tokenizer, image_processor
from tiny_world.builder.models import HIDDEN
from tiny_world.scenes import Scene, Shape, describe

FOLDER = WEIGHTS / "image21"
MIN_MARK_WHEN_FED_RIGHT = 8.0
MAX_MARK_WHEN_FED_WRONG = 2.0


@torch.no_grad()
@pytest.mark.parametrize("num_sources", [1, 2])
def test_the_builders_forward_of_unequal_rows_is_the_transformers_of_each(num_sources):
    torch.manual_seed(0)
    transformer, length = make_transformer(num_layers=2), 40
    lengths = torch.tensor([40, 33, 28])
    is_image = torch.zeros(length, dtype=torch.bool)
    for start in (7, 16)[:num_sources]:
        is_image[start : start + SLOTS] = True
    condition = Condition(
        5 * torch.randn(3, length, HIDDEN),
        torch.arange(length) < lengths[:, None],
        lengths,
        is_image,
        torch.randn(3, num_sources, LATENTS, LATENT_CHANNELS),
    )
    xt, t = torch.randn(3, LATENTS, LATENT_CHANNELS), torch.rand(3)
    ours = velocity(transformer, xt, t, condition)
    for row, num in enumerate(lengths.tolist()):
        theirs = transformer(
            torch.cat([condition.sources[row].flatten(0, 1), xt[row]])[None],
            condition.states[row : row + 1, :num],
            t[row : row + 1],
            [[(1, 4, 4)] * (num_sources + 1)],
            F.pad(is_image[:num], (0, SLOTS), value=True)[None],
            return_dict=False,
        )[0][0, -LATENTS:]
        assert torch.allclose(ours[row], theirs, atol=1e-5)


@torch.no_grad()
def test_the_builders_reader_gives_the_states_before_the_norm_of_the_real_forward():
    torch.manual_seed(0)
    tokenizer, rng = editing_tokenizer(), random.Random(1)
    policy = make_policy(tokenizer)
    reader, process = PicturesReader(policy, tokenizer), image_processor()
    cases = [make_case(rng, "borrow"), make_case(rng, "noun"), make_case(rng, "borrow")]
    reading = reader.read(
        [case.pictures for case in cases],
        [case.task.instruction for case in cases],
        [describe(case.task.op, case.scenes[0]) for case in cases],
    )
    kept = []
    norm = policy.model.language_model.norm
    norm.register_forward_hook(lambda module, inputs, output: kept.append(inputs[0]))
    for row, case in enumerate(cases):
        num = int(reading.mask[row].sum())
        ids = torch.cat([reader.prefix, reading.token_ids[row : row + 1, :num]], 1)
        seen = process([Image.fromarray(p) for p in case.pictures], return_tensors="pt")
        policy.model(ids, mm_token_type_ids=(ids == reader.image_id).int(), **seen)
        theirs = kept[-1][0, reader.prefix.shape[1] :]
        assert torch.allclose(reading.hidden[row, :num], theirs, atol=1e-4)


def test_a_word_knows_the_quarter_of_the_shape_its_sentence_names():
    scene = Scene(
        0, (Shape("square", "red", (1, 0), (0, 0)), Shape("circle", "blue", (0, 1), (0, 0)))
    )
    text = "turn the red square green. remove the red circle."
    assert quarters_of(text, scene) == [-1, -1, -1, 2, 2, 2, -1, -1, -1, 4, 4]
    assert quarters_of("the red.", scene) == []


@pytest.fixture(scope="module")
def shipped():
    """(reader of the shipped policy, held-out exam, transformer)"""
    reader = PicturesReader(load_policy(FOLDER / "policy"), editing_tokenizer())
    kw = {"torch_dtype": torch.float32}
    vae = AutoencoderKLQwenImage21.from_pretrained(FOLDER / "vae", **kw)
    transformer = QwenImage21Transformer2DModel.from_pretrained(FOLDER / "transformer", **kw)
    exam = Exam(partial(read, reader), reader.image_id, vae, num=24, seed=11)
    return reader, exam, transformer


def test_the_shipped_tokenizer_is_the_builders(shipped):
    theirs = AutoTokenizer.from_pretrained(FOLDER / "policy")
    assert theirs.get_vocab() == shipped[0].tokenizer.get_vocab()


def test_the_policy_can_give_the_right_answer_but_seldom_does(shipped):
    p_by_kind = p_right(shipped[0])
    assert set(p_by_kind) == {"noun", "match", "erase", "borrow"}
    assert all(0.1 < p < 0.5 for p in p_by_kind.values()), p_by_kind


@pytest.mark.slow
def test_the_editor_does_what_a_description_says_with_one_picture_and_with_two(shipped):
    _, exam, transformer = shipped
    marks = exam.marks(transformer)
    assert min(marks["right_1"], marks["right_2"]) > MIN_MARK_WHEN_FED_RIGHT, marks
    assert marks["wrong"] < MAX_MARK_WHEN_FED_WRONG, marks
