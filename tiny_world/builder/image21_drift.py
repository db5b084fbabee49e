"""Stage image21_drift: `drift.py` for the policy that reads one or two pictures."""

from __future__ import annotations

import random
from pathlib import Path

from transformers import AutoTokenizer

from tiny_world.builder.drift import Answer, Examples, save_bank
from tiny_world.builder.image21_models import load_policy
from tiny_world.builder.image21_policy import make_case
from tiny_world.builder.image21_reader import PicturesReader
from tiny_world.builder.training import WEIGHTS
from tiny_world.scenes import describe


def build(work: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS / "image21/policy")  # nosec B615 # local
    save_bank(
        work / "image21_drift.safetensors",
        lambda: load_policy(work / "image21_policy_doubting"),
        lambda policy: PicturesReader(policy, tokenizer),
        _examples,
        num_tunings=6,
        batch=16,
    )


def _examples(rng: random.Random, answer: Answer, batch: int) -> Examples:
    cases = [make_case(rng) for _ in range(batch)]
    texts = [describe(answer(case.scenes[0], case.task), case.scenes[0]) for case in cases]
    return [case.pictures for case in cases], [case.task.instruction for case in cases], texts
