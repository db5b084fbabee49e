"""Logs a run to trackio: to files in `<run>/trackio`, or to the Space that the config names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from rl.config.schema import RunConfig
from rl.console.console import warn
from rl.files.private import unshare
from rl.text.markdown import text
from rl.trackers.tracker_page import MAX_CELL_CHARS, ServicePage, call_within, tried

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
