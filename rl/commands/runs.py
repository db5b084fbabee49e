"""The runs of a folder: how far, how good, how large; and making room: `rl runs [FOLDER]`.

    rl runs                                       what is in $APP__BASE_EXP_DIR, else in runs/
    rl runs prune --keep-last 3                   make room in all runs but the last three
    rl runs prune --older-than 30d --pictures     only training's pictures, of old runs

`rl runs prune --help` says what goes. It shows that first, and asks.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

from rl.config.printing import shown
from rl.record import terminal
from rl.record.console import duration
from rl.record.progress import counted
from rl.record.prune import Kind, Plan, plan, remove
from rl.record.run_summary import NO_RUN, Summary, folders, look

VARIABLE = "APP__BASE_EXP_DIR"
WIDTH = 80
NAME_WIDTH = 29
MAX_LEFT_SHOWN = 5
UNIT_S = {"h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
PRUNE_HELP = """\
Make room in runs that lie in FOLDER, by rule. Which runs (all, unless said; both: what fits both):
--keep-last, --older-than. What goes of them (both, unless said): --pictures,
--checkpoints-but-latest.

Never touched: a run that is in use, its record (config, metrics, episodes, held-out pictures,
logs), its newest whole checkpoint, the best on held-out samples, models that are kept for ever,
links, and whatever does not bear a name that a run gives. To be rid of a run, delete its folder.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 where nothing could be read, was confirmed, or all of it deleted."""
    terminal.guard()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words[:1] == ["prune"]:
            return prune(_prune_arguments(words[1:]))
        parser = argparse.ArgumentParser(
            "rl runs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        _add_folder(parser)
        return list_runs(parser.parse_args(words).folder)
    except BrokenPipeError:  # `rl runs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"rl runs: {error}", file=sys.stderr)
        return 1


def _prune_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "rl runs prune",
        description=PRUNE_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_folder(parser)
    add = parser.add_argument
    add("--keep-last", type=_count, metavar="N", help="not of the N runs that were written last")
    add("--older-than", type=_age_s, metavar="AGE", help="last written so long ago: 12h, 30d, 8w")
    add("--pictures", action="store_true", help="training's pictures (images/)")
    add(
        "--checkpoints-but-latest",
        action="store_true",
        help="checkpoints but the newest whole one and the best; those kept for ever too",
    )
    add("--yes", action="store_true", help="do not ask")
    args = parser.parse_args(words)
    chooses_runs = args.keep_last is not None or args.older_than is not None
    if not (chooses_runs or args.pictures or args.checkpoints_but_latest):
        parser.error("name a rule: --keep-last, --older-than, --pictures, --checkpoints-but-latest")
    return args


def _add_folder(parser: argparse.ArgumentParser) -> None:
    default = os.environ.get(VARIABLE) or "runs"
    parser.add_argument("folder", nargs="?", default=default, help="of runs, or of one run")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of runs")
    return int(text)


def _age_s(text: str) -> float:
    match = re.fullmatch(r"(\d{1,6})([hdw])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no age: write 12h, 30d or 8w")
    return int(match[1]) * UNIT_S[match[2]]


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
    kinds = _kinds(args)
    chosen = _chosen(args)
    plans = []
    with counted("runs looked at", len(chosen)) as progress:  # whole checkpoints are read
        for summary in chosen:
            plans.append(plan(summary, kinds))
            progress.step()
    for planned in plans:
        print("\n".join(_plan_lines(planned)))
    num_bytes = sum(planned.num_bytes for planned in plans)
    if not any(planned.going for planned in plans):
        print(f"nothing to delete in {_shown(args.folder)}")
        return 0
    print(f"frees {size_text(num_bytes)}")
    if not args.yes and not _confirmed():
        print("nothing was deleted")
        return 1
    complaints: list[str] = []
    began_s = time.monotonic()
    freed = 0
    with counted("runs pruned", len(plans)) as progress:
        for planned in plans:
            freed += remove(planned, kinds, complaints.append) if planned.going else 0
            progress.step()
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    print(f"freed {size_text(freed)} in {duration(time.monotonic() - began_s)}")
    return 1 if complaints else 0


def _kinds(args: argparse.Namespace) -> list[Kind]:
    named: dict[Kind, bool] = {
        "pictures": args.pictures,
        "checkpoints": args.checkpoints_but_latest,
    }
    return [kind for kind, wanted in named.items() if wanted or not any(named.values())]


def _chosen(args: argparse.Namespace) -> list[Summary]:
    """The runs that the rules choose, and what is none beside them: it is named."""
    found = [summary for summary in _look_at(args.folder) if summary.problem != NO_RUN]
    if args.keep_last is not None:
        runs = [summary for summary in found if not summary.problem]
        found = [summary for summary in found if summary not in runs[: args.keep_last]]
    if args.older_than is not None:
        latest_s = time.time() - args.older_than
        found = [summary for summary in found if summary.written_s < latest_s]
    return found


def _plan_lines(planned: Plan) -> list[str]:
    words = []
    for kind, one in (("pictures", "picture"), ("checkpoints", "checkpoint")):
        going = [entry for entry in planned.going if entry.kind == kind]
        if going:
            size = size_text(sum(entry.num_bytes for entry in going))
            names = "" if kind == "pictures" else f" {', '.join(g.path.name for g in going)}"
            words.append(f"{len(going)} {one if len(going) == 1 else kind}{names} ({size})")
    left = list(planned.left[:MAX_LEFT_SHOWN])
    if (more := len(planned.left) - MAX_LEFT_SHOWN) > 0:
        left.append(f"and {more} more")
    said = [", ".join(words) or "nothing goes", *(f"left alone: {why}" for why in left)]
    name = _shown(planned.run_dir.name)
    return [_wrapped(f"{name}: {said[0]}"), *(_wrapped(f"  {line}") for line in said[1:])]


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
