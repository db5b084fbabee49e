"""Makes the campaign's base runs: an uninterrupted one, and one stopped after two iterations."""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.faults import tiny_run
from benchmarks.faults.inject import EndAt
from benchmarks.faults.tiny_run import Judge


class Harness:
    """Trains both runs in `folder`, in a few seconds. The caller deletes the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows = tiny_run.write_rows(folder / "data")
        with Judge() as judge:
            self.uninterrupted = tiny_run.prepare(folder / "uninterrupted", self.rows, judge)
            ended = tiny_run.start(folder / "uninterrupted")
            assert ended.code == 0, ended.printed[-2000:]
            stopped = tiny_run.prepare(folder / "stopped", self.rows, judge)
            # An error, not kill -9, because the process must first save the second iteration.
            step = "rl.learner.train_step:TrainStep.step"
            tiny_run.start(stopped.parent, EndAt(step, 3, "RuntimeError"))
        assert tiny_run.on_disk(stopped) == 2, "the run did not end in its third iteration"
        self._stopped = stopped

    def copy_stopped(self, name: str) -> Path:
        """Copies the stopped run; returns the folder of the copy, which has no config yet."""
        folder = self.folder / name
        shutil.copytree(self._stopped, folder / tiny_run.RUN)
        return folder
