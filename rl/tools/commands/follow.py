"""Show a run: write its page, and send it to wandb, TensorBoard or trackio.

    rl follow runs/my-run                     as its config's `tracking` says
    rl follow runs/my-run --wandb online      only to wandb
    rl follow runs/my-run --tensorboard --page

A run starts this itself. Afterwards it sends what is missing: because the network or a
service was down, or because the config named no tracker. It reads only the run folder,
goes on until the run ends, and sends nothing twice.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from PIL.Image import Image

from rl import printing
from rl.config import loading
from rl.config.loading import read_bytes
from rl.config.schema import TrackingConfig
from rl.files import (
    downscale,
    hold,
    private,
    private_folder,
    row_of,
    side_by_side,
    write_atomically,
)
from rl.printing import code, scrub, text
from rl.progress import warn
from rl.run.follower import ENDED, LIMIT_S, LOCK, SAID, Lines
from rl.tools.notebook import LoadedRun, Row
from rl.tools.page import MAIN_METRICS, Page
from rl.tools.reading import BusyError, find_run, locked, named_rows

MAIN = "0_main/"
"""Before the names of the most important metrics: trackers sort sections by name."""
MAX_CELL_CHARS = 600
MAX_PICTURES = 8
CELL_SIDE_PX, SHEET_SIDE_PX = 384, 256
LOOK_EVERY_S = 2.0
WANDB_INIT_S = 30.0
LAST_ITERATION = "last_iteration"
"""File in an offline folder of wandb: its last iteration; empty until the folder is complete."""
REDIRECTS = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL", "TRACKIO_BUCKET_ID")
"""Environment variables that would make trackio send the run's data elsewhere."""
Mode = Literal["online", "offline", "off"]
MODES: tuple[Mode, ...] = ("online", "offline", "off")
SAID_OF_AN_EPISODE = ("instruction", "completion", "status", "failure", "reward")
Metrics = dict[str, Any]
Cell = str | float | Image | None


# ---- what a run recorded -------------------------------------------------------------------------


def row_from(line: bytes) -> Metrics | None:
    """The metrics of a line of metrics.jsonl, null as NaN, preceded by the main ones again under
    their short names; None for a damaged line."""
    metrics = row_of(line) or {}
    if type(metrics.get("iteration")) is not int:
        return None
    main = {MAIN + short: metrics[name] for name, short in MAIN_METRICS.items() if name in metrics}
    return {name: math.nan if v is None else v for name, v in (main | metrics).items()}


def episode_table(run: LoadedRun, iteration: int, max_rows: int) -> list[dict[str, Cell]]:
    """The first rank's first episodes of an iteration, with small pictures; all have the same
    columns. [] if none is on record."""
    file = run.folder / f"episodes/it_{iteration:06d}.rank0.jsonl"
    records = named_rows(file, "sample_id")[0][:max_rows]
    episodes = [Row(record, iteration, run.folder) for record in records]
    parts = sorted({name for episode in episodes for name in episode.parts})
    sources = [episode.sources() for episode in episodes]
    names = ["source", *(f"source {n}" for n in range(2, max([1, *map(len, sources)]) + 1))]
    rows: list[dict[str, Cell]] = []
    for episode, own in zip(episodes, sources, strict=True):
        pictures = dict(zip_longest(names, own))
        pictures |= {"target": episode.target(), "rendered": episode.image()}
        small = {name: each and downscale(each, CELL_SIDE_PX) for name, each in pictures.items()}
        said = {name: episode.get(name) for name in SAID_OF_AN_EPISODE}
        scores = {name: episode.parts.get(name) for name in parts}
        rows.append({**small, **said, **scores, "advantage": episode.advantage})
    return rows


def before_after(run: LoadedRun, iteration: int) -> list[tuple[str, Image]]:
    """(caption, source, before and after side by side) of the first samples that the first
    evaluation and the one after `iteration` drew; [] if there are not both. The same samples every
    time, so that a tracker can step through them."""
    folder = run.folder / f"evaluation/it_{iteration:06d}"
    if not folder.is_dir() or iteration <= run.evaluations[0]:  # no folder after most iterations
        return []
    old_of = {row.sample_id: row for row in run.held_out(run.evaluations[0])}
    both = [(old_of[r.sample_id], r) for r in run.held_out(iteration) if r.sample_id in old_of]
    pictures: list[tuple[str, Image]] = []
    for before, after in both:
        if len(pictures) == MAX_PICTURES:
            break
        drawn = [picture for picture in (before.image(), after.image()) if picture is not None]
        if len(drawn) == 2:
            caption = (
                f"{after.instruction} | before ({before.reward}): {before.completion} | "
                f"after ({after.reward}): {after.completion}"
            )
            shown = [downscale(picture, SHEET_SIDE_PX) for picture in (*before.sources(), *drawn)]
            pictures.append((caption, side_by_side(shown)))
    return pictures


# ---- views ---------------------------------------------------------------------------------------


@dataclass
class Followed:
    """What all views share."""

    run: LoadedRun
    tracking: TrackingConfig
    pid: int | None = None
    """The first rank's process; None if another process than the run started this one."""
    failed: bool = False
    """Whether the run has ended by an error or a kill."""
    complete: set[str] = field(default_factory=set)
    """Views that show everything."""
    unsaid: list[str] = field(default_factory=list)
    """Warnings for which the disk had no room, to be printed at the end."""
    locks: ExitStack = field(default_factory=ExitStack)
    """The views' locks, held until this process ends: a run that waits for one then finds all
    warnings."""


class View:
    """One place that shows the run. It finds out there what it shows already."""

    first = 0
    """The first iteration that is missing there."""

    def __init__(self, followed: Followed) -> None:
        self.followed, self.run, self.folder = followed, followed.run, followed.run.folder
        self.name = str(self.run.config.get("run_name", self.folder.name))
        self.earlier: Metrics = {}
        """The latest values of the iterations before the first."""

    def send(self, rows: Sequence[Metrics]) -> None:
        for row in rows:
            if row["iteration"] < self.first:
                self.earlier |= row
            else:
                self.write(int(row["iteration"]), row)

    def write(self, iteration: int, row: Metrics) -> None:
        raise NotImplementedError

    def close(self) -> str:
        """Finish; returns where to look."""
        raise NotImplementedError


class PageView(View):
    """The run's own page, written again after evaluations and at the end."""

    def __init__(self, followed: Followed) -> None:
        super().__init__(followed)
        self._page = Page(self.folder)

    def send(self, rows: Sequence[Metrics]) -> None:
        if any(name.startswith("eval/") for row in rows for name in row):
            with suppress(BusyError, OSError):  # another report writes it; the disk is full
                self.close()

    def close(self) -> str:
        return str(self._page.write())


class TensorBoard(View):
    """Event files in `<run>/tensorboard`. Each start writes them from the first iteration on, as
    everything in them is on record; thus TensorBoard shows no iteration twice."""

    def __init__(self, followed: Followed) -> None:
        from torch.utils.tensorboard import SummaryWriter

        super().__init__(followed)
        folder = self.folder / "tensorboard"
        private_folder(folder)
        for file in folder.glob("events.out.tfevents.*"):
            file.unlink()
        self._writer: Any = SummaryWriter(str(folder), purge_step=0)
        self._writer.add_text("config", "\n".join(code(self.run.config)), 0)

    def write(self, iteration: int, row: Metrics) -> None:
        import numpy as np

        for name, value in row.items():
            self._writer.add_scalar(name, value, iteration)
        for number, (caption, picture) in enumerate(before_after(self.run, iteration)):
            tag = f"{MAIN}before_after/{number}"
            self._writer.add_image(tag, np.asarray(picture), iteration, dataformats="HWC")
            self._writer.add_text(tag, text(caption, MAX_CELL_CHARS), iteration)
        self._writer.flush()

    def close(self) -> str:
        self._writer.close()
        return f"tensorboard --logdir {quote(self._writer.log_dir)}"


def table_for(view: View, module: Any, iteration: int, escape: Callable[[str], str]) -> Metrics:
    """{'episodes': the table of an iteration}, as wandb and trackio (whose API is the same) want
    it; {} if there is none."""

    def cell(value: Cell) -> Any:
        if isinstance(value, str):
            return escape(value)
        return module.Image(value) if isinstance(value, Image) else value

    table = episode_table(view.run, iteration, view.followed.tracking.images_per_iteration)
    data = [[cell(value) for value in row.values()] for row in table]
    return {"episodes": module.Table(columns=list(table[0]), data=data)} if table else {}


class Wandb(View):
    """The same wandb run at every start, whose id is kept in the run folder.

    Online it goes on after the last iteration that the server has. Each offline start is a folder
    of its own, with the iterations that the complete ones lack: `wandb sync` joins them.
    """

    def __init__(self, followed: Followed) -> None:
        super().__init__(followed)
        private_folder(self.folder / "wandb")
        # wandb keeps a table's pictures here until they are uploaded; the default is in $HOME.
        os.environ.setdefault("WANDB_DATA_DIR", str(self.folder.resolve() / "wandb"))
        self._wandb, self._page = import_module("wandb"), None
        if allowed_by_env(followed.tracking.wandb) == "online":
            self._page = self._open("online")
            self.first = self._page.starting_step
            if followed.pid is not None:
                print(f"{SAID.decode()}wandb: {self._page.url}", flush=True)
            return
        for folder in (self.folder / "wandb").glob("offline-run-*"):
            note = folder / LAST_ITERATION
            if not note.is_file():
                continue  # of an older version, which wrote no note
            if last := read_bytes(note, 100):
                self.first = max(self.first, int(last) + 1)
            else:  # of a start that was killed
                shutil.rmtree(folder)

    def _open(self, mode: Mode) -> Any:
        wandb, pid = self._wandb, self.followed.pid
        # `setup`, because `init` prints advice on packages before it reads its settings.
        wandb.setup(settings=wandb.Settings(silent=True))
        settings = wandb.Settings(
            init_timeout=WANDB_INIT_S,
            console="off",
            silent=True,
            disable_code=True,
            disable_git=True,
            **({"x_stats_pid": pid} if pid else {"x_disable_stats": True}),
        )
        page = wandb.init(
            mode=mode,
            project=self.followed.tracking.wandb_project,
            name=self.name,
            id=page_id(self.folder),
            resume="allow",
            dir=self.folder.resolve(),
            settings=settings,
        )
        page.define_metric("iteration")
        page.define_metric("*", step_metric="iteration")
        # Without `allow_val_change` one key that a resume changed keeps the whole old config.
        page.config.update(self.run.config, allow_val_change=True)
        return page

    def write(self, iteration: int, row: Metrics) -> None:
        if self._page is None:  # no folder without an iteration
            self._page = self._open("offline")
            write_atomically(Path(self._page.dir).parent / LAST_ITERATION, "")
            # Without these, `wandb sync` would drop them from the page's summary.
            self._page.summary.update(self.earlier)
        pictures = before_after(self.run, iteration)
        images = [self._wandb.Image(picture, caption=caption) for caption, picture in pictures]
        shown = {f"{MAIN}before_after": images} if images else {}
        table = table_for(self, self._wandb, iteration, str)
        # wandb's own step is the iteration, so that the server's last step is the last iteration.
        self._page.log({**row, **table, **shown}, step=iteration, commit=True)
        self._last = iteration

    def close(self) -> str:
        place = f"wandb sync {quote(str(self.folder))}/wandb/offline-run-*"
        folder = None
        if self._page is not None:
            place, folder = self._page.url or place, Path(self._page.dir).parent
            self._page.finish(exit_code=int(self.followed.failed))
        self._wandb.teardown()  # `finish` alone returns before an offline page is on the disk
        if folder is not None and folder.name.startswith("offline-run-"):
            write_atomically(folder / LAST_ITERATION, str(self._last))
        return place


def page_id(run_dir: Path) -> str:
    """The run's wandb id. It is stored in the run folder, so that a resumed run finds its page even
    if WANDB_RUN_ID is set for another run; a new run takes WANDB_RUN_ID if it is set."""
    path = run_dir / "wandb_id.txt"
    if not path.exists():
        new = os.environ.get("WANDB_RUN_ID", "").strip() or uuid.uuid4().hex[:12]
        write_atomically(path, new + "\n")
    return path.read_text(encoding="utf-8").strip()


def allowed_by_env(configured: Mode) -> Mode:
    """The configured mode, or that of the variable WANDB_MODE if that sends less."""
    env_mode = os.environ.get("WANDB_MODE", configured)
    return max(configured, env_mode if env_mode in MODES else "off", key=MODES.index)


class Trackio(View):
    """Files in `<run>/trackio`, or the Space that the config names."""

    def __init__(self, followed: Followed) -> None:
        super().__init__(followed)
        for name in REDIRECTS:
            os.environ.pop(name, None)
        private_folder(self.folder / "trackio")
        for file in (self.folder / "trackio").glob("*.db*"):
            # Replaces a hard link (of a snapshot) by a copy, and makes it private.
            open(file, "ab", opener=private).close()
        os.environ["TRACKIO_DIR"] = str(self.folder.resolve() / "trackio")  # read at import
        self._trackio = import_module("trackio")
        self._page = self._trackio.init(
            project=self.name,
            name=self.name,
            config=self.run.config,
            resume="allow",
            space_id=followed.tracking.trackio_space or None,
            private=True,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self.first = self._page._next_step

    def write(self, iteration: int, row: Metrics) -> None:
        escape = partial(text, max_chars=MAX_CELL_CHARS)  # trackio renders Markdown
        self._page.log(row | table_for(self, self._trackio, iteration, escape), step=iteration)

    def close(self) -> str:
        self._page.finish()
        return f"TRACKIO_DIR={quote(os.environ['TRACKIO_DIR'])} trackio show"


# ---- following -----------------------------------------------------------------------------------


def command(followed: Followed, name: str) -> str:
    """The command that sends to one view what is missing there."""
    mode = f" {followed.tracking.wandb}" if name == "wandb" else ""
    return f"rl follow {quote(str(followed.run.folder))} --{name}{mode}"


def follow(
    name: str, open_view: Callable[[Followed], View], followed: Followed, ended: threading.Event
) -> None:
    """Send everything to one view until the run has `ended`. After any error the view is left as it
    is: `rl follow` continues it later."""
    run_dir = followed.run.folder
    lines, lock = Lines(run_dir / "metrics.jsonl"), run_dir / LOCK.format(name)
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        followed.locks.enter_context(locked(lock, 0.0 if followed.pid is None else LIMIT_S))
        view = open_view(followed)
        is_last = False
        while not is_last:
            is_last = ended.wait(LOOK_EVERY_S)  # then all that the run wrote is there
            view.send([row for row in map(row_from, lines.new()) if row])
        place = view.close()
        followed.complete.add(name)
        if followed.pid is None:
            print(f"{name}: {place}", flush=True)
    except Exception as error:  # a tracker may fail in any way
        rest = f"{command(followed, name)} sends what is missing"
        why = scrub(" ".join(str(error).split()))  # on one line
        warning = f"{name} stopped ({type(error).__name__}: {why}); {rest}"
        try:
            warn(warning)
        except OSError:
            followed.unsaid.append(warning)


@printing.program
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 if a view is not complete."""
    parser = printing.Parser("rl follow", __doc__)
    parser.add_argument("run", help="run folder, or config")
    parser.add_overrides("as given to the run")
    add = partial(parser.add_argument, action="store_true")
    parser.add_argument("--wandb", choices=("online", "offline"), help="send it to wandb")
    add("--tensorboard", help="write event files to RUN/tensorboard")
    add("--trackio", help="write trackio's files to RUN/trackio, or to the config's Space")
    add("--page", help="write RUN/report/index.html")
    # A run itself uses it: stdin then says how the run has ended.
    add("--with-run", help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args(argv)
    run_dir = Path(args.run) if args.with_run else find_run(args.run, args.overrides)
    run = LoadedRun(run_dir)
    tracking = wanted(run, args)
    if args.with_run:
        os.nice(15)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)  # it ends after the run
    hold(run_dir)
    followed = Followed(run, tracking, os.getppid() if args.with_run else None)
    names = follow_all(followed)
    if not names:
        printing.complain("this run has no view to follow; name one, for example --page")
    sys.stdout.flush()
    # What hangs in a tracker's library must not keep this process.
    os._exit(0 if names and followed.complete.issuperset(names) else 1)


def wanted(run: LoadedRun, args: argparse.Namespace) -> TrackingConfig:
    """The config's section `tracking`, with the views that the options choose, if there are any."""
    config = loading.stored(run.config, str(run.folder / "config.json"))
    tracking = TrackingConfig.model_validate(config.get("tracking", {}))
    if args.wandb or args.tensorboard or args.trackio or args.page:
        views = {name: getattr(args, name) for name in ("tensorboard", "trackio", "page")}
        tracking = tracking.model_copy(update={**views, "wandb": args.wandb or "off"})
    if (allowed := allowed_by_env(tracking.wandb)) != tracking.wandb:
        setting = f"WANDB_MODE={os.environ['WANDB_MODE']}"
        warn(f"wandb: under {setting} it is {allowed!r} instead of {tracking.wandb!r}")
    return tracking


def follow_all(followed: Followed) -> Iterable[str]:
    """Follow the run with all its views at once, each in a thread of its own, so that a service
    that does not answer holds up no other. Returns the views' names."""
    tracking, ended = followed.tracking, threading.Event()
    known: Sequence[tuple[str, Callable[[Followed], View], bool]] = (
        ("page", PageView, tracking.page),
        ("wandb", Wandb, allowed_by_env(tracking.wandb) != "off"),
        ("tensorboard", TensorBoard, tracking.tensorboard),
        ("trackio", Trackio, tracking.trackio),
    )
    views = {name: view for name, view, is_wanted in known if is_wanted}
    threads = [
        threading.Thread(target=follow, args=(name, view, followed, ended), name=name, daemon=True)
        for name, view in views.items()
    ]
    for thread in threads:
        thread.start()
    if followed.pid is not None:
        followed.failed = sys.stdin.buffer.read() != ENDED
    with suppress(KeyboardInterrupt):
        while (
            followed.pid is None and followed.run.is_running and any(t.is_alive() for t in threads)
        ):
            time.sleep(LOOK_EVERY_S)
    ended.set()
    until_s = math.inf if followed.pid is None else time.monotonic() + LIMIT_S
    for thread in threads:
        while thread.is_alive() and time.monotonic() < until_s:
            thread.join(0.2)
        if thread.is_alive():
            warn(
                f"{thread.name}: the last rows are not sent after {LIMIT_S:g} s; "
                f"{command(followed, thread.name)} sends them at any time"
            )
    for warning in followed.unsaid:
        warn(warning)
    return views


if __name__ == "__main__":
    sys.exit(main())
