"""What happens around an iteration."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from tiny_run import episode, run_config

from rl import train
from rl.algorithm.metrics import Metrics
from rl.api.types import Status
from rl.ranks.dist import Dist
from rl.run.run import PendingStep, Run


def test_replies_are_kept_until_a_checkpoint_covers_them(tmp_path: Path) -> None:
    run = Run.__new__(Run)
    run.said = set()
    outcomes = iter([None, tmp_path / "checkpoints/step_000001"])
    run.checkpoints = SimpleNamespace(save=lambda *_, **__: next(outcomes))
    run.last_finished = SimpleNamespace(read=lambda: None, done=1)
    run.dist, run.run_dir = Dist(), tmp_path
    journals = [tmp_path / f"judge/iteration_00000{i}.rank0.jsonl" for i in (0, 1)]
    journals[0].parent.mkdir()
    others = [journals[0].with_name(name) for name in ("my_notes.rank0.jsonl", "a_000000.jsonl")]
    for journal in [*journals, *others]:
        journal.touch()
    run.save()
    assert all(journal.exists() for journal in journals), "nothing was saved"
    run.save()
    assert [journal.exists() for journal in journals] == [False, True]
    assert all(other.exists() for other in others), "not of our making"


def test_an_iteration_is_let_go_before_the_next_is_rolled_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its pictures, and what is left on the device of its states and graphs."""
    pending_steps: list[weakref.ref[PendingStep]] = []

    def roll_out(run: Any, iteration: int) -> PendingStep:
        assert not any(ref() for ref in pending_steps), "an iteration outlived its update"
        pending = PendingStep(iteration, MagicMock(), MagicMock())
        pending_steps.append(weakref.ref(pending))
        return pending

    monkeypatch.setattr(train, "roll_out", roll_out)
    monkeypatch.setattr(train, "learn_from", lambda run, pending: None)
    run = Run.__new__(Run)
    run.said = set()
    run.config, run.dist, run.start, run.num_iterations = run_config(), Dist(), 1, 4
    run.console = run.timer = run.tracker = MagicMock()
    run.lacks_line = False
    monkeypatch.setattr(run, "sync_engine", Metrics, raising=False)
    train.train(run)
    assert len(pending_steps) == 3


def test_a_cause_of_ungraded_episodes_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The run goes on without them: a night's log has to say so."""
    run = Run.__new__(Run)
    run.said = set()
    run.config, run.policy, run.dist, run.said = run_config(), MagicMock(), Dist(), set()
    good = episode()
    lost = replace(
        good, status=Status.UNGRADED, reward=None, failure="mine: raised KeyError: 'answer'"
    )
    rollout = SimpleNamespace(episodes=[[good] * 9 + [lost]], reward_errors={}, pictures=[])
    rollout.groups = lambda timer, stop: iter(enumerate(rollout.episodes))
    rollout.finished = lambda: rollout
    run.timer = MagicMock()
    for iteration in range(2):
        assert len(list(run.graded_groups(PendingStep(iteration, rollout, MagicMock())))) == 1
    assert capsys.readouterr().err == (
        "WARNING: rank 0: 1 completions ungraded: mine: raised KeyError (said once; each is in "
        "episodes/)\n"
    )
