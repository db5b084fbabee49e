"""The program of each rank in `test_train_ranks.py`: the loop, with forced chunks and shards.

Otherwise a tiny head would be projected in one chunk, and ZeRO-3 would not shard so small a model.
Every rank saves its weights after each iteration. The environment variable TROUBLE causes a fault
of the last rank: 'refused', 'killed' and 'stopped' between two grades of its judge, 'raised',
'frozen' and 'deadlocked' between two backward passes of the second iteration.
"""

from __future__ import annotations

import os
import signal
import sys
from itertools import count

import torch

import rl.train as train
from benchmarks.faults.inject import end_at
from rl.algorithm.metrics import Metrics
from rl.api.types import RewardInput, RewardOutput
from rl.judge.client import JudgeRefused
from rl.learner import backends
from rl.policies import trained_module
from rl.run.run import Run
from tests.helpers.brightness_reward import Brightness

LOGITS_PER_CHUNK = 1500
"""Two tokens of the tiny vocabulary."""
TROUBLED_VERDICT = 13
"""In the second iteration, if a rank has two groups of four and a bare arm each."""


BETWEEN_BACKWARDS = {"raised": "OutOfMemoryError", "frozen": "SIGSTOP", "deadlocked": "deadlock"}


def note_weights(run: Run, done: int) -> None:
    weights = {name: t.detach().clone() for name, t in run.learner.trainable_tensors().items()}
    parameters = run.context.policy.module.parameters()
    num_sharded = sum(p.numel() == 0 and getattr(p, "ds_numel", 0) > 0 for p in parameters)
    note = {"weights": weights, "sharded": num_sharded, "version": run.learner.version}
    torch.save(note, run.config.run_dir / f"weights_{done}.rank{run.dist.rank}.pt")


def trouble_last_rank(trouble: str, at: int) -> None:
    if int(os.environ["RANK"]) < int(os.environ["WORLD_SIZE"]) - 1:
        return
    if trouble in BETWEEN_BACKWARDS:
        end_at("rl.learner.train_step:TrainStep.accumulate", 3, BETWEEN_BACKWARDS[trouble])
        return
    number, grade = count(1), Brightness.grade

    async def graded(self: Brightness, evidence: RewardInput) -> RewardOutput:
        if next(number) == at:
            if trouble == "refused":
                raise JudgeRefused("HTTP 401: the key has expired")
            os.kill(os.getpid(), signal.SIGKILL if trouble == "killed" else signal.SIGTERM)
        return await grade(self, evidence)

    Brightness.grade = graded  # type: ignore[method-assign]


if __name__ == "__main__":
    backends.PERSISTENCE_THRESHOLD_NUMEL = 0
    trained_module.token_logprobs.__defaults__ = (LOGITS_PER_CHUNK,)
    measure = train.measure

    def note_and_measure(run: Run, done: int, metrics: Metrics) -> None:
        note_weights(run, done)
        measure(run, done, metrics)

    train.measure = note_and_measure
    if "TROUBLE" in os.environ:
        trouble_last_rank(os.environ["TROUBLE"], at=TROUBLED_VERDICT)
    train.main(sys.argv[1:])
