"""List the runs of a folder: of FOLDER, else of $APP__BASE_EXP_DIR, else of runs/.

rl runs
rl runs runs/ --sort held-out
rl runs --json | jq '.[0].best'
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from rl import printing
from rl.config.loading import escaped
from rl.record.run_summary import RUNS_VARIABLE, Summary, folders, summarise

ORDERS: dict[str, Callable[[Summary], Any]] = {
    "written": lambda run: -run.written_s,
    "name": lambda run: run.path.name,
    "done": lambda run: -run.done,
    "held-out": lambda run: math.inf if run.held_out is None else -run.held_out,
    "best": lambda run: math.inf if run.best is None else -run.best,
    "size": lambda run: -run.num_bytes,
}
"""Of `--sort`: best or largest first."""
NAME_WIDTH = 24
_ROW = f"{{:<{NAME_WIDTH}}} {{:<11}} {{:>8}} {{:>6}} {{:>10}} {{:>16}}"


@printing.program
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 if nothing could be read."""
    parser = printing.Parser("rl runs", __doc__)
    default = os.environ.get(RUNS_VARIABLE) or "runs"
    parser.add_argument("folder", nargs="?", default=default, help="folder of runs, or of one run")
    parser.add_argument("--sort", choices=ORDERS, default="written", help="the order of the runs")
    parser.add_argument("--json", action="store_true", help="print one JSON list, for programs")
    args = parser.parse_args(argv)
    if not Path(args.folder).is_dir():
        shown = escaped(args.folder, 60)
        raise ValueError(f"{shown} is not a folder; name one, or set {RUNS_VARIABLE}")
    summaries = [summarise(path) for path in folders(Path(args.folder).absolute())]
    summaries.sort(key=lambda summary: (ORDERS[args.sort](summary), summary.path.name))
    if args.json:
        rows = [{**asdict(run), "path": str(run.path)} for run in summaries if not run.problem]
        print(json.dumps(rows, indent=2))
    else:
        list_runs(args.folder, summaries)
    return 0


def list_runs(folder: str, summaries: Sequence[Summary]) -> None:
    """Prints a table of the runs, then why other folders are none."""
    runs = [summary for summary in summaries if not summary.problem]
    if runs:
        printing.show(
            _ROW.format("run", "done", "held-out", "best", "checkpoint", "written"), "bold"
        )
    for run in runs:
        print(
            _ROW.format(
                escaped(run.path.name, NAME_WIDTH - 3),
                f"{run.done}/{run.planned}",
                "" if run.held_out is None else f"{run.held_out:.3f}",
                "" if run.best is None else f"{run.best:.3f}",
                "none" if run.checkpoint is None else run.checkpoint,
                f"{datetime.fromtimestamp(run.written_s):%Y-%m-%d %H:%M}",
            )
        )
        details = ["RUNNING"] if run.is_running else []
        details += [escaped(run.system, NAME_WIDTH), decimal(run.num_bytes)]
        printing.show(
            printing.folded("; ".join(details), "  ", 2), marks={"^  RUNNING": "bold green"}
        )
    size = decimal(sum(summary.num_bytes for summary in summaries))
    print(f"{len(runs)} {'run' if len(runs) == 1 else 'runs'} in {escaped(folder, 56)}, {size}")
    for summary in summaries:
        if summary.problem:
            running = "running; " if summary.is_running else ""
            text = f"{escaped(summary.path.name, 60)}: {running}{summary.problem}"
            print(printing.folded(text, "  ", 2))


if __name__ == "__main__":
    sys.exit(main())
