"""What happens around an iteration."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from tiny_run import run_config

from rl.run import Run
from rl.system.dist import Dist


def test_replies_are_kept_until_a_checkpoint_covers_them(tmp_path: Path) -> None:
    run = Run.__new__(Run)
    outcomes = iter([None, tmp_path / "checkpoints/step_000001"])
    run.checkpoints = SimpleNamespace(save=lambda *_, **__: next(outcomes))
    run.learner = SimpleNamespace(state=lambda: ({}, {}), trainable_tensors=dict)
    run.record = SimpleNamespace(config=run_config().model_dump(mode="json"))
    run.dist, run.run_dir, run.last_metrics = Dist(), tmp_path, {}
    journals = [tmp_path / f"judge/iteration_00000{i}.rank0.jsonl" for i in (0, 1)]
    journals[0].parent.mkdir()
    for journal in journals:
        journal.touch()
    run.save(1)
    assert all(journal.exists() for journal in journals), "nothing was saved"
    run.save(1)
    assert [journal.exists() for journal in journals] == [False, True]
