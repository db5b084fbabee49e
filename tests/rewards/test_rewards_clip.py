"""The reward `clip`: cosines of the stock CLIPModel, CLIPScore by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_rewards import make
from tiny_sd3 import clip_tokenizer
from transformers import CLIPImageProcessorPil, CLIPModel

from rl.api.types import RewardInput, RewardOutput, Sample
from rl.rewards import clip
from rl.rewards.clip_model import ClipModel
from tiny_world.builder.prompt_models import make_clip

PROMPTS = ["a cat", "a purple rabbit eating carrots", "a square wheel", "glass"]
LONG = "a " * 100
"""102 tokens: one per letter, plus the start and end tokens."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny CLIP as transformers saves it, with random weights that tell pairs apart."""
    folder = tmp_path_factory.mktemp("clip")
    tokenizer = clip_tokenizer()
    torch.manual_seed(0)
    model = make_clip(tokenizer, width=32, projection=16, side_px=32)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    CLIPImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def reward(folder: Path) -> clip.Clip:
    return make(clip.Clip, clip.Config(model_path=str(folder)))


@pytest.fixture(scope="module")
def pictures() -> list[Image.Image]:
    """Pictures of several sizes, one with transparency."""
    rng = np.random.default_rng(0)
    sizes = [(32, 32), (64, 40), (40, 64), (50, 50)]
    arrays = [rng.integers(0, 255, (h, w, 3), dtype=np.uint8) for w, h in sizes]
    return [Image.fromarray(a) for a in arrays[:3]] + [Image.fromarray(arrays[3]).convert("RGBA")]


def reward_input(prompt: str, picture: Image.Image | None) -> RewardInput:
    return RewardInput(Sample("a", prompt), "4k, trending", picture)


def grade_all(reward: clip.Clip, pairs: Sequence[tuple[str, Image.Image]]) -> list[RewardOutput]:
    """Grades all pairs concurrently, as during rendering."""

    async def run() -> list[RewardOutput]:
        return await asyncio.gather(*(reward.grade(reward_input(*pair)) for pair in pairs))

    return asyncio.run(run())


def test_cosines_equal_those_of_the_stock_model(
    folder: Path, reward: clip.Clip, pictures: list[Image.Image]
) -> None:
    """The cosines are of the user's prompts, not of the completion "4k, trending"."""
    pairs = [*zip(PROMPTS, pictures, strict=True), (LONG, pictures[0])]
    cosines = [grade.parts["cosine"] for grade in grade_all(reward, pairs)]
    model = CLIPModel.from_pretrained(folder).eval()
    prompts, drawn = zip(*pairs, strict=True)
    tokens = clip_tokenizer()(list(prompts), padding=True, truncation=True, return_tensors="pt")
    processor = CLIPImageProcessorPil.from_pretrained(folder)
    pixels = processor([picture.convert("RGB") for picture in drawn], return_tensors="pt")
    with torch.no_grad():
        output = model(**tokens, **pixels)
    expected = (output.logits_per_image.diag() / model.logit_scale.exp()).tolist()
    assert cosines == pytest.approx(expected, abs=1e-5)
    assert max(cosines) - min(cosines) > 0.1, "the tiny model tells pairs apart"


def test_a_cosine_has_the_same_bits_whatever_was_compared_before(
    folder: Path, pictures: list[Image.Image]
) -> None:
    pairs = list(zip(PROMPTS, pictures, strict=True))
    first, second = (ClipModel(clip.Config(model_path=str(folder)), "cpu") for _ in range(2))
    forth = [first.compare(*pair) for pair in pairs]
    assert [second.compare(*pair) for pair in reversed(pairs)] == forth[::-1]


class Scripted:
    """A model that returns a fixed cosine, but fails for the prompt "bad"."""

    def __init__(self, cosine: float) -> None:
        self.cosine = cosine

    def compare(self, prompt: str, picture: Image.Image) -> tuple[float, bool]:
        if prompt == "bad":
            raise ValueError(prompt)
        return self.cosine, False


def with_model(config: clip.Config, model: Any) -> clip.Clip:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl.rewards.clip_model.ClipModel", lambda _config, _device: model)
        return make(clip.Clip, config)


@pytest.mark.parametrize(
    ("cosine", "scale", "value"),
    [(0.3, 2.5, 0.75), (0.4, 2.5, 1.0), (0.9, 2.5, 1.0), (-0.2, 2.5, 0.0), (0.3, 1.0, 0.3)],
)
def test_clipscore_by_hand(cosine: float, scale: float, value: float) -> None:
    reward = with_model(clip.Config(scale=scale), Scripted(cosine))
    [grade] = grade_all(reward, [("a cat", Image.new("RGB", (8, 8)))])
    assert grade.value == pytest.approx(value)
    assert grade.parts == {"cosine": cosine, "prompt_cut": 0.0}


def test_a_prompt_that_is_too_long_is_cut_and_reported(
    reward: clip.Clip, pictures: list[Image.Image]
) -> None:
    fits = "a" * 75  # plus the start and end tokens
    pairs = [(fits, pictures[0]), (fits + "b", pictures[0]), (LONG, pictures[0])]
    assert [grade.parts["prompt_cut"] for grade in grade_all(reward, pairs)] == [0, 1, 1]


def test_a_missing_picture_is_ungraded(reward: clip.Clip) -> None:
    grade = asyncio.run(reward.grade(reward_input("a cat", None)))
    assert grade.value is None and (grade.failure or "").startswith("no_image: ")


def test_the_stream_is_left_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would create a CUDA context on the thread's own device, cuda:0. Faked: the GPU."""
    gpu = MagicMock()
    for name in ("device", "stream", "Stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(gpu, name))
    monkeypatch.setattr(CLIPModel, "to", lambda model, _device: model)
    model = ClipModel(clip.Config(model_path=str(folder)), "cuda:1")
    model.compare("a cat", Image.new("RGB", (8, 8)))
    assert [call[0][:6] for call in gpu.mock_calls[-4:]] == ["device", "stream", "stream", "device"]


def test_a_picture_that_fails_fails_no_other() -> None:
    reward, picture = with_model(clip.Config(), Scripted(0.3)), Image.new("RGB", (8, 8))
    with pytest.raises(ValueError, match="bad"):
        grade_all(reward, [("a cat", picture), ("bad", picture)])
    [grade] = grade_all(reward, [("a cat", picture)])
    assert grade.value == pytest.approx(0.75)


def test_the_memory_plan_counts_the_parameters_of_clip(folder: Path) -> None:
    size = sum(parameter.numel() for parameter in CLIPModel.from_pretrained(folder).parameters())
    assert clip.Clip.cost(clip.Config(model_path=str(folder))).weights == {"model": size}
    assert clip.Clip.cost(clip.Config()).weights == {"model": pytest.approx(151.3e6, rel=0.01)}
    assert clip.Clip.cost(clip.Config(model_path="someone/else")).weights == {}
