"""wandb, as a view of the record: never needed, never fatal, never waited for.

What: `Tracker`, the only place that knows wandb. Whatever fails degrades the run one step, with one
line: online -> offline -> off. What not: the record itself (`run_record.py`), which is always
written. wandb's own ways that this guards against: without a key it raises (or asks, on a
terminal); with a key and no network its first call blocks for 100 s; pictures in tables wait for
their upload in $HOME, which a container loses.

The page's x axis is our own `iteration`: an offline run that is resumed starts wandb's step at 0.
"""

from __future__ import annotations

import importlib
import netrc
import os
import socket
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from rl.api.types import Episode
from rl.config.schema import RunConfig
from rl.files.atomic import write_atomically
from rl.files.images import downscale
from rl.ranks.dist import Dist
from rl.record.console import ClosingRow, PhaseTimer, warn
from rl.record.scrub import scrub

if TYPE_CHECKING:
    from PIL.Image import Image

REACH_TIMEOUT_S = 3.0
INIT_TIMEOUT_S = 30.0
FINISH_TIMEOUT_S = 60.0
_TABLE_IMAGE_SIDE_PX = 384
Mode = Literal["online", "offline", "off"]
_ORDER: tuple[Mode, ...] = ("online", "offline", "off")


class Tracker:
    """One page per run name. Local: only rank 0 calls wandb, the others' calls do nothing."""

    def __init__(
        self, run_dir: Path, config: RunConfig, dist: Dist, config_as_written: Mapping[str, Any]
    ) -> None:
        """`config_as_written`: `RunRecord.config`, which is scrubbed."""
        self._tracking = config.tracking
        self._secret_names = (config.judge.api_key_env,)
        self._wandb: Any  # the module, once it is imported
        self._run: Any = None
        self.mode: Mode = "off"
        """What became of `tracking.wandb`: 'online', 'offline' or 'off'."""
        if not dist.is_main or config.tracking.wandb == "off":
            return
        # Where wandb keeps a table's pictures until they are uploaded; its default is in $HOME.
        os.environ.setdefault("WANDB_DATA_DIR", str(run_dir.resolve() / "wandb"))
        if not self._guarded("import", self._import):
            return
        wanted = allowed_by_env(config.tracking.wandb)
        problem = _why_not_online(self._wandb.Settings().base_url) if wanted == "online" else None
        if problem is not None:
            warn(f"wandb: {problem}; going on offline (`wandb sync` uploads it later)")
            wanted = "offline"
        for mode in _ORDER[_ORDER.index(wanted) : -1]:
            if self._guarded(f"init {mode}", partial(self._init, mode, run_dir, config)):
                self.mode = mode
                self._guarded("config", lambda: self._run.config.update(dict(config_as_written)))
                return
            # wandb's helper process keeps the id "in use" after a failed start.
            self._guarded("teardown", self._wandb.teardown)

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Scalars under their stable names."""
        if self._run is not None:
            row = {**metrics, "iteration": iteration}
            self._guarded("log", lambda: self._run.log(row))

    def log_episodes(
        self,
        iteration: int,
        episodes_PG: Sequence[Sequence[Episode]],
        advantages_PG: Sequence[Sequence[float | None]],
    ) -> None:
        """A table of rank 0's first `images_per_iteration` episodes: source, reference edit,
        rendered, instruction, completion, reward and its parts, advantage."""
        every = self._tracking.log_episodes_every_n_iterations
        if self._run is None or every == 0 or iteration % every != 0:
            return
        pairs = [
            (episode, advantage)
            for episodes_G, advantages_G in zip(episodes_PG, advantages_PG, strict=True)
            for episode, advantage in zip(episodes_G, advantages_G, strict=True)
        ][: self._tracking.images_per_iteration]
        if pairs:
            self._guarded("episode table", lambda: self._log_table(iteration, pairs))

    def log_where_time_went(self, timer: PhaseTimer) -> None:
        """The closing table of this process, as the console prints it."""
        if self._run is not None:
            rows = [list(row) for row in timer.closing_rows()]
            columns = list(ClosingRow._fields)
            self._guarded(
                "closing table",
                lambda: self._run.log({"where_time_went": self._wandb.Table(columns, rows)}),
            )

    def close(self, failed: bool = False) -> None:
        """Finish the page, waiting at most a minute for what is not uploaded yet."""
        if self._run is None:
            return
        run, self._run = self._run, None

        def finish() -> None:
            run.finish(exit_code=int(failed))
            self._wandb.teardown()  # `finish` alone returns before an offline page is on the disk

        problem = _call_within(finish, FINISH_TIMEOUT_S)
        if problem is not None:
            warn(scrub(f"wandb did not finish its page: {problem}", self._secret_names))

    def _import(self) -> None:
        self._wandb = importlib.import_module("wandb")

    def _init(self, mode: Mode, run_dir: Path, config: RunConfig) -> None:
        # Else it says what it would like to have installed: the run's own settings come too late.
        self._wandb.setup(settings=self._wandb.Settings(silent=True))
        settings = self._wandb.Settings(
            init_timeout=INIT_TIMEOUT_S,
            finish_timeout=FINISH_TIMEOUT_S,
            console="off",
            silent=True,
            disable_code=True,
            disable_git=True,
        )
        self._run = self._wandb.init(
            mode=mode,
            project=config.tracking.wandb_project,
            name=config.run_name,
            id=page_id(run_dir),
            resume="allow",
            dir=run_dir.resolve(),
            settings=settings,
        )
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def _log_table(self, iteration: int, pairs: Sequence[tuple[Episode, float | None]]) -> None:
        def picture(image: Image | None) -> Any:
            return image and self._wandb.Image(downscale(image, _TABLE_IMAGE_SIDE_PX))

        parts = sorted({name for episode, _ in pairs for name in episode.parts})
        words = ("instruction", "completion", "status", "failure")
        columns: list[str | int] = ["source", "target", "rendered", *words, "reward"]
        columns += [*parts, "advantage"]
        rows = [
            [
                picture(episode.prompt.sample.source),
                picture(episode.prompt.sample.target),
                picture(episode.image),
                scrub(episode.prompt.sample.instruction, self._secret_names),
                scrub(episode.action.text, self._secret_names),
                episode.status.value,
                scrub(episode.failure or "", self._secret_names),
                episode.reward,
                *(episode.parts.get(name) for name in parts),
                advantage,
            ]
            for episode, advantage in pairs
        ]
        self._run.log({"episodes": self._wandb.Table(columns, rows), "iteration": iteration})

    def _guarded(self, what: str, call: Callable[[], object]) -> bool:
        """Run `call`; a failure turns the page off and is one line. True when it went well."""
        try:
            call()
        except Exception as error:
            warn(scrub(f"wandb {what} failed, the run goes on: {error!r}", self._secret_names))
            self._run, self.mode = None, "off"
            return False
        return True


def page_id(run_dir: Path) -> str:
    """The run's wandb id, kept in the run folder, so that a resume finds its page from any shell.

    It is WANDB_RUN_ID where that is set when the run begins. Later the folder's wins: one that is
    still exported for another run must not tear this one's page in two.
    """
    path = run_dir / "wandb_id.txt"
    wanted = os.environ.get("WANDB_RUN_ID", "").strip()
    if path.exists():
        kept = path.read_text(encoding="utf-8").strip()
        if wanted not in ("", kept):
            warn(
                f"wandb: the run goes on on its own page, {kept} ({path}); WANDB_RUN_ID={wanted} "
                "is not heeded (move that file away to begin a page of that id)"
            )
        return kept
    made = wanted or uuid.uuid4().hex[:12]
    write_atomically(path, made + "\n")
    return made


def allowed_by_env(wanted: Mode) -> Mode:
    """WANDB_MODE, wandb's own switch, may lower the mode, never raise it."""
    named = os.environ.get("WANDB_MODE", wanted)
    return max(wanted, named if named in _ORDER else "off", key=_ORDER.index)


def _why_not_online(base_url: str) -> str | None:
    """What wandb would trip over, found in seconds; None when online looks possible."""
    url = os.environ.get("WANDB_BASE_URL") or base_url
    host = urlsplit(url).hostname or url
    if not os.environ.get("WANDB_API_KEY") and not _netrc_knows(host):
        return "no API key (WANDB_API_KEY, or `wandb login`)"
    proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
    target = urlsplit(proxy or url)
    port = target.port or (80 if target.scheme == "http" else 443)
    problem = _call_within(
        lambda: socket.create_connection((target.hostname, port), REACH_TIMEOUT_S).close(),
        REACH_TIMEOUT_S,
    )
    return problem and f"{target.hostname}:{port} cannot be reached ({problem})"


def _netrc_knows(host: str) -> bool:
    path = os.environ.get("NETRC", str(Path.home() / ".netrc"))
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _call_within(call: Callable[[], object], seconds: float) -> str | None:
    """None when `call` returned in time, else what went wrong.

    A name look-up takes no timeout, so it gets a daemon thread, which may be abandoned.
    """
    outcome: list[str | None] = [f"no answer in {seconds:g} s"]

    def run() -> None:
        try:
            call()
            outcome[0] = None
        except Exception as error:
            outcome[0] = repr(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return outcome[0]
