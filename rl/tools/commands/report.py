"""Print what a run learnt and write its page; compare runs.

    rl report runs/my-run
    rl report configs/quickstart.jsonnet run_name=second
    rl report runs/my-run --against runs/control runs/other

RUN is a run folder, or the config that the run was started with. --against prints the
paired differences on the held-out samples and writes report/compare.html; controls
among them (algorithm.shuffle_rewards) show what chance does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rl import printing
from rl.tools.report.compare import by_chance, compare, lines, write_comparison
from rl.tools.report.page import write_page
from rl.tools.report.reading import (
    BusyError,
    find_run,
    is_control,
    read_config,
    read_evaluations,
    read_named,
)
from rl.tools.report.summary import INTERVAL, summary


@printing.program
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 if there is nothing to report."""
    printing.guard()
    parser = printing.Parser("rl report", f"{__doc__}{printing.KEY_VALUE}")
    parser.add_argument("run", help="run folder, or config")
    parser.add_overrides("as given to the run")
    parser.add_argument("--against", metavar="RUN", nargs="+", default=[], help="runs to compare")
    args = parser.parse_intermixed_args(argv)
    try:
        run_dir = find_run(args.run, args.overrides)
        results = [compare(run_dir, find_run(other)) for other in args.against]
        metrics = read_named(run_dir / "metrics.jsonl", "iteration")
        control = is_control(read_config(run_dir))
        _show(summary(metrics, read_evaluations(run_dir), control))
        page, index = write_page(run_dir)
        print(f"  page: {page} ({index.num_written} of its data pages are new)")
        for result in results:
            if not result.is_only_chance:
                _show(lines(run_dir.resolve().name, result))
        if results:
            _show([f"  {INTERVAL}", *by_chance(run_dir, results)])
            print(f"  page: {write_comparison(run_dir, results)}")
    except BusyError as error:
        printing.complain(str(error))
        return 1
    return 0


def _show(texts: Sequence[str]) -> None:
    """Print the lines, with gains beyond noise in colour."""
    printing.show(
        "\n".join(texts),
        marks={
            r"\(\+[\d.]+, 95 % \+.*?\)": "green",
            r"\(-[\d.]+, 95 % -[\d.]+ to -.*?\)|NOT COMPARABLE|^  DRIFT.*": "red",
        },
    )


if __name__ == "__main__":
    sys.exit(main())
