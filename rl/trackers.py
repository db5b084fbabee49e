"""wandb, TensorBoard and trackio behind one interface; a tracker that fails is dropped."""

from __future__ import annotations

import importlib
import netrc
import os
import socket
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from PIL.Image import Image

from rl.api.types import Episode
from rl.config.schema import RunConfig, TrackingConfig
from rl.console import warn
from rl.files import downscale, private_folder, unshare, write_atomically
from rl.printing import code, remember, scrub, text
from rl.ranks.dist import Dist

# ---- tracker page --------------------------------------------------------------------------------
# A run's page at wandb or trackio, and functions that catch a tracker's failures.

FINISH_TIMEOUT_S = 60.0
MAX_CELL_CHARS = 600
MAIN_METRICS = {
    "eval/reward": "held_out_reward",
    "eval/gain_over_stock": "gain_over_untrained",
    "reward/mean": "training_reward",
    "kl/reference_k3": "kl",
    "policy/entropy": "entropy",
    "groups/zero_spread": "groups_without_spread",
}
"""The six most important metrics, in order, with short names: shown first, at trackers and on the
run's page."""
MAIN = "0_main/"
"""Trackers sort sections by name."""
Cell = str | float | Image | None


class Table(NamedTuple):
    name: str
    iteration: int
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    """Texts, numbers and pictures, with secrets (API keys) removed."""


class BeforeAfter(NamedTuple):
    """A held-out evaluation compared with that before training."""

    iteration: int
    pictures: Sequence[tuple[str, Image]]
    """(caption, source, before and after side by side), without secrets."""
    summary: Mapping[str, float | str]
    """What was learnt, by the name of the summary's entry."""


@dataclass
class ServicePage:
    """A run's page at wandb, or at trackio, which has the same API. A table is logged together with
    the metrics of its iteration. If a method raises any exception, the caller drops the page."""

    name: str
    module: Any
    write: Callable[[Mapping[str, Any], int], object]
    """Logs a row: (values by name, iteration)."""
    finish: Callable[[bool], object]
    """Ends the page; the argument: whether the run failed. May block indefinitely."""
    escape: Callable[[str], str] = str
    """Converts a text for a table's cell."""
    first_iteration: int = 0
    """First iteration to log; a resumed run repeats iterations that the page already has."""
    summarize: Callable[[Mapping[str, Any]], object] | None = None
    """Sets entries of the run's summary; None: the service has none."""
    _tables: dict[str, Any] = field(default_factory=dict)

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        tables, self._tables = self._tables, {}
        if iteration >= self.first_iteration:
            self.write({**metrics, **tables}, iteration)

    def log_table(self, table: Table) -> None:
        rows = [list(map(self._cell, row)) for row in table.rows]
        self._tables[table.name] = self.module.Table(columns=list(table.columns), data=rows)

    def log_before_after(self, compared: BeforeAfter) -> None:
        """Does nothing at a service without a summary, which has no panel of pictures either."""
        if self.summarize is not None:
            images = [self.module.Image(image, caption=text) for text, image in compared.pictures]
            self._tables |= {f"{MAIN}before_after": images} if images else {}
            self.summarize(compared.summary)

    def close(self, failed: bool) -> None:
        """Finish the page; waits at most `FINISH_TIMEOUT_S`."""
        call_within(lambda: self.finish(failed), FINISH_TIMEOUT_S)

    def _cell(self, cell: Cell) -> Any:
        if isinstance(cell, Image):
            return self.module.Image(cell)
        return self.escape(cell) if isinstance(cell, str) else cell


def with_main(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics, before them the main ones under their short names."""
    main = {f"{MAIN}{short}": metrics[n] for n, short in MAIN_METRICS.items() if n in metrics}
    return {**main, **metrics}


def tried(name: str, action: str, call: Callable[[], object]) -> bool:
    """Run `call`; log a warning if it raises. Returns whether it succeeded."""
    try:
        call()
    except Exception as error:  # a tracker may fail in any way
        warn(scrub(f"{name} {action} failed, the run goes on: {error!r}"))
        return False
    return True


def call_within(call: Callable[[], object], seconds: float) -> None:
    """Run `call` in a daemon thread, which is abandoned after `seconds` (a DNS look-up has no
    timeout). Raises the exception of `call`, or TimeoutError."""
    outcome: list[Exception | None] = [TimeoutError(f"no answer in {seconds:g} s")]

    def run() -> None:
        try:
            call()
            outcome[0] = None
        except Exception as error:
            outcome[0] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if outcome[0] is not None:
        raise outcome[0]


# ---- wandb page ----------------------------------------------------------------------------------
# A run's page in wandb; a failure lowers its mode by one step: online, offline, off.

REACH_TIMEOUT_S = 3.0
INIT_TIMEOUT_S = 30.0
Mode = Literal["online", "offline", "off"]
_ORDER: tuple[Mode, ...] = ("online", "offline", "off")


def open_wandb(run_dir: Path, config: RunConfig, scrubbed: Mapping[str, Any]) -> ServicePage | None:
    """The page, with the `scrubbed` config; None if tracking.wandb is 'off', or after a
    warning. The x axis is `iteration`, because a resumed offline run restarts wandb's step at 0."""
    mode = config.tracking.wandb
    if mode == "off":
        return None
    # wandb stores a table's pictures here until they are uploaded; the default is in $HOME.
    os.environ.setdefault("WANDB_DATA_DIR", str(run_dir.resolve() / "wandb"))
    attempt = partial(tried, "wandb")
    if not attempt("import", lambda: importlib.import_module("wandb")):
        return None
    wandb = importlib.import_module("wandb")
    mode = allowed_by_env(mode)
    problem = _why_not_online(wandb.Settings().base_url) if mode == "online" else ""
    if problem:
        warn(f"wandb: {problem}; going on offline (`wandb sync` uploads it later)")
        mode = "offline"
    runs: list[Any] = []

    def open_in(tried_mode: Mode) -> None:
        runs.append(_init(wandb, tried_mode, run_dir, config))

    def show_config() -> None:
        # Without `allow_val_change` one key that a resume changed keeps the whole old config.
        runs[0].config.update(dict(scrubbed), allow_val_change=True)

    def write(row: Mapping[str, Any], iteration: int) -> None:
        runs[0].log({**row, "iteration": iteration})

    def finish(failed: bool) -> None:
        runs[0].finish(exit_code=int(failed))
        wandb.teardown()  # `finish` alone returns before an offline page is on the disk

    for tried_mode in _ORDER[_ORDER.index(mode) : -1]:
        if attempt(f"init {tried_mode}", partial(open_in, tried_mode)):
            attempt("config", show_config)
            return ServicePage("wandb", wandb, write, finish, summarize=runs[0].summary.update)
        # wandb's helper process keeps the id "in use" after a failed start.
        attempt("teardown", wandb.teardown)
    return None


def _init(wandb: Any, mode: Mode, run_dir: Path, config: RunConfig) -> Any:
    # `setup`, because `init` prints advice on packages before it reads its settings.
    wandb.setup(settings=wandb.Settings(silent=True))
    settings = wandb.Settings(
        init_timeout=INIT_TIMEOUT_S,
        finish_timeout=FINISH_TIMEOUT_S,
        console="off",
        silent=True,
        disable_code=True,
        disable_git=True,
    )
    run = wandb.init(
        mode=mode,
        project=config.tracking.wandb_project,
        name=config.run_name,
        id=page_id(run_dir),
        resume="allow",
        dir=run_dir.resolve(),
        settings=settings,
    )
    run.define_metric("iteration")
    run.define_metric("*", step_metric="iteration")
    return run


def page_id(run_dir: Path) -> str:
    """The run's wandb id. It is stored in the run folder, so that a resumed run finds its page even
    if WANDB_RUN_ID is set for another run; a new run takes WANDB_RUN_ID if it is set."""
    path = run_dir / "wandb_id.txt"
    if not path.exists():
        new = os.environ.get("WANDB_RUN_ID", "").strip() or uuid.uuid4().hex[:12]
        write_atomically(path, new + "\n")
    return path.read_text(encoding="utf-8").strip()


def allowed_by_env(configured: Mode) -> Mode:
    """The configured mode, or that of the variable WANDB_MODE if it is lower."""
    env_mode = os.environ.get("WANDB_MODE", configured)
    return max(configured, env_mode if env_mode in _ORDER else "off", key=_ORDER.index)


def _why_not_online(base_url: str) -> str:
    """Why wandb cannot go online, or ''; takes seconds, where wandb's own call blocks for 100 s."""
    url = os.environ.get("WANDB_BASE_URL") or base_url
    host = urlsplit(url).hostname or url
    netrc_file = os.environ.get("NETRC", str(Path.home() / ".netrc"))
    has_key = bool(os.environ.get("WANDB_API_KEY"))
    with suppress(OSError, netrc.NetrcParseError):
        has_key = has_key or netrc.netrc(netrc_file).authenticators(host) is not None
    if not has_key:
        return "no API key (WANDB_API_KEY, or `wandb login`)"
    proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
    target = urlsplit(proxy or url)
    address = target.hostname, target.port or (80 if target.scheme == "http" else 443)
    try:
        call_within(
            lambda: socket.create_connection(address, REACH_TIMEOUT_S).close(), REACH_TIMEOUT_S
        )
    except Exception as error:
        return f"{address[0]}:{address[1]} cannot be reached ({error!r})"
    return ""


# ---- tensorboard page ----------------------------------------------------------------------------
# Writes TensorBoard event files to `<run>/tensorboard`.


class TensorboardPage:
    """Each start of a run opens a new file. Its `purge_step` hides what earlier starts logged from
    this step on, so that TensorBoard shows a repeated iteration once."""

    name = "tensorboard"

    def __init__(self, folder: Path, scrubbed: Mapping[str, Any]) -> None:
        self._folder, self._config = folder, scrubbed
        self._writer: Any = None

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        writer = self._writer_from(iteration)
        for name, value in metrics.items():
            writer.add_scalar(name, value, iteration)
        writer.flush()

    def log_before_after(self, compared: BeforeAfter) -> None:
        writer = self._writer_from(compared.iteration)
        for number, (caption, picture) in enumerate(compared.pictures):
            tag = f"{MAIN}before_after/{number}"
            self._add_picture(tag, picture, compared.iteration)
            writer.add_text(tag, text(caption, MAX_CELL_CHARS), compared.iteration)
        if learnt := compared.summary.get("learnt"):
            writer.add_text("learnt", text(str(learnt), MAX_CELL_CHARS), compared.iteration)

    def close(self, failed: bool) -> None:
        if self._writer is not None:
            self._writer.close()

    def _add_picture(self, tag: str, picture: Image, step: int) -> None:
        import numpy as np

        self._writer_from(step).add_image(tag, np.asarray(picture), step, dataformats="HWC")

    def _writer_from(self, step: int) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=step)
            self._writer.add_text("config", "\n".join(code(self._config)), step)
        return self._writer


def open_tensorboard(
    run_dir: Path, config: RunConfig, scrubbed: Mapping[str, Any]
) -> TensorboardPage | None:
    """None if tracking.tensorboard is off, or after a warning if the package is missing."""
    if not config.tracking.tensorboard:
        return None
    is_installed = tried("tensorboard", "import", lambda: import_module("tensorboard"))
    return TensorboardPage(run_dir / "tensorboard", scrubbed) if is_installed else None


# ---- trackio page --------------------------------------------------------------------------------
# Logs a run to trackio: to files in `<run>/trackio`, or to the Space that the config names.

REDIRECTS = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL", "TRACKIO_BUCKET_ID")
"""Environment variables that would make trackio send the run's data elsewhere."""
START_TIMEOUT_S = 120.0


def open_trackio(
    run_dir: Path, config: RunConfig, scrubbed: Mapping[str, Any]
) -> ServicePage | None:
    """Open the page, with the `scrubbed` config. Returns None if tracking.trackio is off, or if
    trackio fails, which is logged as a warning."""
    if not config.tracking.trackio:
        return None
    for name in REDIRECTS:
        if os.environ.pop(name, ""):
            warn(f"trackio: {name} is ignored; set tracking.trackio_space to send data to a Space")
    os.environ["TRACKIO_DIR"] = str(run_dir.resolve() / "trackio")  # read at import
    for file in (run_dir / "trackio").rglob("*.db*"):
        unshare(file)
    pages: list[ServicePage] = []

    def begin() -> None:
        trackio = import_module("trackio")
        run = trackio.init(
            project=config.run_name,
            name=config.run_name,
            config=dict(scrubbed),
            resume="allow",
            space_id=config.tracking.trackio_space or None,
            private=True,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        pages.append(
            ServicePage(
                "trackio",
                trackio,
                write=lambda row, iteration: run.log(dict(row), step=iteration),
                finish=lambda failed: run.finish(),
                escape=lambda cell: text(cell, MAX_CELL_CHARS),  # trackio renders Markdown
                first_iteration=run._next_step,
            )
        )

    # With a time limit, because a Space may not answer.
    is_open = tried("trackio", "start", lambda: call_within(begin, START_TIMEOUT_S))
    return pages[0] if is_open else None


# ---- tracking ------------------------------------------------------------------------------------
# Sends a run's metrics, tables and pictures to its trackers; drops a tracker that fails.

Page = TensorboardPage | ServicePage

_TABLE_IMAGE_SIDE_PX = 384


class Tracker:
    """One page per tracker of the run. Only rank 0 has pages; on other ranks, calls do nothing."""

    def __init__(
        self, run_dir: Path, config: RunConfig, dist: Dist, config_as_written: Mapping[str, Any]
    ) -> None:
        """`config_as_written`: `RunRecord.config`, which has no secrets."""
        self._tracking = config.tracking
        for judge in config.judges:
            remember(judge.api_key_env)
        self._pages: list[Page] = []
        if not dist.is_main:
            return
        for open_page in (open_wandb, open_tensorboard, open_trackio):
            if (page := open_page(run_dir, config, config_as_written)) is not None:
                self._pages.append(page)
                private_folder(run_dir / page.name)  # the page holds completions

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self._on_each("log", lambda page: page.log(iteration, with_main(metrics)))

    def log_before_after(self, compare: Callable[[], BeforeAfter | None]) -> None:
        """Log what `compare` returns; it is only called if there is a page."""
        found: list[BeforeAfter | None] = []
        if self._pages:
            tried("trackers", "before and after", lambda: found.append(compare()))
        if found and (compared := found[0]):
            self._on_each("before and after", lambda page: page.log_before_after(compared))

    def log_episodes(
        self,
        iteration: int,
        episodes_PG: Sequence[Sequence[Episode]],
        advantages_PG: Sequence[Sequence[float | None]],
    ) -> None:
        """Log a table of rank 0's first `images_per_iteration` episodes; not to TensorBoard, which
        has no tables."""
        every = self._tracking.log_episodes_every_n_iterations
        with_tables = [page for page in self._pages if isinstance(page, ServicePage)]
        if not with_tables or every == 0 or iteration % every != 0:
            return
        pairs = [
            (episode, advantage)
            for episodes_G, advantages_G in zip(episodes_PG, advantages_PG, strict=True)
            for episode, advantage in zip(episodes_G, advantages_G, strict=True)
        ][: self._tracking.images_per_iteration]
        if pairs:
            table = Table("episodes", iteration, *self._table(pairs))
            for page in with_tables:
                if not tried(page.name, "episode table", partial(page.log_table, table)):
                    self._pages.remove(page)

    def close(self, failed: bool = False) -> None:
        """Finish the pages; waits at most a minute for the upload of each."""
        self._on_each("end of its page", lambda page: page.close(failed))
        self._pages.clear()

    def _table(
        self, pairs: Sequence[tuple[Episode, float | None]]
    ) -> tuple[list[str], list[list[Cell]]]:
        """Columns and rows, with downscaled pictures and without secrets in the texts."""

        def picture(image: Image | None) -> Image | None:
            return image and downscale(image, _TABLE_IMAGE_SIDE_PX)

        parts = sorted({name for episode, _ in pairs for name in episode.parts})
        max_sources = max(1, *(len(episode.prompt.sample.sources) for episode, _ in pairs))
        columns = ["source", *(f"source {number}" for number in range(2, max_sources + 1))]
        columns += ["target", "rendered", "instruction", "completion", "status", "failure"]
        columns += ["reward", *parts, "advantage"]
        rows: list[list[Cell]] = []
        for episode, advantage in pairs:
            sample = episode.prompt.sample
            images = [*sample.sources, *[None] * (max_sources - len(sample.sources))]
            images += [sample.target, episode.image]
            texts = [sample.instruction, episode.action.text, episode.status.value]
            texts.append(episode.failure or "")
            numbers = [episode.reward, *map(episode.parts.get, parts), advantage]
            rows.append([*map(picture, images), *map(scrub, texts), *numbers])
        return columns, rows

    def _on_each(self, task: str, call: Callable[[Page], object]) -> None:
        self._pages = [page for page in self._pages if tried(page.name, task, partial(call, page))]


def not_installed(tracking: TrackingConfig) -> list[str]:
    """A message for each enabled tracker whose package is not installed."""
    packages_of: Mapping[str, tuple[bool, str]] = {
        "wandb": (tracking.wandb != "off", "'vlm-edit-rl[train]'"),
        "tensorboard": (tracking.tensorboard, "'vlm-edit-rl[tensorboard]'"),
        # trackio's requirements exclude the pinned Pillow, but trackio works with it.
        "trackio": (
            tracking.trackio,
            "'vlm-edit-rl[trackio]' && pip install --no-deps trackio==0.43.0",
        ),
    }
    return [
        f"tracking.{name}: the package {name!r} is not installed here, and the run goes on without "
        f"it: pip install {packages}"
        for name, (is_enabled, packages) in packages_of.items()
        if is_enabled and find_spec(name) is None
    ]
