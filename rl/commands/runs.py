"""Lists the runs of FOLDER, else of $APP__BASE_EXP_DIR, else of runs/: `rl runs [FOLDER]`."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from rich.filesize import decimal

from rl.config.printing import escaped
from rl.record.run_summary import folders, summarise
from rl.text import terminal

VARIABLE = "APP__BASE_EXP_DIR"
NAME_WIDTH = 24
_WRAPPED = textwrap.TextWrapper(
    80, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
)
_ROW = f"{{:<{NAME_WIDTH}}} {{:<11}} {{:>8}} {{:>6}} {{:>10}} {{:>16}}"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 if nothing could be read."""
    terminal.guard()
    parser = argparse.ArgumentParser("rl runs", description=__doc__)
    default = os.environ.get(VARIABLE) or "runs"
    parser.add_argument("folder", nargs="?", default=default, help="folder of runs, or of one run")
    try:
        return list_runs(parser.parse_args(argv).folder)
    except BrokenPipeError:  # `rl runs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"rl runs: {error}", file=sys.stderr)
        return 1


def list_runs(folder: str) -> int:
    """Prints the runs of `folder`, the most recently written first."""
    if not Path(folder).is_dir():
        raise NotADirectoryError(
            f"{escaped(folder, 60)} is not a folder; name one, or set {VARIABLE}"
        )
    unsorted = [summarise(path) for path in folders(Path(folder).absolute())]
    summaries = sorted(unsorted, key=lambda summary: (-summary.written_s, summary.path.name))
    runs = [summary for summary in summaries if not summary.problem]
    if runs:
        print(_ROW.format("run", "done", "held-out", "best", "checkpoint", "written"))
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
        parts = ", ".join(f"{kind} {decimal(num)}" for kind, num in run.bytes_of.items())
        details = ["RUNNING"] if run.is_running else []
        details += [escaped(run.system, NAME_WIDTH), f"{decimal(run.num_bytes)}: {parts}"]
        if run.damaged:
            details.append(f"checkpoint {', '.join(map(str, run.damaged))} is damaged")
        print(_WRAPPED.fill("; ".join(details)))
    size = decimal(sum(summary.num_bytes for summary in summaries))
    print(f"{len(runs)} {'run' if len(runs) == 1 else 'runs'} in {escaped(folder, 56)}, {size}")
    for summary in summaries:
        if summary.problem:
            running = "running; " if summary.is_running else ""
            print(_WRAPPED.fill(f"{escaped(summary.path.name, 60)}: {running}{summary.problem}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
