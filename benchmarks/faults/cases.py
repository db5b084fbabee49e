"""The campaign's cases: a place, a kind of fault, and the allowed outcomes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.faults import tiny_run
from benchmarks.faults.inject import EndAt, FailAtFile, Injection
from tests.helpers.tiny_faulty_judge import GOOD, Fault, dripping, envelope, page, raw

FIRST_OF_TRAINING = 2
"""Number of the first judge request of training; request 1 is sent before a model is loaded."""


@dataclass(frozen=True)
class JudgeFault:
    """A fault of the judge, and the requests that it affects."""

    fault: Fault
    from_request: int
    """Number of the first faulty request, from 1; 0: the request for the list of models."""
    times: int = 1
    """1: only that request; 0: that one and all later ones."""


@dataclass(frozen=True)
class Case:
    """A kind of fault at a place. Once the fault is fixed, a second start must give the results of
    a run without the fault."""

    group: str
    place: str
    kind: str
    inject: Injection | None = None
    damage: Callable[[Path], None] | None = None
    """Damages the folder of a run that has finished two iterations, before it is started again."""
    judge: JudgeFault | None = None
    rows: Callable[[Path], None] | None = None
    """Changes a copy of the data, given its JSONL file, for the first start only."""
    on_bad_row: str = "error"
    save_every: int = 1
    is_bug: bool = False
    """The fault imitates a bug in the code; then a traceback is an acceptable message."""
    can_save: bool = True
    """Whether the run can still save after the fault."""
    says: str = ""
    """Text that the output must contain, in lower case."""
    cannot_resume: bool = False
    """The run cannot be resumed, so every start must be refused."""
    changes_record: bool = False
    """Lines of metrics or episodes may be damaged or lost if a message reports it."""
    adds_to_record: bool = False
    """The episodes record the faulty replies, so only the weights must be the same."""
    results_differ: bool = False
    """The run goes on without the broken part, so its results differ and are not compared."""

    @property
    def name(self) -> str:
        return f"{self.group} | {self.place} | {self.kind}"


# Calls in the training loop. No checkpoint is due before the last iteration, so a run that stops
# must save as it exits. Place -> (function, number of the call).
_CALLS = {
    "prompts are drawn": ("rl.rollout.episodes:PromptOrder.shard", 5),
    "completions are sampled": ("rl.engines.transformers:TransformersEngine.generate", 4),
    "a prompt is built": ("rl.policies.qwen_vl:Qwen25VL.build_prompt", 6),
    "an episode is made": ("rl.rollout.stream:episode_of", 7),
    "the judge is asked": ("rl.judge.client:JudgeClient.ask", 7),
    "a reply is journalled": ("rl.judge.http:append", 6),
    "a step is planned": ("rl.learner.learner:Learner.begin", 3),
    "reference log-probs are computed": ("rl.learner.train_step:TrainStep.work_ahead", 2),
    "a backward pass": ("rl.learner.train_step:TrainStep.accumulate", 4),
    "the optimizer steps": ("rl.learner.train_step:TrainStep.step", 2),
    "weights are written back": ("rl.learner.learner:TorchBackend._write_back", 2),
    "the engine is synced": ("rl.run.run:sync", 3),
    "a finished iteration is kept": ("rl.run.saving:LastFinished.note", 3),
    "episodes are recorded": ("rl.run.run:Recording.write_episodes", 2),
    "episodes are written": ("rl.record.run_record:RunRecord.write_episodes", 2),
    "a checkpoint is begun": ("rl.run.saving:Checkpointing.save_if_due", 2),
    "a checkpoint is written": ("rl.record.checkpoint:_write_manifest", 1),
    "metrics are logged": ("rl.run.run:Run.log", 3),
    "a line of metrics is written": ("rl.record.run_record:RunRecord.write_metrics", 3),
    "an iteration is printed": ("rl.progress:Console.iteration", 3),
}
_RECORD_CALLS = ("episodes are recorded", "episodes are written", "a line of metrics is written")
_REWARD_CALL = "the judge is asked"
"""The place where an error leaves the completion ungraded, with a warning."""
_ERRORS = ("ENOSPC", "EIO", "MemoryError", "RuntimeError")
_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGKILL")
_ACTIONS = ("run folder deleted", "run folder moved", "no descriptors left", "the console is gone")


def _calls() -> Iterator[Case]:
    for place, (where, count) in _CALLS.items():
        for kind in (*_ERRORS, *_SIGNALS):
            yield Case(
                "call",
                place,
                kind,
                EndAt(where, count, kind),
                save_every=3,
                is_bug=kind == "RuntimeError",
                changes_record=place in _RECORD_CALLS and kind in _ERRORS,
                results_differ=place == _REWARD_CALL and kind in _ERRORS,
                says=": ungraded: " if place == _REWARD_CALL and kind in _ERRORS else "",
            )
    for place in ("completions are sampled", "a checkpoint is begun", "metrics are logged"):
        for action in _ACTIONS:
            yield Case(
                "call",
                place,
                action,
                EndAt(*_CALLS[place], action),
                can_save=action == "the console is gone",
                cannot_resume=action.startswith("run folder"),
            )


# File operations. Pattern of the path -> number of the operation, mostly in the second iteration.
_FILES = {
    "metrics.jsonl": 3,
    "it_*.rank0.jsonl": 2,
    "*_source.png": 3,
    "state.safetensors": 2,
    "state.json": 2,
    "rng_rank0000.pt": 2,
    "adapter_model.safetensors": 2,
    "adapter_config.json": 2,
    "manifest.json": 2,
    ".last_checkpoint.txt.tmp": 2,
    ".saving.lock": 2,
    "iteration_*.jsonl": 2,
    "config.json.tmp": 1,
}
_RECORD = ("metrics.jsonl", "it_*.rank0.jsonl", "*_source.png")


def _files() -> Iterator[Case]:
    for pattern, count in _FILES.items():
        for kind in ("ENOSPC", "EACCES", "EIO+", "FULL"):
            yield _file("write", pattern, count, kind)
    for operation, pattern in (
        ("mkdir", ".tmp-step_*"),
        ("rename", ".tmp-step_*"),
        ("rename", ".last_checkpoint.txt.tmp"),
        ("fsync", "state.safetensors"),
        ("fsync", "checkpoints"),
    ):
        for kind in ("EIO", "ENOSPC+"):
            yield _file(operation, pattern, 2, kind)
    for operation in ("remove", "rmdir"):
        yield _file(operation, "*", 1, "EACCES")


def _file(operation: str, pattern: str, count: int, kind: str) -> Case:
    return Case(
        "file",
        f"{operation} {pattern}",
        kind,
        FailAtFile(operation, pattern, count, kind),
        can_save=not (kind.endswith("+") or kind == "FULL"),  # else the fault is permanent
        changes_record=pattern in _RECORD or kind == "FULL",
    )


# Faulty HTTP replies of the judge.
_GOOD_BODY = envelope(GOOD)
_JUDGE = {
    "500": Fault(500, body="out of memory"),
    "503 with Retry-After": Fault(503, headers={"Retry-After": "1"}),
    "429": Fault(429),
    "429 with Retry-After": Fault(429, headers={"Retry-After": "1"}),
    "401": Fault(401, body='{"error": "the key has expired"}'),
    "404": Fault(404, body='{"error": "no such model"}'),
    "302": Fault(302, headers={"Location": "http://127.0.0.1:9/"}),
    "text without a number": Fault(reply="A fine picture, I should say."),
    "a number out of range": Fault(reply='{"score": [1e9]}'),
    "NaN": Fault(reply='{"score": [NaN]}'),
    "an empty text": Fault(reply=""),
    "empty body": Fault(body=""),
    "not JSON": Fault(body="<html>busy</html>"),
    "JSON with another structure": Fault(body='{"choices": 7}'),
    "another model": Fault(body=json.dumps({**json.loads(_GOOD_BODY), "model": "another"})),
    "random bytes": raw(bytes(range(256)) * 8),
    "reset": Fault(reset=True),
    "cut": page(_GOOD_BODY, length=10**6),
    "slower than timeout_s": Fault(stall_s=7.0),
    "trickles": dripping(b" ", b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n"),
    "compressed": page(_GOOD_BODY, "Content-Encoding: gzip"),
    "a header of 100 kB": page(_GOOD_BODY, "X: " + "x" * 100_000),
    "20 MB": page(b"x" * 20_000_000),
}
_PERMANENT = (
    "500",
    "429",
    "401",
    "text without a number",
    "a number out of range",
    "NaN",
    "an empty text",
    "random bytes",
    "reset",
    "not JSON",
)
_AT_START = ("500", "401", "404", "not JSON", "reset", "another model", "slower than timeout_s")


def _judge() -> Iterator[Case]:
    for kind, fault in _JUDGE.items():
        yield Case(
            "judge",
            "once, in the second iteration",
            kind,
            judge=JudgeFault(fault, FIRST_OF_TRAINING + 4),
            save_every=3,
            adds_to_record=True,
        )
    for kind in _PERMANENT:
        yield Case(
            "judge",
            "from the second iteration on",
            kind,
            judge=JudgeFault(_JUDGE[kind], FIRST_OF_TRAINING + 4, times=0),
            save_every=3,
        )
    for kind in _AT_START:
        yield Case("judge", "the first question", kind, judge=JudgeFault(_JUDGE[kind], 1))
        yield Case("judge", "its list of models", kind, judge=JudgeFault(_JUDGE[kind], 0))


# Faulty rows of the data.
def _with(**cells: object) -> Callable[[str], str]:
    return lambda line: json.dumps({**json.loads(line), **cells})


def _halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes() or b"\0")
    data[len(data) // 2] ^= 0x40
    path.write_bytes(data)


def _as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


_DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "half": _halve,
    "a bit flipped": _flip,
    "gone": Path.unlink,
    "a folder": _as_folder,
    "other bytes": lambda path: path.write_bytes(bytes(range(256)) * 16),
}


_ROWS: dict[str, Callable[[str], str]] = {
    "a missing picture": _with(image="gone.png"),
    "a folder as picture": _with(image="."),
    "a path of 5,000 characters": _with(image="x" * 5000),
    "a lone surrogate": _with(instruction="\ud800"),
    "an empty instruction": _with(instruction=""),
    "a number as instruction": _with(instruction=7),
    "no instruction": lambda line: json.dumps({"image": json.loads(line)["image"]}),
    "not JSON": lambda line: line[:-3],
    "100,000 brackets": lambda _: "[" * 100_000,
    "a number of 5,000 digits": lambda line: line[:-1] + ', "n": ' + "9" * 5000 + "}",
    "an instruction of 80,000 characters": _with(instruction="why " * 20_000),
}


def _rows() -> Iterator[Case]:
    changes = {kind: partial(_change_line, change) for kind, change in _ROWS.items()}
    changes |= {f"its picture: {kind}": partial(_change_picture, kind) for kind in _DAMAGE}
    for kind, change in changes.items():
        for row in (0, tiny_run.NUM_ROWS - 1):
            for on_bad_row in ("error", "skip"):
                yield Case(
                    "row",
                    f"row {row + 1}, on_bad_row {on_bad_row}",
                    kind,
                    rows=partial(change, row),
                    on_bad_row=on_bad_row,
                    save_every=3,
                    results_differ=on_bad_row == "skip",
                )


def _change_line(change: Callable[[str], str], row: int, path: Path) -> None:
    lines = path.read_text().split("\n")
    lines[row] = change(lines[row])
    path.write_text("\n".join(lines))


def _change_picture(kind: str, row: int, path: Path) -> None:
    _DAMAGE[kind](path.with_name(f"row_{row}.png"))


# Damaged files of a run that has finished two iterations.
_NEWEST = "checkpoints/step_000002/"
_CHECKPOINT_FILES = (
    "state.safetensors",
    "state.json",
    "rng_rank0000.pt",
    "manifest.json",
    "model/adapter_model.safetensors",
    "model/adapter_config.json",
)
_RUN_FILES = (
    "metrics.jsonl",
    "config.json",
    "last_checkpoint.txt",
    "judge/iteration_000002.rank0.jsonl",
    ".lock",
    ".saving.lock",
    "logs/rank_0.log",
)
_REPLACEABLE = ("last_checkpoint.txt", ".lock", ".saving.lock")
"""A run continues even if a folder has replaced one of these files."""


def _damage_files(files: Iterable[str], kind: str, run_dir: Path) -> None:
    for file in files:
        _DAMAGE[kind](run_dir / file)


def _damage() -> Iterator[Case]:
    for kind in _DAMAGE:
        for file in _CHECKPOINT_FILES:
            yield Case(
                "damage",
                f"newest checkpoint: {file}",
                kind,
                damage=partial(_damage_files, [_NEWEST + file], kind),
                says="step_000002 is damaged",
            )
        for file in _RUN_FILES:
            is_metrics = file == "metrics.jsonl"
            if is_metrics and kind == "a bit flipped":
                continue  # undetectable: a line has no checksum, and a digit may become another one
            is_in_the_way = kind == "a folder" and file not in _REPLACEABLE
            says = "a folder is where a file belongs" if is_in_the_way else ""
            yield Case(
                "damage",
                file,
                kind,
                damage=partial(_damage_files, [file], kind),
                says="metrics.jsonl" if is_metrics else says,
                changes_record=is_metrics,
                cannot_resume=is_in_the_way,
            )
        both = [f"checkpoints/step_00000{n}/state.safetensors" for n in (1, 2)]
        yield Case(
            "damage",
            "all checkpoints",
            kind,
            damage=partial(_damage_files, both, kind),
            says="none of the 2 checkpoints",
            cannot_resume=True,
        )
    yield Case(
        "damage",
        "checkpoints/",
        "gone",
        damage=lambda run_dir: shutil.rmtree(run_dir / "checkpoints"),
        says="holds no checkpoint",
        cannot_resume=True,
    )


CASES: tuple[Case, ...] = (*_calls(), *_files(), *_judge(), *_rows(), *_damage())
