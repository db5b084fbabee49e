"""Writes, verifies, finds and loads checkpoints; waits while the disk is full."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pickle import UnpicklingError  # nosec B403 - an error only
from typing import TYPE_CHECKING, Any, TypeVar

from rl.config import loading
from rl.config.loading import not_a_file, read_bytes
from rl.config.schema import CheckpointConfig
from rl.files import FULL, fsync, read_object, read_rows, require_in_place, write_atomically
from rl.printing import excerpt, scrub
from rl.progress import duration, warn
from rl.ranks import heartbeat, signals
from rl.ranks.dist import Dist
from rl.record.publish import Pusher

if TYPE_CHECKING:
    import torch

# ---- full disk -----------------------------------------------------------------------------------
# Retries a write until there is room for it, and logs once a minute that the run waits.

T = TypeVar("T")

WARN_EVERY_S = 60.0
TRY_EVERY_S = 5.0
POLL_EVERY_S = 0.2
_RUST_ERROR = re.compile(rf"\(os error ({'|'.join(map(str, FULL))})\)")
"""How safetensors, which raises no OSError, ends its message about a full disk."""


def retry_until_space(write: Callable[[], T], folder: Path, name: str) -> T:
    """Call `write` until the disk of `folder` has space for it, and return its result. Raises the
    disk's error once the process is asked to stop. Local (no collective)."""
    began_s = time.monotonic()
    next_warning_s = began_s
    while True:
        try:
            return write()
        except Exception as error:
            if not is_full(error) or signals.stop_received():
                raise
        if (now_s := time.monotonic()) >= next_warning_s:
            next_warning_s = now_s + WARN_EVERY_S
            warn(
                f"{folder} has no room: {name} waits, for {duration(now_s - began_s)} now, and is "
                "written once there is room (delete something, or raise the quota, or with prlimit "
                "--fsize the largest size of a file); SIGTERM ends the run"
            )
        while time.monotonic() < now_s + TRY_EVERY_S and not signals.stop_received():
            heartbeat.note_wait()
            time.sleep(POLL_EVERY_S)


def is_full(error: BaseException) -> bool:
    """Whether the disk or a user's share of it is full, or a file has reached its largest size,
    whichever library says so."""
    if isinstance(error, OSError):
        return error.errno in FULL
    if error.__cause__ is not None and is_full(error.__cause__):
        return True
    return _RUST_ERROR.search(str(error)) is not None


# ---- checkpoint ----------------------------------------------------------------------------------
# Writes, finds, checks, loads and prunes the checkpoints of a run.

MODEL_FOLDER = "model"
MODEL_CARD = "README.md"
"""The manifest leaves this file out, because a held-out evaluation rewrites it."""
LAST_WRITTEN = "last_checkpoint.txt"
SAVE_LOCK = ".saving.lock"
"""Lock file of the process that writes a checkpoint."""
_NUM_NEWEST_KEPT = 2
_MAX_SHOWN_CHARS = 300
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
_STEP_NAME = re.compile(r"step_(\d{6,})")
_MOVE_AWAY = "move this checkpoint away, and the run resumes from an older one"
_TEMPORARY_PREFIX = ".tmp-"
_TEMPORARY_NAME = re.compile(r"\.tmp-(?:pruned-)?step_\d{6,}")


class SaveError(RuntimeError):
    """The last checkpoint of a run could not be written."""


@dataclass(frozen=True, eq=False)
class ResumePoint:
    iteration: int
    """Number of finished iterations."""
    tensors: Mapping[str, torch.Tensor]
    """The learner's tensors, on the CPU, contiguous."""
    meta: Mapping[str, Any]
    rng_by_rank: Sequence[Mapping[str, Any]]
    """`rng_state()` of every rank."""
    write_model: Callable[[Path], None]
    """Writes the model into the folder; calls no collective."""
    model_card: str


@dataclass(frozen=True, eq=False)
class Loaded:
    iteration: int
    """Number of finished iterations; the run resumes with the next."""
    tensors: dict[str, torch.Tensor]
    meta: dict[str, Any]
    """`ResumePoint.meta` of the saved checkpoint."""
    rng: dict[str, Any] | None
    """This rank's generators for `set_rng_state`; None when the world size has changed since."""


class Checkpoints:
    """The checkpoints of one run. Every method is collective unless it says otherwise. A checkpoint
    is written to a temporary folder, then renamed; it is never loaded in part.

    <run>/checkpoints/step_000010/
        state.safetensors      the learner's tensors (fp32 weights, moments), keyed by name
        state.json             iteration, world size, and the loop's own JSON
        rng_rank0000.pt ...    every rank's generators, tensors and plain values only
        model/                 PEFT adapter or transformers folder, with its model card
        manifest.json          size and sha256 of every file above except the card; written last
    <run>/last_checkpoint.txt  the name of the last checkpoint: distinguishes a run whose
                               checkpoints are gone from a run that never had any
    """

    def __init__(self, run_dir: Path, config: CheckpointConfig, dist: Dist) -> None:
        self.folder = run_dir / "checkpoints"
        self._config = config
        self._dist = dist
        self.pusher = Pusher(config.push_to_hub_repo_id)

    def due(self, iteration: int) -> bool:
        """Whether to save once `iteration` iterations are complete. Local."""
        saved = iteration % self._config.save_every_n_iterations == 0
        return saved or self._push_due(iteration, final=False)

    def latest(self) -> Path | None:
        """The newest checkpoint whose files match its manifest, or None before the first. Warns of
        newer ones that are damaged or gone. Raises ValueError if checkpoints were written and none
        is intact: a run never restarts silently from the base weights."""
        newest = find(self.folder.parent) if self._dist.is_main else Found()
        for remark in newest.remarks:
            warn(remark)
        newest = self._dist.broadcast(newest)
        if newest.problem:
            raise ValueError(newest.problem)
        return newest.path

    def save(self, point: ResumePoint | None, final: bool = False) -> Path | None:
        """Write a checkpoint (`point` is read on rank 0) and prune old ones. A failure leaves the
        older checkpoints as they were, warns and returns None, or raises `SaveError` on every rank
        if `final`."""
        path, problem = None, ""
        if self._dist.is_main:
            assert point is not None
            path, problem = self._try_write(point)
        path, problem = self._dist.broadcast((path, problem))
        if problem and final:
            raise SaveError(problem)
        return path

    def save_alone(self, point: ResumePoint) -> Path | None:
        """`save` without the other ranks, which may be gone. Ranks that save the same checkpoint
        wait for each other."""
        return self._try_write(point)[0]

    def publish(self, iteration: int, model_card: Callable[[], str], final: bool = False) -> None:
        """Write the model card, now with the held-out results, into that iteration's checkpoint,
        if it exists, and push to the hub when due. Called on rank 0."""
        model = self.folder / f"step_{iteration:06d}" / MODEL_FOLDER
        if not model.is_dir():
            return
        try:
            write_atomically(model / MODEL_CARD, scrub(model_card()))
        except OSError as error:
            warn(f"{model / MODEL_CARD} could not be written: {error}")
        if self._push_due(iteration, final):
            self.pusher.push(model, iteration, final)

    def load(self, path: Path) -> Loaded:
        """Read a checkpoint that `latest` found; no pickle is executed. Raises ValueError when a
        rank cannot see the folder."""
        import torch
        from safetensors.torch import load_file

        if self._dist.any(not (path / "manifest.json").is_file()):
            raise ValueError(
                f"{path} is not visible on every node: put base_exp_dir on a file system they share"
            )
        state = read_state(path)
        rng = None
        with sound(path):
            if state.get("world_size") == self._dist.world_size:
                rng = torch.load(path / _rng_name(self._dist.rank), weights_only=True)
            tensors = load_file(path / "state.safetensors")
        return Loaded(state["iteration"], tensors, state["meta"], rng)

    def _try_write(self, point: ResumePoint) -> tuple[Path | None, str]:
        from filelock import FileLock

        name = f"step_{point.iteration:06d}"
        try:
            require_in_place(self.folder)
            # Ranks that save alone may save at the same time.
            lock = FileLock(self.folder.parent / SAVE_LOCK, fallback_to_soft=False)
            with ExitStack() as stack:
                with suppress(OSError):  # a file system without locks: save without one
                    stack.enter_context(lock)
                path = self._write(point, name)
                self._tidy(name)
                return path, ""
        # Any library may fail in any way on a full or vanished disk; training goes on.
        except Exception as error:
            problem = f"checkpoint {name} could not be written: {error!r}"
            if is_full(error):
                problem += "; make room, and start the same command again"
            newest = find(self.folder.parent, hashes=False).path
            warn(f"{problem}. Newest complete checkpoint: {newest.name if newest else 'none'}.")
            return None, problem

    def _write(self, point: ResumePoint, name: str) -> Path:
        path, temporary = self.folder / name, self.folder / f"{_TEMPORARY_PREFIX}{name}"
        if path.is_dir() and problem_of(path) is None:
            return path  # already saved: the last iteration may also be due by cadence

        def write_temporary() -> None:
            self._sweep()
            temporary.mkdir(parents=True)
            try:
                _write_files(point, temporary)
                _write_manifest(temporary)
            except Exception:
                shutil.rmtree(temporary, ignore_errors=True)
                raise

        retry_until_space(write_temporary, self.folder, f"checkpoint {name}")
        if path.exists():  # damaged: an intact one was returned above
            renamed = path.rename(self.folder / f"damaged-{name}-{time.time_ns()}")
            warn(f"the damaged {name} was renamed to {renamed}; delete it if you do not need it")
        temporary.rename(path)
        fsync(self.folder)
        return path

    def _tidy(self, name: str) -> None:
        """Free space (prune, sweep), then write `LAST_WRITTEN`. A failure only logs a warning."""
        write_name = partial(write_atomically, self.folder.parent / LAST_WRITTEN, f"{name}\n")
        note_last = partial(retry_until_space, write_name, self.folder, LAST_WRITTEN)
        for task in (self._prune, self._sweep, note_last):
            try:
                task()
            except Exception as error:
                warn(f"checkpoint {name} is written, but the cleanup after it failed: {error}")

    def _prune(self) -> None:
        """Rename old checkpoints; `_sweep` then deletes them. Keeps the newest two intact ones, the
        best on held-out samples, those that may be the best, those on their way to the hub, every
        n-th, and those that somebody changed."""
        rows, every = rows_of(self.folder.parent), self._config.keep_every_n_iterations
        rewards = held_out_rewards(self.folder.parent)
        steps = {iteration_of(path): path for path in steps_of(self.folder.parent)}
        whole = [iteration for iteration, path in steps.items() if is_as_written(path)]
        kept = {*whole[-_NUM_NEWEST_KEPT:], best_of(whole, rewards), *self.pusher.uploading}
        best = max((rewards.get(iteration) or 0.0 for iteration in whole), default=0.0)
        for iteration in whole:
            is_nth = every and iteration % every == 0
            may_be_best = _may_exceed(best, rows.get(iteration, {"eval/ungraded": 1.0}))
            if iteration not in kept and not is_nth and not may_be_best:
                path = steps[iteration]
                path.rename(self.folder / f"{_TEMPORARY_PREFIX}pruned-{path.name}")

    def _sweep(self) -> None:
        """Delete the temporary folders that pruning, a kill or a failed save left."""
        for path in sorted(self.folder.glob(f"{_TEMPORARY_PREFIX}*")):
            is_ours = _TEMPORARY_NAME.fullmatch(path.name) and path.is_dir()
            if is_ours and not path.is_symlink():
                shutil.rmtree(path)

    def _push_due(self, iteration: int, final: bool) -> bool:
        every = self._config.push_to_hub_every_n_iterations
        return every > 0 and (final or iteration % every == 0)


def _write_files(point: ResumePoint, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file(dict(point.tensors), folder / "state.safetensors")
    for rank, rng in enumerate(point.rng_by_rank):
        buffer = io.BytesIO()  # torch's own files do not report a full disk
        torch.save(dict(rng), buffer)
        (folder / _rng_name(rank)).write_bytes(buffer.getvalue())
    state = {
        "format": loading.CHECKPOINT_FORMAT,
        "iteration": point.iteration,
        "world_size": len(point.rng_by_rank),
        "meta": point.meta,
    }
    (folder / "state.json").write_text(scrub(json.dumps(state, indent=1)), encoding="utf-8")
    model = folder / MODEL_FOLDER
    model.mkdir()
    point.write_model(model)
    (model / MODEL_CARD).write_text(scrub(point.model_card), encoding="utf-8")


@dataclass(frozen=True)
class Found:
    """The result of `find`."""

    path: Path | None = None
    remarks: tuple[str, ...] = ()
    """Warnings about newer checkpoints that are damaged or gone."""
    problem: str = ""
    """Why the run cannot start; '' if it can."""


def find(run_dir: Path, hashes: bool = True) -> Found:
    """Find the checkpoint to resume from. `hashes`: verify the sha256 of its files, too."""
    folder, candidates = run_dir / "checkpoints", steps_of(run_dir)
    written = run_dir / LAST_WRITTEN
    last = read_bytes(written).decode(errors="replace").strip() if written.exists() else ""
    remarks: list[str] = []
    if last and last not in [path.name for path in candidates]:
        remarks = [f"checkpoint {last:.40} is gone: falling back to an older one"]
    problem = format_problem(run_dir)
    for path in [] if problem else reversed(candidates):
        if problem := format_problem(path):
            break
        if (damage := problem_of(path, hashes)) is None:
            return Found(path, tuple(remarks))
        remarks.append(
            f"checkpoint {path.name} is damaged ({damage}): falling back to an older one"
        )
    if not problem and candidates:
        problem = f"none of the {len(candidates)} checkpoints in {folder} is intact: restore one"
    elif not problem and last:
        problem = f"{folder} holds no checkpoint, though {last} was written there: restore it"
    if problem:
        problem += (
            f", or choose another run_name or move {run_dir} away, to start from the base weights"
        )
    return Found(None, tuple(remarks), problem)


def checkpoint_of(run_dir: Path, which: str) -> Path:
    """A checkpoint of a run: `which` is 'best' (on held-out samples) or a number of iterations.
    Raises ValueError, which lists the existing ones."""
    by_iteration = {iteration_of(step): step for step in steps_of(run_dir)}
    iteration = int(which) if which.isdecimal() else None
    if which == "best":
        iteration = best_of(list(by_iteration), held_out_rewards(run_dir))
    if iteration is None or iteration not in by_iteration:
        names = ", ".join(map(str, by_iteration)) or "none"
        raise ValueError(
            f"{run_dir}: there is no checkpoint {which!r}: write latest, best (if evaluations "
            f"measured checkpoints), or a number of iterations; checkpoints there: {names}"
        )
    if damage := problem_of(by_iteration[iteration]):
        raise ValueError(f"{by_iteration[iteration]} is damaged ({damage})")
    return by_iteration[iteration]


def steps_of(run_dir: Path) -> list[Path]:
    """Checkpoint folders of a run, oldest first, damaged ones included."""
    entries = (run_dir / "checkpoints").glob("step_*")
    steps = (path for path in entries if _STEP_NAME.fullmatch(path.name) and path.is_dir())
    return sorted(steps, key=iteration_of)


def held_out_rewards(run_dir: Path) -> dict[int, float | None]:
    """Iterations done -> mean held-out reward, 0..1, or None if it was not measured. An iteration
    without a readable line in metrics.jsonl is left out."""
    return {it: _share(row, "eval/reward") for it, row in rows_of(run_dir).items()}


def rows_of(run_dir: Path) -> dict[int, Mapping[str, Any]]:
    """Iterations done -> last readable line of metrics.jsonl; there may be none before training."""
    rows = read_rows(run_dir / "metrics.jsonl")[0]
    return {0: {}} | {row["iteration"]: row for row in rows if type(row.get("iteration")) is int}


def _share(row: Mapping[str, Any], name: str) -> float | None:
    value: Any = row.get(name)
    return value if type(value) in (int, float) and 0 <= value <= 1 else None


def _may_exceed(best: float, row: Mapping[str, Any]) -> bool:
    """Whether the held-out mean would be above `best`, 0..1, if all samples that reached no judge
    had reward 1. Unreadable replies are left out, as from the mean."""
    reward = _share(row, "eval/reward")
    if reward is None:
        return "eval/ungraded" in row
    ungraded, unreadable = (_share(row, f"eval/{n}") or 0 for n in ("ungraded", "unreadable"))
    # That mean is 1 - (1 - reward) * (1 - ungraded) / (1 - unreadable).
    return (1 - reward) * (1 - ungraded) < (1 - best) * (1 - unreadable)


def best_of(iterations: Sequence[int], rewards: dict[int, float | None]) -> int | None:
    """The iteration with the highest reward, the earliest on a tie; None if none was measured."""
    measured = [(-reward, it) for it in iterations if (reward := rewards.get(it)) is not None]
    return min(measured)[1] if measured else None


def is_as_written(path: Path) -> bool:
    """Whether a checkpoint holds what `save` wrote and nothing else. Compares sizes, not hashes."""
    if path.is_symlink() or problem_of(path, hashes=False):
        return False
    manifest = json.loads(read_bytes(path / "manifest.json"))
    ours = {*manifest, "manifest.json", f"{MODEL_FOLDER}/{MODEL_CARD}"}
    return all(
        not entry.is_symlink() and (entry.is_dir() or entry.relative_to(path).as_posix() in ours)
        for entry in path.rglob("*")
    )


def model_folder(path: Path) -> Path:
    """The model's folder in a run (its newest intact checkpoint; warns of newer ones that are
    damaged or gone), a checkpoint, or `path` itself. Raises ValueError if no checkpoint is intact,
    if a file of the model is damaged, or if the format differs from this version's."""
    newest = find(path) if steps_of(path) else Found(path, problem=_model_problem(path))
    if newest.path is None or newest.problem:
        raise ValueError(newest.problem)
    for remark in newest.remarks:
        warn(remark)
    folder = newest.path / MODEL_FOLDER
    return folder if folder.is_dir() else newest.path


def _model_problem(path: Path) -> str:
    """Why the model of the checkpoint, or other folder, `path` cannot be used; '' if it can. The
    checkpoint's other files may be missing."""
    if problem := format_problem(path):
        return problem
    has_manifest = (path / "manifest.json").is_file() and (path / MODEL_FOLDER).is_dir()
    damage = problem_of(path, only=f"{MODEL_FOLDER}/") if has_manifest else None
    return f"{path} is damaged ({damage})" if damage else ""


def read_state(path: Path, refused: Sequence[str] = loading.CHANGED_TRAINING) -> dict[str, Any]:
    """The state.json of a checkpoint, with the run's config in it, read by `loading.stored`.

    Raises ValueError if it has another format, or values that no run writes.
    """
    if problem := format_problem(path):
        raise ValueError(problem)
    state = read_object(path / "state.json") or {}
    iteration, meta = state.get("iteration"), state.get("meta")
    is_named = not _STEP_NAME.fullmatch(path.name) or iteration == iteration_of(path)
    if type(iteration) is not int or iteration < 0 or not is_named or not isinstance(meta, dict):
        shown = f"iteration {iteration!r:.30}, meta of type {type(meta).__name__}"
        raise ValueError(f"{path / 'state.json'} is damaged ({shown}); {_MOVE_AWAY}")
    if "config" in meta:
        meta["config"] = loading.stored(meta["config"], f"the config in {path}", refused)
    return state


@contextmanager
def sound(path: Path) -> Iterator[None]:
    """Turns the errors of parsers of the checkpoint `path` into a ValueError that names it."""
    from safetensors import SafetensorError

    try:
        yield
    except (
        UnpicklingError, SafetensorError, EOFError, RuntimeError, LookupError, TypeError, ValueError
    ) as error:  # fmt: skip
        # torch's own message advises to run the pickle.
        raise ValueError(f"{path} is damaged ({type(error).__name__}); {_MOVE_AWAY}") from error


def problem_of(path: Path, hashes: bool = True, only: str = "") -> str | None:
    """Why the checkpoint at `path` is not intact, or None. Compares the size of every file (whose
    name begins with `only`) with the manifest, and with `hashes` its sha256 (about 1 GB/s)."""
    try:
        manifest = json.loads(read_bytes(path / "manifest.json"))
        files = {name: (entry["size"], entry["sha256"]) for name, entry in manifest.items()}
    except _UNREADABLE as error:
        return f"no readable manifest.json: {excerpt(str(error), _MAX_SHOWN_CHARS)}"
    if not files:
        return "manifest.json names no file"
    for name, (size, sha256) in files.items():
        file, problem = path / name, ""
        if not name.startswith(only):
            continue
        try:
            if why := not_a_file(file):
                problem = "is missing" if why == loading.MISSING else why
            elif file.stat().st_size != size:
                problem = f"has {file.stat().st_size} bytes instead of {size}"
            elif hashes and _sha256(file) != sha256:
                problem = "does not match its sha256"
        except OSError as error:  # a name that is too long for the file system
            problem = f"cannot be read ({error.strerror})"
        if problem:
            return f"{excerpt(name, _MAX_SHOWN_CHARS)} {problem}"
    return None


def format_problem(folder: Path) -> str:
    """Why this version cannot read the format of that run folder or checkpoint; '' if it can."""
    for file, known in (
        ("config.json", loading.CONFIG_FORMAT),
        ("state.json", loading.CHECKPOINT_FORMAT),
    ):
        row = (None if not_a_file(folder / file) else read_object(folder / file)) or {}
        if problem := loading.refusal(str(folder), loading.number_of(row), known, known):
            return problem
    return ""


def _write_manifest(folder: Path) -> None:
    manifest = {}
    for path in sorted(folder.rglob("*")):
        fsync(path)
        if path.is_file() and path != folder / MODEL_FOLDER / MODEL_CARD:
            entry = {"size": path.stat().st_size, "sha256": _sha256(path)}
            manifest[path.relative_to(folder).as_posix()] = entry
    manifest_path = folder / "manifest.json"
    manifest_path.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    fsync(manifest_path)
    fsync(folder)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def iteration_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _rng_name(rank: int) -> str:
    return f"rng_rank{rank:04d}.pt"
