"""The held-out run on ranks with unequal shares."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tiny_ranks import run_ranks
from tiny_run import run_config

from rl.api.plug import PlugConfig, Resources
from rl.api.policy import PolicyConfig
from rl.api.renderer import Renderer
from rl.api.reward import Reward
from rl.api.types import (
    Action,
    Completion,
    Prompt,
    RewardInput,
    RewardOutput,
    Row,
    Sample,
    SamplingParams,
)
from rl.judge.background import BackgroundLoop
from rl.judge.client import JudgeError, JudgeRefused
from rl.ranks.dist import Dist
from rl.record.console import PhaseTimer
from rl.rollout.stream import RolloutContext
from rl.run.evaluation import evaluate


class Blank(Renderer):
    """Every picture is the same."""

    accepts = "text"

    def render(self, jobs):
        return ((number, Image.new("RGB", (4, 4))) for number, _ in enumerate(jobs))


class Gathering:
    """A policy whose every forward is a collective call, as under ZeRO-3."""

    reads_states = False
    starts_as_stock = False
    config = PolicyConfig(lora=None)

    def __init__(self, dist: Dist) -> None:
        self.num_forwards = 0
        self.module = torch.nn.Linear(1, 1)
        self.module.weight.ds_id = 0
        self._dist = dist

    def build_prompt(self, sample: Sample) -> Prompt:
        return Prompt(sample, (1,))

    def encode_completion(self, text: str) -> Completion:
        return Completion((2,), (0.0,), "stop")

    def pass_through_completion(self, sample: Sample) -> Completion:
        return self.encode_completion(sample.instruction)

    def stock_arms(self, prompt: Prompt) -> dict[str, tuple[Prompt, Completion]]:
        return {"stock": (prompt, self.pass_through_completion(prompt.sample))}

    def decode_actions(self, rows: Sequence[Row], batch: None, outputs: None) -> list[Action]:
        self.num_forwards += 1
        assert self._dist.gather("forward") == ["forward"] * self._dist.world_size
        return [Action("words", "words") for _ in rows]


class Greedy:
    """An engine that always writes the same."""

    def generate(
        self, prompts_P: Sequence[Prompt], params: SamplingParams, seeds_P: Sequence[int]
    ) -> list[list[Completion]]:
        return [[Completion((2,), (-0.5,), "stop")] for _ in prompts_P]

    def sleep(self) -> None: ...

    def wake(self) -> None: ...


class Refusing(Reward):
    """Refuses one sample's, which one rank alone has."""

    def __init__(self) -> None:
        """Needs nothing."""

    async def grade(self, evidence: RewardInput) -> RewardOutput:
        if evidence.sample.id == "0":
            raise JudgeRefused("HTTP 401: the key has expired")
        return RewardOutput(0.5)


class Fixed(Reward):
    def __init__(self) -> None:
        """Needs nothing."""

    async def grade(self, evidence: RewardInput) -> RewardOutput:
        return RewardOutput(0.25 if evidence.sample.id == "0" else 0.75)


def held_out_run(num_samples: int, folder: str) -> dict[str, Any]:
    dist = Dist.from_env("cpu")
    policy = Gathering(dist)
    # Only one sample has a reference, so only one rank scores one.
    samples = [
        Sample(str(i), "do it", reference="right" if i == 0 else None) for i in range(num_samples)
    ]
    with BackgroundLoop() as loop:
        context = RolloutContext(
            run_config(optimizer={"max_tokens_per_micro_batch": 3}),
            policy,
            Blank(PlugConfig(), Resources(None, "cpu")),
            {"fixed": Fixed()},
            True,
            loop,
        )
        metrics = evaluate(context, Greedy(), samples, 0, Path(folder), dist, PhaseTimer())
    seen = dist.reduce(metrics)
    dist.close()
    return {"forwards": policy.num_forwards, **seen}


def test_ranks_with_fewer_samples_keep_step_and_count_nothing_twice(tmp_path: Path) -> None:
    ranks = run_ranks(held_out_run, 2, 3, str(tmp_path))
    # A group a pack. Two and one samples, one and no reference, two and one stock arms: five
    # forwards on either rank.
    assert [seen.pop("forwards") for seen in ranks] == [5, 5]
    assert ranks[0]["eval/reward_gain"] == 0.0
    assert ranks[0]["eval/reward"] == (0.25 + 0.75 + 0.75) / 3
    assert ranks[0]["eval_reference/reward"] == 0.25
    lines = (tmp_path / "evaluation/it_000000/records.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["id"] for line in lines) == ["0", "1", "2"]


def refused_run(folder: str) -> str:
    dist = Dist.from_env("cpu")
    policy = Gathering(dist)
    samples = [Sample(str(i), "do it") for i in range(3)]
    with BackgroundLoop() as loop:
        context = RolloutContext(
            run_config(),
            policy,
            Blank(PlugConfig(), Resources(None, "cpu")),
            {"judge": Refusing()},
            True,
            loop,
        )
        try:
            evaluate(context, Greedy(), samples, 0, Path(folder), dist, PhaseTimer())
        except JudgeError as error:
            return str(error)
        finally:
            dist.close()
    return "nothing was refused"


def test_what_one_rank_s_judge_refuses_stops_all(tmp_path: Path) -> None:
    assert run_ranks(refused_run, 2, str(tmp_path)) == ["HTTP 401: the key has expired"] * 2
