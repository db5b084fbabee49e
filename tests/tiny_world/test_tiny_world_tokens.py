"""Each picture code of the tiny world is one block of pixels, also for its Emu3 and VQ weights."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from tiny_config import WEIGHTS

from tiny_world import scenes, token_scenes
from tiny_world.pixel_judge import grade_perception, grade_semantics


def examples(num: int, seed: int) -> list[tuple[scenes.Scene, scenes.Task]]:
    rng = random.Random(seed)
    drawn = [token_scenes.make_centred_scene(rng) for _ in range(num)]
    return [(scene, scenes.make_instruction(rng, scene)) for scene in drawn]


@pytest.mark.slow
def test_each_code_is_exactly_one_block_of_pixels() -> None:
    side = token_scenes.BLOCK_SIDE_PX
    block_of: dict[int, bytes] = {}
    for scene, task in examples(600, seed=1):
        for drawn in (scene, scenes.apply(scene, task.op)):
            pixels, codes = scenes.draw_array(drawn), token_scenes.encode(drawn)
            assert codes.shape == (4, 4) and codes.dtype == np.int32
            for (row, column), code in np.ndenumerate(codes):
                block = pixels[row * side : (row + 1) * side, column * side : (column + 1) * side]
                assert block_of.setdefault(int(code), block.tobytes()) == block.tobytes()
    assert len(set(block_of.values())) == len(block_of), "two codes for the same pixels"
    assert set(block_of) == set(range(token_scenes.NUM_CODES)), "a code that is never used"


@pytest.fixture(scope="module")
def codec():
    from rl.renderers.emu3_vq_loop import load_codec

    return load_codec(str(WEIGHTS / "emu3_vq"), None, "float32", "cpu")


@pytest.mark.slow
def test_decoded_edits_get_nearly_the_best_score_from_the_judge(codec) -> None:
    scores = []
    for scene, task in examples(24, seed=3):
        edited = scenes.apply(scene, task.op)
        grids = np.stack([token_scenes.encode(s) for s in (scene, edited)])
        pixels = codec.decode_tensor(torch.as_tensor(grids).long())
        before, after = codec.to_pictures(pixels)
        semantics = min(grade_semantics(before, after, task.instruction))
        scores.append(math.sqrt(semantics * min(grade_perception(after))))
    assert np.mean(scores) > 9.3 and min(scores) > 7, scores


def test_the_encoder_gives_the_codes_of_drawn_scenes(codec) -> None:
    edited = [scenes.apply(scene, task.op) for scene, task in examples(24, seed=4)]
    read = codec.encode([scenes.draw(scene) for scene in edited], area_px=64 * 64, batch_size=24)
    for scene, codes in zip(edited, read, strict=True):
        assert (codes == token_scenes.encode(scene)).all()


@pytest.mark.slow
def test_the_untrained_policy_writes_the_right_picture_sometimes() -> None:
    from tiny_world.builder.emu3 import load_policy, p_right

    p_by_kind = p_right(load_policy(WEIGHTS / "emu3"))
    assert all(0.05 < p < 0.5 for p in p_by_kind.values()), p_by_kind
