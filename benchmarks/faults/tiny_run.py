"""Runs the smallest config that trains, saves and asks a judge, in a process with all imports."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.faults.inject import Injection, at_calls
from rl.ranks.supervision import on_one_node
from rl.record import checkpoint
from tests.helpers.tiny_config import REPO
from tests.helpers.tiny_faulty_judge import MODEL, Fault, FaultyJudge
from tests.helpers.tiny_loop import assert_same_run, assert_same_weights, write_config
from tests.helpers.tiny_ranks import spawn

NUM_ITERATIONS = 3
NUM_ROWS = 6
"""Two rows per iteration, so that each row is used once."""
RUN = "tiny"
PATIENCE_S = 300.0
"""Time limit of a run, which takes a few seconds if the machine is not busy."""
WAITS = b"once there is room"
"""Printed by a run that waits for disk space; `start` then sends SIGTERM."""
WAIT_S = 5.0
"""Interval at which `start` looks for WAITS."""


class Judge(FaultyJudge):
    """A judge whose score is a hash of the question, so that a repeated question has the same."""

    def begin(self, body: bytes, headers: dict[str, str]) -> Fault:
        fault = super().begin(body, headers)
        if fault != Fault():
            return fault
        question = json.dumps(json.loads(body)["messages"]).encode()
        return Fault(reply=json.dumps({"score": [hashlib.sha256(question).digest()[0] % 11]}))


def write_rows(folder: Path) -> Path:
    """Writes the data, a JSONL file and pictures `row_<n>.png` of different colours."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for n in range(NUM_ROWS):
        Image.new("RGB", (28, 28), (40 * n, 90, 200 - 30 * n)).save(folder / f"row_{n}.png")
        rows.append({"image": f"row_{n}.png", "instruction": f"What colour is picture {n}?"})
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config_of(folder: Path, rows: Path, judge: FaultyJudge, **changes: Any) -> dict[str, Any]:
    """The config of the run in `folder`; `rows`: the data's JSONL file."""
    config: dict[str, Any] = {
        "run_name": RUN,
        "base_exp_dir": str(folder),
        "seed": 3,
        "num_iterations": NUM_ITERATIONS,
        "prompts_per_iteration": 2,
        "generations_per_prompt": 2,
        "policy": {
            "type": "qwen2_5_vl",
            "model_path": "pkg://tiny_world/weights/reasoner",
            "dtype": "float32",
            "lora": {"r": 2, "alpha": 4, "target_modules": ["q_proj"]},
            "max_prompt_tokens": 128,
        },
        "engine": {"type": "transformers"},
        "renderer": {"type": "none"},
        "rewards": {"judge_score": {"type": "benchmarks.faults.judge_score"}},
        "judge": {
            "api_base": judge.api_base,
            "model": MODEL,
            "timeout_s": 5.0,
            "max_outage_s": 5.0,
        },
        "data": {"train": [{"type": "edit_jsonl", "path": str(rows)}]},
        "sampling": {"max_completion_tokens": 6},
        "optimizer": {"backend": "torch", "learning_rate": 1e-2},
        "checkpoint": {"save_every_n_iterations": 1},
        "tracking": {"page": False},
    }
    return {**config, **changes}


@dataclass(frozen=True)
class Ended:
    """How one process ended."""

    code: int | None
    """The exit code; -n after signal n; None if the process exceeded its time limit."""
    printed: str
    finished: int
    """Number of iterations whose update was applied and synced to the engine."""


def start(folder: Path, inject: Injection | None = None, patience_s: float = PATIENCE_S) -> Ended:
    """Runs `folder/config.jsonnet` in a new process until it ends or `patience_s` has passed."""
    began = time.monotonic()
    note = folder / "finished.txt"
    note.write_text("0")
    receiver, sender = Pipe(duplex=False)
    process = spawn(_rank, str(folder), inject, sender)
    sender.close()
    printed: list[bytes] = []
    reader = threading.Thread(target=_read, args=(receiver.fileno(), printed), daemon=True)
    reader.start()
    was_terminated = False
    while process.exitcode is None and time.monotonic() - began < patience_s:
        process.join(WAIT_S)
        if not was_terminated and WAITS in b"".join(printed):
            was_terminated = True
            process.terminate()
    code = process.exitcode
    if code is None:
        process.kill()
        process.join()
    reader.join(5.0)
    text = b"".join(printed).decode(errors="replace")
    return Ended(code, text, int(note.read_text() or 0))


def _read(descriptor: int, blocks: list[bytes]) -> None:
    while block := os.read(descriptor, 1 << 16):
        blocks.append(block)


def _rank(folder_name: str, inject: Injection | None, console: Connection) -> None:
    from rl.ranks import worker

    folder = Path(folder_name)
    os.chdir(REPO)
    os.dup2(console.fileno(), 1)
    os.dup2(console.fileno(), 2)
    notes = folder / "notes"
    notes.mkdir(exist_ok=True)
    os.environ.update(on_one_node(notes))
    os.environ.update(dict.fromkeys(("RANK", "LOCAL_RANK"), "0"))
    os.environ.update(dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"))
    note = os.open(folder / "finished.txt", os.O_WRONLY)
    at_calls(
        "rl.run.saving:LastFinished.note",
        lambda _, done, *__: os.pwrite(note, str(done).encode(), 0),
    )
    if inject is not None:
        inject(folder / RUN)
    logs = folder / RUN / "logs"
    sys.argv = ["worker", str(logs), str(notes), "rl.train", str(folder / "config.jsonnet")]
    worker.main()


def on_disk(run_dir: Path) -> int:
    """Number of iterations in the newest complete checkpoint, 0 if there is none."""
    newest = checkpoint.find(run_dir).path
    return 0 if newest is None else checkpoint.iteration_of(newest)


def difference(uninterrupted: Path, run_dir: Path, weights_only: bool = False) -> str:
    """The first difference between a finished run and the uninterrupted one, '' if there is none.
    Compares weights, moments and, unless `weights_only`, metrics and episodes bitwise."""
    compare = assert_same_weights if weights_only else assert_same_run
    try:
        compare(uninterrupted, run_dir, NUM_ITERATIONS)
    except (AssertionError, OSError) as error:
        return str(error)[:200] or "the records differ"
    return ""


def prepare(folder: Path, rows: Path, judge: FaultyJudge, **changes: Any) -> Path:
    """Writes the config of the run in `folder`; returns its future run folder."""
    write_config(folder, config_of(folder, rows, judge, **changes))
    return folder / RUN
