"""The loop does what `train.py` says, in the order in which it says it."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from tiny_run import run_config

from rl import train
from rl.algorithm.metrics import Metrics
from rl.api.types import Completion, Prompt, Sample
from rl.console.console import PhaseTimer
from rl.ranks.dist import Dist
from rl.rollout.graded_groups import GradedGroup
from rl.run.run import Run

ROLL_OUT = ["prompts", "wake", "generate", "sleep", "begin", "render"]
LEARN = ["prefetch_reference", "graded 0", "accumulate 0", "graded 1", "accumulate 1", "step"]
RECORD = ["wake", "sync", "finish", "episodes", "save", "evaluate", "log"]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def run(said: list[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run of two groups of one completion, whose verbs note their names."""

    def verb(name: str, result: Any = None) -> Any:
        return lambda *_: (said.append(name), result)[1]

    run = Run.__new__(Run)
    run.dist, run.timer, run.start, run.num_iterations = Dist(), PhaseTimer(), 0, 2
    run.context = MagicMock()
    run.recording = MagicMock(write_episodes=verb("episodes"))
    run.checkpointing = MagicMock(finish=verb("finish"), save_if_due=verb("save"))
    run.checks = MagicMock(metrics=lambda rollout: Metrics())
    prompts = [Prompt(Sample(name, "do it"), (1, 2)) for name in "ab"]
    run.prompt_order = SimpleNamespace(shard=verb("prompts", prompts))
    completions = [[Completion((3,), (-0.5,), "stop")] for _ in prompts]
    run.engine = SimpleNamespace(
        wake=verb("wake"), sleep=verb("sleep"), generate=verb("generate", completions)
    )
    train_step = SimpleNamespace(
        prefetch_reference=verb("prefetch_reference"),
        accumulate=lambda p, _: said.append(f"accumulate {p}"),
        step=verb("step", Metrics()),
    )
    run.learner = SimpleNamespace(begin=verb("begin", train_step))

    def graded_groups(_: Any) -> Any:
        for p in range(2):
            said.append(f"graded {p}")
            yield GradedGroup(p, [], [], [])

    verbs = {
        "open_journal": lambda *_: None,
        "bare_arms": lambda prompts_P: [None for _ in prompts_P],
        "render": verb("render", MagicMock()),
        "graded_groups": graded_groups,
        "sync_engine": verb("sync", Metrics()),
        "evaluate_if_due": verb("evaluate", Metrics()),
        "log": verb("log"),
        "may_sample": lambda sampled, done: (
            sampled - done <= run.config.max_staleness and sampled < run.num_iterations
        ),
    }
    for name, stand_in in verbs.items():
        monkeypatch.setattr(run, name, stand_in, raising=False)
    return run


def test_on_policy_the_two_verbs_alternate(run: Run, said: list[str]) -> None:
    run.config = run_config()
    train.train(run)
    assert said[:3] == ["sync", *RECORD[-2:]], "what was measured before training"
    assert said[3:] == 2 * [*ROLL_OUT, *LEARN, *RECORD]


def test_one_step_off_the_next_rollout_comes_before_the_last_is_learnt(
    run: Run, said: list[str]
) -> None:
    run.config = run_config(max_staleness=1)
    train.train(run)
    assert said[3:] == [*ROLL_OUT, *ROLL_OUT, *LEARN, *RECORD, *LEARN, *RECORD]


def test_nothing_but_the_learner_calls_a_backward() -> None:
    root = Path(train.__file__).parent
    calling = {
        file.relative_to(root).parts[0]
        for file in root.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "backward"
    }
    # The policies' are those of autograd functions, which the learner's own calls reach.
    assert calling <= {"learner", "policies"}
