"""Prints what a run learnt and writes its page: `rl report <run folder | config.jsonnet ...>`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rl.files.held import hold
from rl.report.folder import BusyError
from rl.report.page import write_page
from rl.report.reading import find_run, is_control, read_config, read_evaluations, read_named
from rl.report.single_file import write_single_file
from rl.report.summary import summary
from rl.run.page_refresh import BUSY
from rl.text import terminal


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 if there is nothing to report; `BUSY` if --refresh finds another report."""
    terminal.guard()
    parser = argparse.ArgumentParser("rl report", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", help="run folder, or the config it was started with")
    parser.add_argument("overrides", nargs="*", help="key=value, as given to the run")
    parser.add_argument("--against", metavar="OTHER_RUN", help="a run folder to compare with")
    parser.add_argument(
        "--single-file",
        action="store_true",
        help="also write report/report.html, for a mail: at most 5 MB, with thumbnails",
    )
    parser.add_argument("--page-only", action="store_true", help="write only the page: no summary")
    parser.add_argument(
        "--refresh",
        action="store_true",
        help="used by a run itself: write only the page",
    )
    args = parser.parse_intermixed_args(argv)
    try:
        run_dir = find_run(args.run, args.overrides)
        other = None if args.against is None else find_run(args.against)
        if args.refresh:
            hold(run_dir)
        if not (args.page_only or args.refresh):
            metrics = read_named(run_dir / "metrics.jsonl", "iteration")
            control = is_control(read_config(run_dir))
            print("\n".join(summary(metrics, read_evaluations(run_dir), control)))
        page, result = write_page(run_dir, other)
        print(f"  page: {page} ({result.num_written} of its data pages are new)")
        if args.single_file:
            print(f"  {write_single_file(run_dir, result, other)}")
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return BUSY if args.refresh and isinstance(error, BusyError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
