"""Injects faults into tiny runs, one per case, and reports whether each run survives or stops well.

    python -m benchmarks.faults                          # all; exit code 1 if any outcome is bad
    python -m benchmarks.faults --only judge             # those whose name contains this

Good outcomes: survived; stopped (a clear message, nothing lost). Bad ones: LOST (an iteration, or
the run), SILENT (wrong without a message), HUNG, UNCLEAR (no clear message).
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.faults.cases import CASES, Case
from benchmarks.faults.processes import map_at_once, quiet_processes
from benchmarks.faults.trial import BAD, GOOD, Harness, Outcome, try_case


def main(argv: Sequence[str] | None = None) -> int:
    """Prints each outcome and a table; returns 1 if an outcome is bad."""
    parser = argparse.ArgumentParser("python -m benchmarks.faults", description=__doc__)
    add = parser.add_argument
    add("--only", default="", help="cases whose 'group | place | kind' contains this text")
    add("--sample", type=int, default=0, help="number of randomly chosen cases; 0: all")
    add("--jobs", type=int, default=2, help="number of processes")
    args = parser.parse_args(argv)
    cases = [case for case in CASES if args.only in case.name]
    if args.sample:
        cases = random.Random(0).sample(cases, min(args.sample, len(cases)))
    quiet_processes()
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        tried = partial(_tried, Harness(Path(folder)))
        for case, outcome in zip(
            cases, map_at_once(tried, enumerate(cases), args.jobs), strict=True
        ):
            outcomes.append(outcome)
            print(f"{outcome.verdict:9s} {case.name}: {outcome.why}", flush=True)
    print(table(cases, outcomes))
    return int(any(outcome.verdict in BAD for outcome in outcomes))


def _tried(harness: Harness, numbered: tuple[int, Case]) -> Outcome:
    """The outcome of a case; an error in the campaign's own code is a bad outcome."""
    try:
        return try_case(harness, *numbered)
    except Exception as error:
        return Outcome("NOT TRIED", repr(error))


def table(cases: Sequence[Case], outcomes: Sequence[Outcome]) -> str:
    """Counts by group and outcome, as Markdown."""
    verdicts = [*GOOD, *BAD]
    lines = [f"| group | cases | {' | '.join(verdicts)} |", "|---" * (len(verdicts) + 2) + "|"]
    counts = Counter((c.group, outcome.verdict) for c, outcome in zip(cases, outcomes, strict=True))
    for group in [*dict.fromkeys(case.group for case in cases), "all"]:
        numbers = [sum(n for (g, v), n in counts.items() if group in (g, "all") and v == verdict)
                   for verdict in verdicts]  # fmt: skip
        lines.append(f"| {group} | {sum(numbers)} | {' | '.join(map(str, numbers))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
