"""Live weights are saved when the last iteration's state is too large to keep a copy."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from tiny_checkpoints import checkpoints_in
from tiny_run import run_config

from rl.ranks.dist import Dist
from rl.run import saving
from rl.run.saving import LastFinished, save_before_leaving


@pytest.mark.parametrize(
    ("changes", "saved"),
    [
        ({}, ["step_000003"]),
        ({"state_is_consistent": False}, []),  # the update raised midway
        ({"version": 4}, []),  # the next iteration's update was applied
    ],
)
def test_live_weights_are_saved_only_if_they_are_those_of_a_finished_iteration(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    saved: list[str],
) -> None:
    monkeypatch.setattr(saving, "HELD_STATE_GB", 0.0)
    state = ({"master/w": torch.ones(2)}, {"version": 3})
    learner: Any = SimpleNamespace(
        state_bytes=24, version=3, state_is_consistent=True, state=lambda **_: state
    )
    last = LastFinished(learner, MagicMock(), run_config().model_dump(mode="json"), Dist())
    last.note(3, {})
    vars(learner).update(changes)
    save_before_leaving(last, checkpoints_in(tmp_path), Dist(), RuntimeError("injected"))
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_*")] == saved
    message = (
        "the iterations after 0, up to 3, are lost (a later update began); newest checkpoint: none"
    )
    assert (message in capsys.readouterr().err) == (not saved)
