"""The tiny world's judge is strict, its pictures are parsed back, and its weights work."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from PIL import Image
from tiny_config import WEIGHTS

from tiny_world import captions
from tiny_world.pixel_judge import (
    grade_likeness,
    grade_perception,
    grade_semantics,
    grade_wish,
    parse_scene,
)
from tiny_world.scenes import (
    COLOURS,
    Op,
    Scene,
    Task,
    apply,
    draw,
    make_instruction,
    make_scene,
    read_instruction,
)

Edit = Callable[[Scene, Task], Image.Image]
MIN_MARK_OF_RIGHT_WORDS = 8.5
MAX_MARK_OF_WRONG_WORDS = 2.0


def examples(num: int, seed: int) -> list[tuple[Scene, Task]]:
    rng = random.Random(seed)
    scenes = [make_scene(rng) for _ in range(num)]
    return [(scene, make_instruction(rng, scene)) for scene in scenes]


def overall(source: Image.Image, edited: Image.Image, instruction: str) -> float:
    semantics = min(grade_semantics(source, edited, instruction))
    return math.sqrt(semantics * min(grade_perception(edited)))


def mean_overall(edit: Edit) -> float:
    """Mean mark of the edits, 0-10."""
    return fmean(
        overall(draw(scene), edit(scene, task), task.instruction)
        for scene, task in examples(60, seed=2)
    )


def right(scene: Scene, task: Task) -> Image.Image:
    return draw(apply(scene, task.op))


def unchanged(scene: Scene, task: Task) -> Image.Image:
    return draw(scene)


def wrong_colour(scene: Scene, task: Task) -> Image.Image:
    avoided = (task.op.paint, scene.find(task.op.shape).colour)
    colour = random.choice([c for c in COLOURS if c not in avoided])
    return draw(apply(scene, Op(task.op.shape, colour)))


def other_shape(scene: Scene, task: Task) -> str:
    return next(s.shape for s in scene.shapes if s.shape != task.op.shape)


def with_noise(picture: Image.Image, sigma_rgb: float) -> Image.Image:
    noise = np.random.default_rng(0).normal(0, sigma_rgb, (64, 64, 3))
    return Image.fromarray(np.clip(np.asarray(picture) + noise, 0, 255).astype(np.uint8))


def test_a_drawn_scene_is_parsed_back_exactly():
    for scene, _ in examples(200, seed=3):
        read = parse_scene(draw(scene))
        assert read.background == scene.background
        assert set(read.shapes) == set(scene.shapes)


def test_an_instruction_is_parsed_back_to_its_edit_or_refused():
    for scene, task in examples(200, seed=4):
        assert read_instruction(task.instruction, scene) == task.op
        assert apply(scene, task.op) != scene
    for text in ("make it pretty", "paint the square the color of mud", ""):
        with pytest.raises(ValueError):
            read_instruction(text, scene)


def wrong_object(scene: Scene, task: Task) -> Image.Image:
    return draw(apply(scene, Op(other_shape(scene, task), task.op.paint)))


def right_and_another(scene: Scene, task: Task) -> Image.Image:
    return draw(apply(apply(scene, task.op), Op(other_shape(scene, task), None)))


@pytest.mark.slow
def test_the_exact_edit_scores_10_and_any_other_scores_0():
    assert mean_overall(right) > 9.99
    for edit in (unchanged, wrong_colour, wrong_object, right_and_another):
        assert mean_overall(edit) < 0.01, edit.__name__


@pytest.mark.slow
@pytest.mark.parametrize(("sigma_rgb", "least", "most"), [(12, 5, 8), (25, 0, 1)])
def test_noise_costs_marks(sigma_rgb: float, least: float, most: float):
    mark = mean_overall(lambda scene, task: with_noise(right(scene, task), sigma_rgb))
    assert least <= mark < most


def test_only_the_target_picture_has_a_high_likeness():
    for scene, task in examples(60, seed=9):
        target = right(scene, task)
        assert grade_likeness(target, target) == 10
        assert grade_likeness(target, unchanged(scene, task)) < 1
        other = draw(apply(scene, Op(other_shape(scene, task), None)))
        assert grade_likeness(target, other) < 1


def test_a_wish_is_fulfilled_only_by_the_shape_that_it_names():
    rng, grey = random.Random(10), Image.new("RGB", (64, 64), (150, 150, 150))
    wishes = captions.all_wishes()
    for prompt in captions.user_prompts(held_out=True):
        offset_px = (rng.randint(-2, 2), rng.randint(-2, 2))
        drawn = draw(captions.scene_of(prompt.wish, rng.randrange(3), offset_px))
        assert grade_wish(drawn, prompt.text) > 9.9
        other = rng.choice([wish for wish in wishes if wish != prompt.wish])
        assert grade_wish(draw(captions.scene_of(other)), prompt.text) < 0.1
        assert grade_wish(grey, prompt.text) == 0
    with pytest.raises(ValueError):
        grade_wish(grey, "a cat")


def test_the_weights_are_small_and_contain_no_pickle():
    bytes_of = Counter[str]()
    for file in filter(Path.is_file, WEIGHTS.rglob("*")):
        assert file.suffix in {".json", ".safetensors", ".jinja"}, file
        bytes_of[file.relative_to(WEIGHTS).parts[0]] += file.stat().st_size
    assert bytes_of.pop("policy") + bytes_of.pop("editor") < 10_000_000
    assert bytes_of.pop("image21") < 9_000_000
    assert all(size < 4_000_000 for size in bytes_of.values()), bytes_of


@pytest.fixture(scope="module")
def exam():
    """(held-out exam, transformer) on the shipped weights."""
    import torch
    from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
    from transformers import AutoTokenizer

    from tiny_world.builder.exam import Exam
    from tiny_world.builder.models import load_policy
    from tiny_world.builder.reader import Reader

    kw = {"pretrained_model_name_or_path": WEIGHTS / "editor", "torch_dtype": torch.float32}
    vae = AutoencoderKLQwenImage.from_pretrained(subfolder="vae", **kw).eval()
    transformer = QwenImageTransformer2DModel.from_pretrained(subfolder="transformer", **kw).eval()
    folder = WEIGHTS / "policy"
    reader = Reader(load_policy(folder), AutoTokenizer.from_pretrained(folder))
    return Exam(reader, vae, num=16, seed=11), transformer


def test_the_prompt_prefix_is_64_tokens(exam):
    assert exam[0].reader.prefix.shape == (1, 64)


@pytest.mark.slow
def test_the_untrained_policy_gives_the_right_answer_sometimes(exam):
    from tiny_world.builder.policy import p_right

    p_by_kind = p_right(exam[0].reader)
    assert all(0.1 < p < 0.5 for p in p_by_kind.values()), p_by_kind


@pytest.mark.slow
def test_the_editor_follows_descriptions(exam):
    held_out, transformer = exam
    right, wrong = (
        fmean(held_out.grade(held_out.render(transformer, words, steps=2)))
        for words in (held_out.right, held_out.wrong)
    )
    assert right > MIN_MARK_OF_RIGHT_WORDS
    assert wrong < MAX_MARK_OF_WRONG_WORDS
