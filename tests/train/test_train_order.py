"""The training loop calls its steps in the documented order."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from tiny_rollout import bare_run
from tiny_run import run_config

import rl.train as train
from rl.algorithm.metrics import Metrics
from rl.api.types import Completion, Prompt, Sample
from rl.rollout.stream import GradedGroup
from rl.run.run import Run

ROLL_OUT = ["prompts", "wake", "generate", "sleep", "begin", "render"]
LEARN = ["work_ahead", "graded 0", "accumulate 0", "graded 1", "accumulate 1", "step"]
RECORD = ["wake", "sync", "finish", "episodes", "save", "evaluate", "log"]


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def run(calls: list[str]) -> Run:
    """A run of two groups of one completion, whose methods append their names to `calls`."""

    def record_call(name: str, result: Any = None) -> Any:
        return lambda *_: (calls.append(name), result)[1]

    prompts = [Prompt(Sample(name, "do it"), (1, 2)) for name in "ab"]
    completions = [[Completion((3,), (-0.5,), "stop")] for _ in prompts]
    train_step = SimpleNamespace(
        work_ahead=record_call("work_ahead"),
        accumulate=lambda p, _: calls.append(f"accumulate {p}"),
        step=record_call("step", Metrics()),
    )

    def graded_groups(_: Any) -> Any:
        for p in range(2):
            calls.append(f"graded {p}")
            yield GradedGroup(p, [], [], [])

    run = bare_run(
        start=0,
        num_iterations=2,
        context=MagicMock(),
        recording=MagicMock(write_episodes=record_call("episodes")),
        checkpointing=MagicMock(
            save_if_due=record_call("save"), last_finished=MagicMock(note=record_call("finish"))
        ),
        checks=MagicMock(metrics=lambda rollout: Metrics()),
        prompt_order=SimpleNamespace(
            shard=record_call("prompts", prompts), num_replaced=0, num_distinct=lambda iteration: 2
        ),
        engine=SimpleNamespace(
            wake=record_call("wake"),
            sleep=record_call("sleep"),
            generate=record_call("generate", completions),
        ),
        learner=SimpleNamespace(begin=record_call("begin", train_step)),
        open_journal=lambda *_: None,
        bare_arms=lambda prompts_P: [None for _ in prompts_P],
        render=record_call("render", MagicMock()),
        graded_groups=graded_groups,
        sync_engine=record_call("sync", Metrics()),
        evaluate_if_due=record_call("evaluate", Metrics()),
        log=record_call("log"),
        may_sample=lambda sampled, done: (
            sampled - done <= run.config.max_staleness and sampled < run.num_iterations
        ),
    )
    return run


@pytest.mark.parametrize(
    ("max_staleness", "order"),
    [
        (0, 2 * [*ROLL_OUT, *LEARN, *RECORD]),
        (1, [*ROLL_OUT, *ROLL_OUT, *LEARN, *RECORD, *LEARN, *RECORD]),
    ],
)
def test_on_policy_each_rollout_is_learnt_from_before_the_next(
    run: Run, calls: list[str], max_staleness: int, order: list[str]
) -> None:
    run.config = run_config(max_staleness=max_staleness)
    train.train(run)
    assert calls[:3] == ["sync", *RECORD[-2:]], "the evaluation before training"
    assert calls[3:] == order


@pytest.mark.slow
def test_only_the_learner_starts_a_backward_pass() -> None:
    root = Path(train.__file__).parent
    callers = {
        file.relative_to(root).parts[0]
        for file in root.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "backward"
    }
    # The policies define `backward` of autograd functions, which the learner's calls reach.
    assert callers <= {"learner", "policies"}
