"""The runs of a folder: how far, how good, how large; and making room: `rl runs [FOLDER]`.

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
from pathlib import Path

from rl.config.printing import shown
from rl.record import terminal
from rl.record.console import duration
from rl.record.progress import counted
from rl.record.prune import Plan, plan, remove
from rl.record.run_summary import NO_RUN, Summary, folders, look

VARIABLE = "APP__BASE_EXP_DIR"
WIDTH = 80
NAME_WIDTH = 29
MAX_LEFT_SHOWN = 5
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
    now_s = time.time()
    if runs:
        print(_line("run", "done", "held-out", "best", "checkpoint", "written"))
    for run in runs:
        print("\n".join(lines_of(run, now_s)))
    size = size_text(sum(summary.num_bytes for summary in summaries))
    print(f"{len(runs)} {'run' if len(runs) == 1 else 'runs'} in {_shown(folder)}, {size}")
    for summary in summaries:
        if summary.problem:
            running = "running; " if summary.use == "running" else ""
            print(_wrapped(f"{_shown(summary.path.name)}: {running}{summary.problem}"))
    return 0


def _look_at(folder: str) -> list[Summary]:
    """Those written last first."""
    if not Path(folder).is_dir():
        raise NotADirectoryError(f"{_shown(folder)} is no folder; name one, or set {VARIABLE}")
    found = [look(path) for path in folders(Path(folder).absolute())]
    return sorted(found, key=lambda summary: (-summary.written_s, summary.path.name))


def lines_of(run: Summary, now_s: float) -> list[str]:
    """Two or more lines of at most 80 columns."""
    checkpoint = "none" if run.checkpoint is None else str(run.checkpoint)
    parts = ", ".join(f"{kind} {size_text(num)}" for kind, num in run.bytes_of.items())
    detail = [shown(run.system, NAME_WIDTH), f"{size_text(run.num_bytes)}: {parts}"]
    if run.use == "running":
        detail.insert(0, "RUNNING")
    if run.damaged:
        detail.append(f"checkpoint {', '.join(map(str, run.damaged))} is damaged")
    return [
        _line(
            shown(run.path.name, NAME_WIDTH - 3),
            f"{run.done}/{run.planned}",
            "" if run.held_out is None else f"{run.held_out:.3f}",
            "" if run.best is None else f"{run.best:.3f}",
            checkpoint,
            age_text(now_s - run.written_s),
        ),
        _wrapped("; ".join(detail)),
    ]


def _line(name: str, done: str, held_out: str, best: str, checkpoint: str, written: str) -> str:
    return f"{name:<{NAME_WIDTH}} {done:<11} {held_out:>8} {best:>6} {checkpoint:>10} {written:>11}"


def _wrapped(text: str) -> str:
    return textwrap.fill(
        text, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
    )


def _shown(text: str) -> str:
    return shown(text, 60)


def size_text(num_bytes: int) -> str:
    """'0', '840 KB', '18 MB', '1.2 GB'; of 1000 bytes."""
    for unit, power in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if num_bytes >= power:
            value = num_bytes / power
            return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"
    return f"{num_bytes} B" if num_bytes else "0"


def age_text(seconds: float) -> str:
    """'now', '12 min ago', '5 h ago', '40 d ago'."""
    for unit, size_s in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= (2 * size_s if unit == "d" else size_s):
            return f"{seconds / size_s:.0f} {unit} ago"
    return "now"


def prune(args: argparse.Namespace) -> int:
    found = [summary for summary in _look_at(args.folder) if summary.problem != NO_RUN]
    plans = []
    with counted("runs looked at", len(found)) as progress:  # whole checkpoints are read
        for summary in found:
            plans.append(plan(summary))
            progress.step()
    for planned in plans:
        print("\n".join(_plan_lines(planned)))
    plans = [planned for planned in plans if planned.going]
    if not plans:
        print(f"nothing to delete in {_shown(args.folder)}")
        return 0
    print(f"frees {size_text(sum(planned.num_bytes for planned in plans))}")
    if not args.yes and not _confirmed():
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
    print(f"freed {size_text(freed)} in {duration(time.monotonic() - began_s)}")
    return 1 if complaints else 0


def _plan_lines(planned: Plan) -> list[str]:
    names = ", ".join(path.name for path in planned.going)
    size = f" ({size_text(planned.num_bytes)})" if names else ""
    left = list(planned.left[:MAX_LEFT_SHOWN])
    if (more := len(planned.left) - MAX_LEFT_SHOWN) > 0:
        left.append(f"and {more} more")
    head = f"{_shown(planned.run_dir.name)}: {names or 'nothing goes'}{size}"
    return [_wrapped(head), *(_wrapped(f"  left alone: {why}") for why in left)]


def _confirmed() -> bool:
    """Nobody there is no yes."""
    print("Delete this? [y/N] ", end="", flush=True)
    answer = sys.stdin.readline()
    if not answer:
        print()
        print("nobody answered; add --yes where nobody can")
    return answer.strip().lower() in ("y", "yes")


if __name__ == "__main__":
    sys.exit(main())
