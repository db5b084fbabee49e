"""Lists the runs of a folder, and deletes checkpoints: `rl runs [FOLDER]`.

rl runs                     what is in $APP__BASE_EXP_DIR, else in runs/
rl runs prune runs/my-run   delete its older checkpoints but the best; shows them first, and asks
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from rich.filesize import decimal

from rl.config.printing import shown
from rl.console.console import duration
from rl.console.progress import counted
from rl.record.prune import plan, remove
from rl.record.run_summary import NO_RUN, Summary, folders, look
from rl.text import terminal

VARIABLE = "APP__BASE_EXP_DIR"
NAME_WIDTH = 24
_ROW = f"{{:<{NAME_WIDTH}}} {{:<11}} {{:>8}} {{:>6}} {{:>10}} {{:>16}}"
PRUNE_HELP = """\
Make room: delete the checkpoints of the runs in FOLDER that are older than the newest whole one,
but not the best on held-out samples. They are shown first, and you are asked.

Never touched: a run that is in use, the rest of a run, links, and a checkpoint that is not exactly
what the run wrote. To be rid of a run, delete its folder.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 where nothing could be read, was confirmed, or all of it deleted."""
    terminal.guard()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        prunes = words[:1] == ["prune"]
        parser = argparse.ArgumentParser(
            "rl runs prune" if prunes else "rl runs",
            description=PRUNE_HELP if prunes else __doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        default = os.environ.get(VARIABLE) or "runs"
        parser.add_argument("folder", nargs="?", default=default, help="of runs, or of one run")
        if prunes:
            parser.add_argument("--yes", action="store_true", help="do not ask")
            return prune(parser.parse_args(words[1:]))
        return list_runs(parser.parse_args(words).folder)
    except BrokenPipeError:  # `rl runs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"rl runs: {error}", file=sys.stderr)
        return 1


def list_runs(folder: str) -> int:
    summaries = _look_at(folder)
    runs = [summary for summary in summaries if not summary.problem]
    if runs:
        print(_ROW.format("run", "done", "held-out", "best", "checkpoint", "written"))
    for run in runs:
        print(
            _ROW.format(
                shown(run.path.name, NAME_WIDTH - 3),
                f"{run.done}/{run.planned}",
                "" if run.held_out is None else f"{run.held_out:.3f}",
                "" if run.best is None else f"{run.best:.3f}",
                "none" if run.checkpoint is None else run.checkpoint,
                f"{datetime.fromtimestamp(run.written_s):%Y-%m-%d %H:%M}",
            )
        )
        parts = ", ".join(f"{kind} {decimal(num)}" for kind, num in run.bytes_of.items())
        details = ["RUNNING"] if run.use == "running" else []
        details += [shown(run.system, NAME_WIDTH), f"{decimal(run.num_bytes)}: {parts}"]
        if run.damaged:
            details.append(f"checkpoint {', '.join(map(str, run.damaged))} is damaged")
        _print("; ".join(details))
    size = decimal(sum(summary.num_bytes for summary in summaries))
    print(f"{len(runs)} {'run' if len(runs) == 1 else 'runs'} in {shown(folder, 56)}, {size}")
    for summary in summaries:
        if summary.problem:
            running = "running; " if summary.use == "running" else ""
            _print(f"{shown(summary.path.name, 60)}: {running}{summary.problem}")
    return 0


def _look_at(folder: str) -> list[Summary]:
    """Those written last first."""
    if not Path(folder).is_dir():
        raise NotADirectoryError(f"{shown(folder, 60)} is no folder; name one, or set {VARIABLE}")
    found = [look(path) for path in folders(Path(folder).absolute())]
    return sorted(found, key=lambda summary: (-summary.written_s, summary.path.name))


def _print(text: str) -> None:
    """In lines of at most 80 columns."""
    lines = textwrap.wrap(
        text, 80, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
    )
    print("\n".join(lines))


def prune(args: argparse.Namespace) -> int:
    found = [summary for summary in _look_at(args.folder) if summary.problem != NO_RUN]
    plans = []
    with counted("runs looked at", len(found)) as progress:  # whole checkpoints are read
        for summary in found:
            plans.append(plan(summary))
            progress.step()
    for planned in plans:
        names = ", ".join(path.name for path in planned.going)
        size = f" ({decimal(planned.num_bytes)})" if names else ""
        _print(f"{shown(planned.run_dir.name, 60)}: {names or 'nothing goes'}{size}")
        for why in planned.left:
            _print(f"  left alone: {why}")
    plans = [planned for planned in plans if planned.going]
    if not plans:
        print(f"nothing to delete in {shown(args.folder, 60)}")
        return 0
    print(f"frees {decimal(sum(planned.num_bytes for planned in plans))}")
    if not args.yes:
        print("Delete this? [y/N] ", end="", flush=True)
        answer = sys.stdin.readline()
        if not answer:
            print("\nnobody answered; add --yes where nobody can")
        if answer.strip().lower() not in ("y", "yes"):
            print("nothing was deleted")
            return 1
    complaints: list[str] = []
    began_s = time.monotonic()
    freed = 0
    with counted("runs pruned", len(plans)) as progress:
        for planned in plans:
            freed += remove(planned, complaints.append)
            progress.step()
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    print(f"freed {decimal(freed)} in {duration(time.monotonic() - began_s)}")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
