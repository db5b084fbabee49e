"""A small run config, its record, episodes and an engine, without any model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

from PIL import Image

from rl.api.types import Action, Completion, Episode, Prompt, Sample, SamplingParams, Status
from rl.config.schema import RunConfig
from rl.ranks.dist import Dist
from rl.record.run_record import RunRecord

BLUE, YELLOW = (Image.new("RGB", (48, 32), colour) for colour in ("blue", "yellow"))
SAMPLE = Sample("row-7", "make it red", (BLUE,), YELLOW, category="colour")


def run_config(**changes: Any) -> RunConfig:
    fields: dict[str, Any] = {
        "run_name": "tiny",
        "base_exp_dir": "unused",
        "seed": 3,
        "prompts_per_iteration": 2,
        "generations_per_prompt": 2,
        "policy": {"type": "qwen2_5_vl", "model_path": "some/base", "lora": {"r": 8}},
        "engine": {"type": "transformers", "max_num_seqs": 4},
        "renderer": {"type": "none"},
        "rewards": {"judge": {"type": "viescore"}},
        "data": {"train": [{"type": "edit_jsonl", "path": "train.jsonl"}]},
    }
    return RunConfig.model_validate(fields | changes)


def record_in(folder: Path, dist: Dist | None = None, **changes: Any) -> RunRecord:
    return RunRecord(folder, run_config(**changes), dist or Dist())


def episode(**changes: Any) -> Episode:
    """A scored episode; `changes` replace fields."""
    fields: dict[str, Any] = {
        "group_id": "it12/row-7",
        "prompt": Prompt(SAMPLE, (1, 2, 3)),
        "completion": Completion((5, 6), (-0.25, -1.0 / 3.0), "stop"),
        "action": Action("a red circle", "a red circle"),
        "noise_seed": 99,
        "image": Image.new("RGB", (48, 32), "red"),
        "status": Status.SCORED,
        "reward": 0.75,
        "parts": {"judge": 0.75, "judge/edit_success": 8.0},
        "replies": {"judge": ('{"score": [8, 9]}',)},
        "judge_s": 0.5,
    }
    return Episode(**(fields | changes))


def writes(completion: Completion) -> Mock:
    """An engine that always returns the same completion."""

    def generate(
        prompts_P: Sequence[Prompt], params: SamplingParams, seeds_P: Sequence[int]
    ) -> list[list[Completion]]:
        return [[completion] for _ in prompts_P]

    return Mock(generate=Mock(side_effect=generate))
