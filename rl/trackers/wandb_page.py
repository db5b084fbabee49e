"""A run's page in wandb; a failure lowers its mode by one step: online, offline, off."""

from __future__ import annotations

import importlib
import netrc
import os
import socket
import uuid
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from rl.config.schema import RunConfig
from rl.console.console import warn
from rl.files.atomic import write_atomically
from rl.trackers.tracker_page import FINISH_TIMEOUT_S, ServicePage, call_within, tried

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
