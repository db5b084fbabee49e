"""The checkpoints of a run in the test's own folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_checkpoints import checkpoints_in

from rl.record.checkpoint import Checkpoints


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return checkpoints_in(tmp_path)
