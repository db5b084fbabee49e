"""Check, train and read runs from Python: `from rl import check, train, load_run`."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, Self, TypeVar

from PIL.Image import DecompressionBombError, Image

from rl.config.schema import load_config
from rl.files import open_picture
from rl.record.publish import at
from rl.record.run_summary import is_in_use
from rl.tools import reading

ConfigOrPath = str | Path | Mapping[str, Any]
"""A config file, or the config itself as nested dicts and lists."""
Overrides = Mapping[str, Any] | None
"""Dotted key -> value: `{"num_iterations": 20, "policy.lora.r": 8}`."""
_LAUNCH = (sys.executable, "-m", "rl.simple_launch")
_NUM_LINES_KEPT = 200


@dataclass(frozen=True)
class CheckResult:
    """What `rl check` found."""

    problems: tuple[str, ...]
    """Every mistake, each with its key and remedy; () if the config can run."""
    text: str
    """The whole report: plugins, batch, memory plan, judge, disk."""

    @property
    def ok(self) -> bool:
        return not self.problems


class TrainingError(RuntimeError):
    """A run that `train` started has failed; the message ends with the last lines it printed."""

    def __init__(self, code: int, output: str) -> None:
        super().__init__(f"rl train ended with exit code {code}:\n{output}")
        self.code = code
        """1 wrong config, 128 + n ended by signal n."""


class Row(dict[str, Any]):
    """A graded completion, from training or of a held-out sample: the whole line on disk (token
    ids, log-probs, judge replies, ...), whose values are attributes, too; None: not on record.

    Besides: `iteration` (of a held-out sample: iterations done), `words` (the completion without
    its thought), `parts` (part of the reward, as 'viescore/naturalness' -> number), `bare_reward`
    (reward of the user's own words under the same noise).
    """

    def __init__(self, record: Mapping[str, Any], iteration: int, folder: Path) -> None:
        """`folder`: to which the record's file names are relative."""
        super().__init__(
            {
                "sample_id": record.get("id"),
                "bare_reward": at(record, "bare.reward"),
                **record,
                "iteration": iteration,
                "words": reading.words_of(record),
                "parts": reading.parts_of(record),
            }
        )
        self.__dict__["folder"] = folder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of a protocol, such as IPython's
            raise AttributeError(name)
        return self.get(name)

    def image(self) -> Image | None:
        """The rendered picture, or its thumbnail if only that is on record and readable."""
        return self._open(self.get("image_file"), self.get("thumbnail"))

    def sources(self) -> list[Image]:
        """The source pictures on record, in order, likewise."""
        found = (self._open(*places) for places in reading.source_places(self))
        return [picture for picture in found if picture is not None]

    def target(self) -> Image | None:
        """The picture that the data set calls right, likewise."""
        return self._open(self.get("target_file"), self.get("target_thumbnail"))

    def _open(self, *places: object) -> Image | None:
        is_held_out = self.folder.parent.name == "evaluation"
        picture_of = reading.picture if is_held_out else reading.picture_of
        for kept in filter(None, (picture_of(self.folder, place) for place in places)):
            file, _, box = kept.partition("#xywh=")
            # Damaged, or deleted in this instant (`tracking.keep_images_of_last_n_iterations`).
            with suppress(OSError, ValueError, SyntaxError, DecompressionBombError):
                with open_picture(self.folder / file, ("PNG", "WEBP")) as picture:
                    whole = picture.convert("RGB")
                if not box:
                    return whole
                left, top, width, height = map(int, box.split(","))
                return whole.crop((left, top, left + width, top + height))
        return None


RowT = TypeVar("RowT", bound=Mapping[str, Any])


class Table(list[RowT]):
    """A list of rows that a notebook shows as a table."""

    def frame(self) -> Any:
        """A pandas.DataFrame: a column for each value, and for each part of the reward."""
        import pandas  # type: ignore[import-untyped, unused-ignore]

        return pandas.DataFrame([{**row, **row.get("parts", {})} for row in self])

    def _repr_html_(self) -> str:
        return str(self.frame()._repr_html_())


class LoadedRun:
    """A run folder. Each call reads the files again, so the run may still be training."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __repr__(self) -> str:
        state = "running" if self.is_running else "not running"
        return f"<run {self.folder}: {self.iterations_done} iterations done, {state}>"

    @property
    def config(self) -> dict[str, Any]:
        """The resolved config with which it was last started; {} before that is written."""
        return reading.read_config(self.folder)

    @property
    def is_running(self) -> bool:
        """Whether a process, started from here or elsewhere, trains or saves it now."""
        return is_in_use(self.folder)

    @property
    def iterations_done(self) -> int:
        return max((int(row["iteration"]) for row in self.metrics()), default=0)

    @property
    def evaluations(self) -> list[int]:
        """Numbers of iterations done at its held-out evaluations; 0 is before training."""
        return list(reading.evaluation_folders(self.folder))

    def metrics(self) -> Table[Mapping[str, Any]]:
        """A dict for each iteration: 'iteration', and the metrics of docs/metrics.md; None: not
        finite."""
        return Table(reading.named_rows(self.folder / "metrics.jsonl", "iteration")[0])

    def episodes(self, iterations: int | Iterable[int] | None = None) -> Table[Row]:
        """The training completions of one iteration, of several (`range(10, 20)`, of which some may
        be missing), or of all. A run keeps the pictures of some groups. Raises ValueError if that
        one iteration was not recorded."""
        files = reading.episode_files(self.folder)
        return Table(
            Row(record, number, self.folder)
            for number in _chosen(iterations, files)
            for file in files[number]
            for record in reading.named_rows(file, "sample_id")[0]
        )

    def held_out(self, iterations: int | Iterable[int] | None = None) -> Table[Row]:
        """The held-out samples of one of the `evaluations`, of several, or of all. Raises
        ValueError if there is no such evaluation."""
        folders = reading.evaluation_folders(self.folder)
        return Table(
            Row(record, number, folders[number])
            for number in _chosen(iterations, folders)
            for record in reading.named_rows(folders[number] / "records.jsonl", "id")[0]
        )


def _chosen(iterations: int | Iterable[int] | None, known: Mapping[int, Any]) -> list[int]:
    if isinstance(iterations, int):
        if iterations not in known:
            there = f"{len(known)} from {min(known)} to {max(known)}" if known else "none"
            raise ValueError(f"nothing is recorded of iteration {iterations}; recorded: {there}")
        return [iterations]
    return [number for number in (known if iterations is None else iterations) if number in known]


def load_run(folder: str | Path) -> LoadedRun:
    """A run to read, finished or going on: its folder, or its config file. Raises ValueError if
    there is none, or if its format is another version's."""
    return LoadedRun(reading.find_run(str(folder)))


def check(config: ConfigOrPath, overrides: Overrides = None) -> CheckResult:
    """What a run would do, and every mistake of its config; nothing is started and no model loaded.

    It runs in a new process, which imports plugins as they are on disk now.
    """
    with tempfile.TemporaryDirectory(prefix="rl_check_") as folder:
        arguments = _arguments(config, overrides, Path(folder))
        done = subprocess.run(
            [*_LAUNCH, "--check", *arguments], capture_output=True, text=True, check=False
        )
    text = (done.stdout + done.stderr).strip()
    if not done.returncode:
        return CheckResult((), text)
    listed = re.split(r"(?:^\d+ wrong| cannot run:)$", text, flags=re.M)[-1]
    problems = [problem.strip() for problem in re.split(r"^  - ", listed, flags=re.M)]
    return CheckResult(tuple(filter(None, problems)) or (text,), text)


def train(
    config: ConfigOrPath,
    overrides: Overrides = None,
    *,
    nproc: int | None = None,
    wait: bool = True,
    echo: bool = True,
) -> StartedRun:
    """Start the run that the config names, or resume it, as `rl train` does.

    Args:
        config: a file, or a config; keys as in configs/base.libsonnet.
        overrides: values that replace the config's.
        nproc: number of processes (GPUs) on this machine; None: the config's world_size.
        wait: False: return at once, and train in the background; see `StartedRun`.
        echo: print what the run prints.

    Raises ConfigError for a config that cannot be read, TrainingError if the run fails. On
    an interrupt (Ctrl-C, "interrupt the kernel") the run saves before it ends.
    """
    run = StartedRun(config, overrides, nproc, echo)
    return run.wait() if wait else run


def _arguments(config: ConfigOrPath, overrides: Overrides, folder: Path) -> list[str]:
    """The command line's config and overrides; a config without a file is written to `folder`."""
    if isinstance(config, Mapping):
        path = folder / "config.jsonnet"
        path.write_text(json.dumps(config, default=_plain), encoding="utf-8")
        config = path
    plain = {key: json.dumps(value, default=_plain) for key, value in (overrides or {}).items()}
    return [str(config), *(f"{key}={value}" for key, value in plain.items())]


def _plain(value: Any) -> Any:
    """What JSON lacks: numpy's as it is; the rest, such as a path, as text, which is checked."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


class StartedRun(LoadedRun):
    """A run whose process is in a new session: Ctrl-C does not reach it, only `stop` does."""

    def __init__(
        self, config: ConfigOrPath, overrides: Overrides, nproc: int | None, echo: bool
    ) -> None:
        self._config_folder = tempfile.TemporaryDirectory(prefix="rl_train_")
        arguments = _arguments(config, overrides, Path(self._config_folder.name))
        super().__init__(load_config(arguments[0], arguments[1:]).run_dir.absolute())
        self._process = subprocess.Popen(
            [*_LAUNCH, *([] if nproc is None else ["--nproc", str(nproc)]), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._lines: deque[str] = deque(maxlen=_NUM_LINES_KEPT)
        self._reader = Thread(target=self._read, args=(echo,), daemon=True)
        self._reader.start()

    def _read(self, echo: bool) -> None:
        for line in self._process.stdout or ():
            self._lines.append(line)
            if echo:
                print(line, end="", flush=True)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None or super().is_running

    def wait(self) -> Self:
        """Wait until it has ended. Raises TrainingError if it failed."""
        try:
            code = self._process.wait()
        except KeyboardInterrupt:
            self.stop()
            raise
        self._reader.join()
        if code:
            raise TrainingError(code, "".join(self._lines))
        return self

    def stop(self) -> Self:
        """Ask it to save and end, and wait; the same call of `train` resumes the run."""
        self._process.send_signal(signal.SIGTERM)  # nothing if it has ended
        self._process.wait()
        self._reader.join()
        return self
