"""The `qwen_image_21` plugin: its prompt, its config checks, its memory plan and its sigmas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_qwen_image_21 as tiny
from tiny_messages import holds
from tiny_qwen_image_21 import references
from tiny_run import run_config

from rl.api.plugin import Resources
from rl.api.types import RenderJob, Sample
from rl.policies.prompting import PICTURE as PICTURE_TOKENS
from rl.policies.prompting import for_pictures
from rl.renderers.qwen_image_21 import QwenImage21
from rl.renderers.qwen_image_21_config import Config
from rl.renderers.qwen_image_21_loop import QwenImage21Loop
from rl.renderers.qwen_image_config import output_size


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("image21")
    tiny.make_stock().save(folder)
    return folder


def make_config(path: Path | str, **changes: object) -> Config:
    return Config(**{**tiny.TINY, "model_path": str(path), **changes})


def problems(config: Config) -> list[str]:
    section = {"type": "qwen3_vl", "model_path": "some/base"}
    return QwenImage21.problems(config, run_config(policy=section))


def load(config: Config) -> QwenImage21Loop:
    return QwenImage21(config, Resources(None, "cpu")).loop


@pytest.mark.parametrize("number", [0, 1, 3])
def test_the_prompt_equals_that_of_the_stock_pipeline(monkeypatch, number: int) -> None:
    pipeline = tiny.stock_pipeline(tiny.make_stock())
    stock_prompts: list[str] = []
    processor = pipeline.processor

    def recording_processor(text: list[str], **kwargs: Any) -> Any:
        stock_prompts.extend(text)
        return processor(text=text, **kwargs)

    monkeypatch.setattr(pipeline, "processor", recording_processor)
    pipeline._get_qwen_prompt_embeds("make it blue", references(number) or None)
    template = QwenImage21.prompt_template(make_config("x"))
    text = for_pictures(template, number).text
    ours = text.replace("{image}", PICTURE_TOKENS).replace("{instruction}", "make it blue")
    assert [ours] == stock_prompts
    tokenizer = tiny.make_encoder()[1].tokenizer
    assert len(tokenizer(template.drop_prefix).input_ids) == pipeline._drop_idx
    assert ours.startswith(template.drop_prefix)
    assert (template.max_pictures, template.needs_picture) == (10, False)


def test_the_width_of_the_states_is_read_from_the_transformer(folder: Path) -> None:
    assert QwenImage21.state_dim_of(make_config(folder)) == tiny.STATE_DIM
    assert QwenImage21.state_dim_of(Config(type="x")) == 4096
    assert QwenImage21.state_dim_of(make_config("owner/unknown")) is None


def test_the_memory_plan_counts_the_keys_of_the_sources() -> None:
    """A source of 1024^2 px has 4096 tokens; keys and values of a token are 32 layers x 2 x 4096 x
    2 bytes in bfloat16, so 2.15 GB per source; guidance doubles them."""

    def bytes_of(**changes: object) -> float:
        config = Config(type="x", batch_size=1, **changes)
        return 2 * QwenImage21.cost(config).activations["transformer"]

    keys, forward = 4096 * 32 * 2 * 4096 * 2, 18 * 4096 * 4096 * 2
    assert bytes_of(max_pictures=3) - bytes_of(max_pictures=2) == keys + forward
    guided = bytes_of(max_pictures=1, true_cfg_scale=2.0)
    text_keys = 512 * 32 * 2 * 4096 * 2
    # Positive and negative rows have a forward each, so that its memory does not double.
    assert guided - bytes_of(max_pictures=1) == keys + text_keys


def test_the_last_source_sets_the_size(folder: Path) -> None:
    config = make_config(folder)
    assert QwenImage21(config, Resources(None, "cpu")).state_dim == tiny.STATE_DIM

    def drawn_size(number: int) -> tuple[int, int]:
        sample = Sample("s", "", sources=tuple(references(3)[:number]))
        return output_size(config, RenderJob(sample, None, 0))

    assert drawn_size(2) == drawn_size(0) == (64, 64)
    assert drawn_size(3) == (32, 96)


def test_a_few_step_checkpoint_contains_its_sigmas(folder: Path, tmp_path: Path) -> None:
    for part in folder.iterdir():
        (tmp_path / part.name).symlink_to(part)
    levels = [1.0, 0.8, 0.3]
    index = {"_class_name": "QwenImage21Pipeline", "sample_sigmas": levels}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    (problem,) = problems(make_config(tmp_path))
    assert holds(problem, "num_steps: 4 ... 3 sample_sigmas ... num_steps: 3")
    with pytest.raises(ValueError, match=r"renderer\.num_steps: 4"):
        load(make_config(tmp_path))
    assert load(make_config(tmp_path, num_steps=3)).parts.sigmas == tuple(levels)
    (tmp_path / "model_index.json").write_text(json.dumps(index | {"sample_sigmas": "low"}))
    (problem,) = problems(make_config(tmp_path))
    assert holds(problem, "sample_sigmas ... (0, 1]")
