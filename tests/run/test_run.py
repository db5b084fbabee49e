"""A run's bookkeeping around an iteration: checkpoints, journals, warnings and rank times."""

from __future__ import annotations

import errno
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from tiny_rollout import bare_run
from tiny_run import SAMPLE, episode, run_config

import rl.train as train
from rl.algorithm.metrics import Metrics
from rl.api.types import Prompt, Status
from rl.judge.client import JudgeStats
from rl.ranks.dist import Dist
from rl.record.checkpoint import Loaded
from rl.record.run_record import BackgroundWriter
from rl.rollout.stream import GradedGroup
from rl.run.alarms import LEARNING, Watch
from rl.run.checks import Checks
from rl.run.run import PendingStep, Recording
from rl.run.saving import Checkpointing
from rl.run.set_up import _restore


def checkpointing_in(folder: Path, save: Callable[..., Path | None], copy: Any) -> Checkpointing:
    """`copy`: that of the last finished iteration's state in host memory."""
    checkpoints: Any = SimpleNamespace(save=save, save_alone=save, folder=folder / "checkpoints")
    latest = SimpleNamespace(done=1)
    last: Any = SimpleNamespace(read=lambda: copy, in_memory=lambda: copy, latest=latest)
    return Checkpointing({}, Dist(), 9, checkpoints, BackgroundWriter(folder), last)


@pytest.mark.parametrize("has_copy", [False, True])
def test_replies_are_kept_until_a_checkpoint_covers_them(tmp_path: Path, has_copy: bool) -> None:
    outcomes = iter([None, tmp_path / "checkpoints/step_000001"])
    copy = SimpleNamespace(iteration=1) if has_copy else None
    checkpointing = checkpointing_in(tmp_path, lambda *_, **__: next(outcomes), copy)
    journals = [tmp_path / f"judge/iteration_00000{i}.rank0.jsonl" for i in (0, 1)]
    journals[0].parent.mkdir()
    others = [journals[0].with_name(name) for name in ("my_notes.rank0.jsonl", "a_000000.jsonl")]
    for journal in [*journals, *others]:
        journal.touch()
    checkpointing.save()
    checkpointing.writer.flush()
    assert all(journal.exists() for journal in journals), "nothing was saved"
    checkpointing.save()
    checkpointing.writer.flush()
    assert [journal.exists() for journal in journals] == [False, True]
    assert all(other.exists() for other in others), "files of the user are kept"


def test_an_iteration_is_freed_before_the_next_is_rolled_out(monkeypatch) -> None:
    """Its pictures, hidden states and graphs are freed."""
    pending_steps: list[weakref.ref[PendingStep]] = []

    def roll_out(run: Any, iteration: int) -> PendingStep:
        assert not any(ref() for ref in pending_steps), "the previous iteration is still in memory"
        pending = PendingStep(iteration, MagicMock(), MagicMock())
        pending_steps.append(weakref.ref(pending))
        return pending

    monkeypatch.setattr(train, "roll_out", roll_out)
    monkeypatch.setattr(train, "learn_from", lambda run, pending: None)
    line = {"recording": MagicMock(), "metrics_line_missing": False}
    train.train(bare_run(start=1, num_iterations=4, sync_engine=Metrics, **line))
    assert len(pending_steps) == 3


def test_each_cause_of_ungraded_episodes_is_logged_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The run continues without these episodes, so the log must say why."""
    checks = Checks(run_config(), Dist(), [], MagicMock(), Watch(LEARNING))
    run = bare_run(context=MagicMock(), checks=checks)
    lost = episode(status=Status.UNGRADED, reward=None, failure="mine: raised KeyError: 'answer'")
    rollout = SimpleNamespace(episodes=[[episode()] * 9 + [lost]], num_drawn=9, render_failures=[])
    rollout.groups = lambda timer, stop: iter(enumerate(rollout.episodes))
    rollout.finished = lambda: rollout
    for iteration in range(2):
        assert len(list(run.graded_groups(PendingStep(iteration, rollout, MagicMock())))) == 1
    assert capsys.readouterr().err == (
        "WARNING: rank 0: ungraded: mine: raised KeyError (logged once; all are in episodes/)\n"
    )


def test_a_checkpoint_is_saved_after_its_iteration_is_recorded(tmp_path: Path) -> None:
    """This holds in either thread that may save, and even if a picture cannot be written."""
    done: list[str] = []

    def fail() -> None:
        done.append("pictures")
        raise OSError(errno.EIO, "Input/output error")

    def save(*_: Any, **__: Any) -> Path:
        done.append("checkpoint")
        return tmp_path

    for copy, final in ((None, False), (SimpleNamespace(iteration=1), False), (None, True)):
        checkpointing = checkpointing_in(tmp_path, save, copy)
        checkpointing.writer.put("pictures", fail)
        with pytest.raises(OSError, match="Input/output"):
            checkpointing.save(final)
            checkpointing.writer.flush()
        checkpointing.writer.flush()
        assert done == ["pictures", "checkpoint"]
        done.clear()


def test_a_resumed_run_restores_the_metrics_of_its_last_iteration() -> None:
    metrics = {"loss/total": 0.25}
    loaded = Loaded(3, {}, {"learner": {}, "metrics": metrics}, None)
    checkpoints, last_finished = MagicMock(load=lambda newest: loaded), MagicMock()
    assert _restore(checkpoints, Path("step"), MagicMock(), last_finished, MagicMock()) == 3
    last_finished.note.assert_called_once_with(3, metrics)


def test_an_episode_waiting_to_be_written_holds_no_tensors_on_the_device(tmp_path: Path) -> None:
    full = episode(prompt=Prompt(SAMPLE, (1,), model_inputs={"pixels": MagicMock()}))
    written: list[Any] = []

    def write(done: int, episodes_PG: Any, advantages_PG: Any, bare_P: Any, *_: Any) -> None:
        written.extend([*episodes_PG[0], *bare_P])

    mock, writer = MagicMock(), BackgroundWriter(tmp_path)
    record: Any = SimpleNamespace(write_episodes=write)
    recording = Recording(mock, record, mock, writer, 9)
    recording.write_episodes(1, [GradedGroup(0, [full], [1.0], [])], [full])
    writer.flush()
    assert len(written) == 2, "the group's completion and its bare arm"
    assert all(each.image is full.image and not each.prompt.model_inputs for each in written)


def test_the_end_of_a_run_names_its_page_and_what_comes_next(tmp_path: Path) -> None:
    mock, record = MagicMock(), MagicMock(run_dir=Path("my runs/x"))
    Recording(mock, record, mock, BackgroundWriter(tmp_path), 9).end()
    assert "\n".join(call.args[0] for call in mock.say.call_args_list).split("\n") == [
        "page: 'my runs/x'/report/index.html",
        "what it learnt: rl report 'my runs/x'",
        "use it: rl edit --run 'my runs/x' ...",
    ]


@pytest.mark.parametrize(
    ("scores", "is_warned"),
    [([0.85, 1.0, 0.0], True), ([0.0, 1.0, 1.0], False), ([0.85, 7.0], False), ([], False)],
)
def test_a_judge_that_grades_from_0_to_1_is_named_once(capsys, scores, is_warned: bool) -> None:
    """Where 0 to 10 was asked for."""
    run = bare_run(
        held_out=[],
        start=0,
        recording=MagicMock(),
        checks=MagicMock(),
        checkpointing=MagicMock(last_finished=MagicMock(latest=MagicMock(metrics={}))),
        prompt_order=MagicMock(num_replaced=0),
        judge_passed=None,
        num_skipped_rows=0,
        judges={"judge": MagicMock(take_stats=lambda: JudgeStats(of_ten=scores))},
    )
    for done in range(3):
        run.log(done, Metrics())
    assert capsys.readouterr().err.count("grade from 0 to 1") == is_warned
