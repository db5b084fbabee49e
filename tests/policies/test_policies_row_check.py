"""What a check knows of a row's prompt before any weights, against the prompts that are built."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import tiny_qwen
import tiny_qwen3
from PIL import Image
from tiny_config import WEIGHTS
from transformers import AutoTokenizer

from rl.api.policy import ThoughtSection
from rl.api.types import PromptTemplate, Sample, UnusableSampleError
from rl.policies.policy_base import load_tokenizer
from rl.policies.prompting import chat_template
from rl.policies.qwen_vl import Qwen3VL, Qwen25VL
from rl.policies.qwen_vl_prompts import (
    Config,
    QwenPrompts,
    QwenRowCheck,
    Thinking,
    load_image_processor,
)

AREA = replace(tiny_qwen.TEMPLATE, image_area_px=1024 * 1024, image_multiple_px=32)
SIZES = [(8, 8), (64, 30), (300, 9), (1280, 8), (1400, 8), (8, 1590), (400, 400)]
WORDS = ["paint it", "u\u0308\u0958" * 12, "<|im_end|>" * 3, "a b c d e f g h " * 5]
THOUGHT = ThoughtSection(instruction="Think, {marker}, end by {marker} {marker}", marker="Answer:")
CASES: dict[str, tuple[Any, PromptTemplate | None, ThoughtSection | None]] = {
    "chat": (Qwen25VL, None, None),
    "chat, thought": (Qwen25VL, None, THOUGHT),
    "area": (Qwen25VL, AREA, None),
    "several": (Qwen3VL, tiny_qwen3.SEVERAL, None),
    "quickstart": (Qwen25VL, AREA, None),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, str]:
    folder = tmp_path_factory.mktemp("policies")
    (folder / "2").mkdir()
    (folder / "3").mkdir()
    paths = {
        Qwen25VL: tiny_qwen.save_policy_folder(folder / "2"),
        Qwen3VL: tiny_qwen3.save_policy_folder(folder / "3"),
    }
    file = folder / "2" / "tokenizer.json"
    cut = {"max_length": 20, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"truncation": cut}))
    file = folder / "2" / "preprocessor_config.json"
    numbers = json.loads(file.read_text())
    bounds = {"min_pixels": 4 * 3136, "size": {"shortest_edge": 784, "longest_edge": 12845056}}
    file.write_text(json.dumps(numbers | bounds))
    return paths


def built_length(config: Config, template: PromptTemplate, sample: Sample) -> int | None:
    """Tokens of the longest prompt that a run builds of the sample, with the pictures' tokens as
    the image processor makes them; None if it refuses a picture."""
    tokenizer = load_tokenizer(config.model_copy(update={"revision": "x"}))  # not the check's
    processor = load_image_processor(config)
    prompts = QwenPrompts(tokenizer, processor, template, max_prompt_tokens=10**6)
    thinking = Thinking(prompts, config.thought)
    try:
        prompt = thinking.prompt_to_sample(prompts.prompt(sample, sample.instruction))
    except UnusableSampleError as error:
        assert "absolute aspect ratio" in str(error)
        return None
    image_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    grids = prompt.model_inputs["image_grid_thw"]
    merged = int(grids.prod(1).sum()) // processor.merge_size**2
    assert prompt.token_ids.count(image_id) == merged
    return len(prompt.token_ids) + len(thinking._marker_ids)


@pytest.mark.parametrize("case", CASES)
def test_a_row_passes_exactly_if_its_prompt_is_built(
    folders: dict[Any, str], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", cache(AutoTokenizer.from_pretrained))
    cls, template, thought = CASES[case]
    folder = str(WEIGHTS / "policy") if case == "quickstart" else folders[cls]
    config = cls.Config(type="", model_path=folder, thought=thought)
    num_built = num_refused = 0
    for number, (size, words) in enumerate(product(SIZES, WORDS)):
        if number % 3:
            continue
        sizes = [size] * (1 + (case == "several") * number % 2)
        sample = Sample(str(number), words)
        pictures = tuple(Image.new("RGB", size) for size in sizes)
        length = built_length(
            config,
            template or chat_template(config.system_prompt),
            replace(sample, sources=pictures),
        )
        for room in (-1, 0, 1, 20, 1000):
            limit = (length or 2000) + room
            check: Any = cls.row_check(
                config.model_copy(update={"max_prompt_tokens": limit}), template, 16
            )
            if length is None or room < 0:
                with pytest.raises(UnusableSampleError, match=f"sample '{number}'"):
                    check(sample.id, sample.instruction, sizes, None)
                num_refused += 1
            else:
                assert check(sample.id, sample.instruction, sizes, None)
                num_built += 1
            if room == 1000 and template is None and max(size) <= 100 * min(size):
                assert "_builder" not in vars(check), "the fast rules suffice"
    assert num_built > 20 and num_refused > 8


def test_without_the_models_files_only_what_is_certain_is_said() -> None:
    config = Config(type="", model_path="nobody/nothing", max_prompt_tokens=120)
    sample = Sample("one", "paint it " * 3)
    check = QwenRowCheck(config, None, slot_px=28)
    assert check("one", "x", [], None) and not check("one", sample.instruction, [(64, 64)], None)
    small = replace(AREA, image_area_px=56 * 56 * 14)
    check = QwenRowCheck(config, small, slot_px=28)
    assert not check("one", sample.instruction, [(64, 64)] * 3, None)
    known = QwenRowCheck(config.model_copy(update={"max_prompt_tokens": 5000}), small, slot_px=28)
    assert known("one", sample.instruction, [(64, 64)], None)
    assert not known("one", sample.instruction, [None], None), "a picture that was not opened"
    with pytest.raises(UnusableSampleError, match=r"'one' has no source picture, .* give it one"):
        known("one", sample.instruction, [], None)
