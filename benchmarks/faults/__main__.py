"""Injects faults into tiny runs, one per case, and reports whether each run survives or stops well.

    python -m benchmarks.faults                          # all; exit code 1 if any outcome is bad
    python -m benchmarks.faults --out campaign.jsonl     # continues an interrupted campaign
    python -m benchmarks.faults --only 'judge' --list

Good outcomes: survived; stopped (a clear message, nothing lost). Bad ones: LOST (an iteration, or
the run), SILENT (wrong without a message), HUNG, UNCLEAR (no clear message).
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.faults.cases import CASES, Case
from benchmarks.faults.harness import Harness
from benchmarks.faults.processes import map_at_once, quiet_processes
from benchmarks.faults.trial import BAD, GOOD, Outcome, try_case
from rl.files import append_line, json_line, read_rows


def main(argv: Sequence[str] | None = None) -> int:
    """Prints each outcome and a table; returns 1 if an outcome is bad."""
    parser = argparse.ArgumentParser("python -m benchmarks.faults", description=__doc__)
    add = parser.add_argument
    add("--only", default="", help="cases whose 'group | place | kind' contains this text")
    add("--sample", type=int, default=0, help="number of randomly chosen cases; 0: all")
    add("--jobs", type=int, default=2, help="number of processes")
    add("--list", action="store_true", help="list the cases and start nothing")
    add("--out", type=Path, help="JSONL of outcomes; cases that it contains are not tried again")
    args = parser.parse_args(argv)
    cases = [case for case in CASES if args.only in case.name]
    if args.sample:
        cases = random.Random(0).sample(cases, min(args.sample, len(cases)))
    if args.list:
        print(*(case.name for case in cases), f"{len(cases)} cases", sep="\n")
        return 0
    outcomes = known(args.out, cases) if args.out else {}
    quiet_processes()
    with tempfile.TemporaryDirectory() as folder:
        missing = [case for case in cases if case.name not in outcomes]
        harness = Harness(Path(folder)) if missing else None
        numbered = list(enumerate(missing))
        for (_, case), outcome in zip(
            numbered,
            map_at_once(lambda pair: tried(harness, pair[1], pair[0]), numbered, args.jobs),
            strict=True,
        ):
            outcomes[case.name] = outcome
            print(f"{outcome.verdict:9s} {case.name}: {outcome.why}", flush=True)
            if args.out:
                append_line(args.out, json_line({"name": case.name, **dataclasses.asdict(outcome)}))
    print(table(cases, outcomes))
    return int(any(outcome.verdict in BAD for outcome in outcomes.values()))


def tried(harness: Harness | None, case: Case, number: int) -> Outcome:
    """The outcome of a case; an error in the campaign's own code is a bad outcome."""
    assert harness is not None
    try:
        return try_case(harness, case, number)
    except Exception as error:
        return Outcome("NOT TRIED", repr(error), None, 0.0)


def known(path: Path, cases: Sequence[Case]) -> dict[str, Outcome]:
    """Name -> outcome of those `cases` that the JSONL file has."""
    names = {case.name for case in cases}
    rows = read_rows(path)[0] if path.is_file() else []
    return {name: Outcome(**row) for row in rows if (name := row.pop("name")) in names}


def table(cases: Sequence[Case], outcomes: dict[str, Outcome]) -> str:
    """Counts by group and outcome, as Markdown."""
    verdicts = [*GOOD, *BAD]
    lines = [f"| group | cases | {' | '.join(verdicts)} |", "|---" * (len(verdicts) + 2) + "|"]
    counts = Counter((case.group, outcomes[case.name].verdict) for case in cases)
    for group in [*dict.fromkeys(case.group for case in cases), "all"]:
        numbers = [sum(n for (g, v), n in counts.items() if group in (g, "all") and v == verdict)
                   for verdict in verdicts]  # fmt: skip
        lines.append(f"| {group} | {sum(numbers)} | {' | '.join(map(str, numbers))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
