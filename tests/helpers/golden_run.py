"""A run with recorded completions and judge replies, which is reproducible on any CPU.

Usually runs on two CPUs diverge: sampling and rounding to bytes amplify differences of a last bit.
Here the engine returns the completions of `golden_run.json`, and the judge the replies, whatever
the picture. Both are third-party plugins (`'tests.helpers.golden_run'`).

`python tests/helpers/golden_run.py` records again: it samples from the current weights and draws
scores.
"""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from rl.api.engine import EngineSetup
from rl.api.judge import Answer, Question
from rl.api.plugin import PluginConfig, Resources
from rl.api.types import Completion, Prompt, RewardInput, RewardOutput, SamplingParams
from rl.config.schema import JudgeConfig
from rl.engines.transformers import TransformersEngine
from rl.rewards.judged import VieScore, VieScoreConfig
from rl.seeds import derive_seed

T = TypeVar("T")

FILE = Path(__file__).with_suffix(".json")
RECORDING = "RECORD_GOLDEN_RUN"
"""Environment variable."""
SEED, NUM_ITERATIONS = 3, 5
RECORDED_METRICS = (
    "loss/total",
    "loss/policy",
    "loss/kl",
    "optimizer/grad_norm",
    "kl/reference_k1",
    "kl/reference_k3",
    "policy/entropy",
    "reward/mean",
    "reward/std",
)
"""Recorded for each iteration. The trainer's log-probs are tested as well: the engine returns
recorded ones, and `mismatch/max_abs_dlogp` is the largest difference of any token."""


def config_of(models: dict[str, str], folder: Path, **changes: Any) -> dict[str, Any]:
    """The config of the run with recorded completions and replies, which needs no judge."""
    import tiny_loop

    settings = {
        "seed": SEED,
        "num_iterations": NUM_ITERATIONS,
        "engine": {"type": "tests.helpers.golden_run"},
        "rewards": {"viescore": {"type": "tests.helpers.golden_run"}},
        "final_reward": {"weights": {"viescore": 1}},
        "judge": {},
        "evaluation": {"every_n_iterations": 0},
    }
    return tiny_loop.config_of(models, folder, **{**settings, **changes})


@cache
def recorded() -> dict[str, Any]:
    """`completions`: group id -> (ids, log-probs in nats) of each; `replies`: completion -> replies
    on semantics and on perception; `metrics`: a row per iteration."""
    return dict(json.loads(FILE.read_text(encoding="utf-8")))


def assert_recorded(
    rows: Sequence[dict[str, Any]], names: Sequence[str] = RECORDED_METRICS
) -> None:
    """The metrics of a run's iterations are the recorded ones. The absolute tolerance is for losses
    that are 0 but for rounding."""
    import pytest

    for row, expected in zip(rows, recorded()["metrics"], strict=True):
        for name in names:
            value = pytest.approx(expected[name], rel=1e-3, abs=1e-5)
            assert row[name] == value, (name, row["iteration"])


class RecordedEngine(TransformersEngine):
    """Returns the recorded completions."""

    def __init__(self, config: PluginConfig, setup: EngineSetup) -> None:
        super().__init__(config, setup)
        groups = {} if RECORDING in os.environ else recorded()["completions"]
        self._rows = {derive_seed(SEED, "sampling", group): groups[group] for group in groups}

    def generate(
        self, prompts_P: Sequence[Prompt], params: SamplingParams, seeds_P: Sequence[int]
    ) -> list[list[Completion]]:
        if not self._rows.keys() >= set(seeds_P):  # recording, or the probe of a sync
            return super().generate(prompts_P, params, seeds_P)
        return [
            [Completion(tuple(ids), tuple(nats), "length") for ids, nats in self._rows[seed]]
            for seed in seeds_P
        ]


class RecordedJudge:
    """Gives one reply about source and result, and another about the result."""

    config = JudgeConfig()

    def __init__(self, replies: Sequence[str] = ()) -> None:
        self._replies = replies

    async def ask(
        self, question: Question, parse: Callable[[str], T], repeat: int = 0
    ) -> Answer[T]:
        num_pictures = sum(not isinstance(part, str) for part in question.parts)
        reply = self._replies[2 - num_pictures]
        return Answer(parse(reply), (reply,), None, 1, 0.0)


class RecordedVieScore(VieScore):
    """Grades by the replies that were recorded for the same words."""

    needs_judge = False
    runs_model = True  # skips the trial on made-up words before the run

    def __init__(self, config: VieScoreConfig, resources: Resources) -> None:
        super().__init__(config, replace(resources, judge=RecordedJudge()))

    async def grade(self, reward_input: RewardInput) -> RewardOutput:
        words = reward_input.text
        replies = {} if RECORDING in os.environ else recorded()["replies"]
        reward = copy.copy(self)
        reward.judge = RecordedJudge(replies.get(words) or _random_replies(words))  # bare: random
        return await VieScore.grade(reward, reward_input)


def _random_replies(words: str) -> list[str]:
    """Replies with random scores, 2-10, that depend on the words."""
    rng = random.Random(words)
    scores = [[rng.randint(2, 10) for _ in range(2)] for _ in range(2)]
    return [json.dumps({"reasoning": "as it is", "score": pair}) for pair in scores]


def record() -> None:
    import tiny_loop

    os.environ[RECORDING] = "1"
    with TemporaryDirectory() as name:
        folder = Path(name)
        config = config_of(tiny_loop.save_models(folder), folder)
        tiny_loop.run(tiny_loop.write_config(folder, config))
        rows = tiny_loop.metrics_of(folder / "tiny")
        episodes = tiny_loop.episodes_of(folder / "tiny")
    completions: dict[str, list[Any]] = {}
    replies: dict[str, list[str]] = {}
    for episode in episodes:
        written = [episode["token_ids"], episode["sampler_logprobs"]]
        completions.setdefault(episode["group_id"], []).append(written)
        replies[episode["completion"]] = episode["replies"]["viescore"]
    metrics = [{name: row[name] for name in RECORDED_METRICS} for row in rows[1:]]
    record = {"completions": completions, "replies": replies, "metrics": metrics}
    lines = (f'"{key}": {json.dumps(value)}' for key, value in record.items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    record()
