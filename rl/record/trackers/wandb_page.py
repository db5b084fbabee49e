"""A run's page in wandb. Each failure degrades it one step: online, offline, off.

Guards against wandb's own ways: without a key it raises or asks; without a network its first call
blocks for 100 s; pictures wait for their upload in $HOME. The x axis is our own `iteration`,
because an offline run that is resumed starts wandb's step at 0.
"""

from __future__ import annotations

import importlib
import netrc
import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from rl.config.schema import RunConfig
from rl.files.atomic import write_atomically
from rl.record.console import warn
from rl.record.trackers.page import Cell, Page, call_within, is_picture, tried

REACH_TIMEOUT_S = 3.0
INIT_TIMEOUT_S = 30.0
FINISH_TIMEOUT_S = 60.0
Mode = Literal["online", "offline", "off"]
_ORDER: tuple[Mode, ...] = ("online", "offline", "off")


class WandbPage(Page):
    """See the module."""

    name = "wandb"

    def __init__(self, wandb: Any, run: Any, mode: Mode) -> None:
        """`wandb`: the module; `run`: its run; `mode`: 'online' or 'offline'."""
        self._wandb, self._run, self.mode = wandb, run, mode

    def tell(self, config: Mapping[str, Any]) -> None:
        """The run's config, beside what it measures."""
        self._run.config.update(dict(config))

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "iteration": iteration})

    def log_table(
        self,
        name: str,
        iteration: int | None,
        columns: Sequence[str],
        rows: Sequence[Sequence[Cell]],
    ) -> None:
        cells = [[self._wandb.Image(c) if is_picture(c) else c for c in row] for row in rows]
        table = {name: self._wandb.Table(list(columns), cells)}
        self._run.log(table if iteration is None else {**table, "iteration": iteration})

    def close(self, failed: bool) -> None:
        def finish() -> None:
            self._run.finish(exit_code=int(failed))
            self._wandb.teardown()  # `finish` alone returns before an offline page is on the disk

        problem = call_within(finish, FINISH_TIMEOUT_S)
        if problem is not None:
            raise TimeoutError(problem)


def open_page(run_dir: Path, config: RunConfig, written: Mapping[str, Any]) -> WandbPage | None:
    """The page of a run whose config, as it may be written, is `written`; None where none is wanted
    or none can be had, which is said."""
    wanted = config.tracking.wandb
    if wanted == "off":
        return None
    # Where wandb keeps a table's pictures until they are uploaded; its default is in $HOME.
    os.environ.setdefault("WANDB_DATA_DIR", str(run_dir.resolve() / "wandb"))
    attempt = partial(tried, "wandb")
    if not attempt("import", lambda: importlib.import_module("wandb")):
        return None
    wandb = importlib.import_module("wandb")
    wanted = allowed_by_env(wanted)
    problem = _why_not_online(wandb.Settings().base_url) if wanted == "online" else None
    if problem is not None:
        warn(f"wandb: {problem}; going on offline (`wandb sync` uploads it later)")
        wanted = "offline"
    pages: list[WandbPage] = []

    def open_in(mode: Mode) -> None:
        pages.append(WandbPage(wandb, _init(wandb, mode, run_dir, config), mode))

    for mode in _ORDER[_ORDER.index(wanted) : -1]:
        if attempt(f"init {mode}", partial(open_in, mode)):
            attempt("config", lambda: pages[0].tell(written))
            return pages[0]
        # wandb's helper process keeps the id "in use" after a failed start.
        attempt("teardown", wandb.teardown)
    return None


def _init(wandb: Any, mode: Mode, run_dir: Path, config: RunConfig) -> Any:
    # Else it says what it would like to have installed: the run's own settings come too late.
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
    problem = call_within(
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
