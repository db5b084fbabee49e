"""Print what a run learnt and write its page; compare runs.

    rl report runs/my-run
    rl report configs/quickstart.jsonnet run_name=second
    rl report runs/my-run --against runs/control runs/other

RUN is a run folder, or the config that the run was started with. --against prints the
paired differences on the held-out samples and writes report/compare.html; controls
among them (algorithm.shuffle_rewards) show what chance does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from rl import printing
from rl.config.loading import escaped
from rl.files import write_atomically
from rl.printing import without_lone_surrogates
from rl.record.checkpoint import held_out_rewards
from rl.tools.page import (
    INTERVAL,
    NAMING,
    PAGE_FOLDER,
    Change,
    Page,
    changes_of,
    flat,
    literal,
    summary,
    table,
    template,
)
from rl.tools.reading import (
    CURVES,
    Evaluation,
    Record,
    curve_data,
    find_run,
    is_control,
    named_rows,
    own_folder,
    picture,
    read_config,
    read_evaluations,
    read_named,
    shown_of,
    words_of,
)

# ---- comparison ----------------------------------------------------------------------------------
# Compares runs on the held-out samples that they share: numbers, and `report/compare.html`.

REWARD = ("rewards.", "evaluation.temperature.", "evaluation.top_k.")
JUDGE = ("judge.model.", "judge.revision.", "judge.temperature.", "judge.image_side_px.")
"""Config keys that decide what a held-out reward means, each with all below it."""
SUM = "final_reward."
"""Keys that decide how the parts of a reward are summed, not what they mean."""
OF_A_CONTROL = {"seed", "algorithm.shuffle_rewards"}
"""Config keys in which a run's control may differ from it."""
SCRIPTS = ("base.js", "charts.js", "compare.js")
NUM_SAMPLES = 6
"""Samples with the largest gains, and as many with the largest losses, on the page."""
STYLES = ("main", "dash run1", "dot run2", "dashdot run3", "run4", "dash run5", "dot run6")
"""How the lines of the runs are drawn; further runs have no curve."""


@dataclass
class Comparison:
    """Run A against one other run."""

    name: str
    other: Path
    reasons: list[str]
    """Why the two cannot be compared; [] if they can."""
    notes: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    """Held-out reward of all shared samples, then by category: (other run, A)."""
    parts: list[Change] = field(default_factory=list)
    """The same of each reward part."""
    folders: tuple[Path, ...] = ()
    """Of the evaluations: the other run's and A's."""
    settings: list[dict[str, Any]] = field(default_factory=list)
    """The keys that differ: key, value (A's), other."""
    control: list[float] = field(default_factory=list)
    """Mean held-out reward at each evaluation, if the other run is a control of A's config with at
    least two; else []."""

    @property
    def is_only_chance(self) -> bool:
        """`by_chance` says all there is: the other run is a control with another seed."""
        return bool(self.control and self.reasons)


def compare(run: Path, other: Path) -> Comparison:
    """Compare the last held-out evaluations. Raises ValueError for a run against itself."""
    if run.resolve() == other.resolve():
        raise ValueError(f"--against {other}: this is the run itself; name another one")
    values, others = flat(read_config(run)), flat(read_config(other))
    rows = [
        {"key": key, "value": values.get(key, "-"), "other": others.get(key, "-")}
        for key in sorted({*values, *others} - {*NAMING})
        if values.get(key) != others.get(key)
    ]
    result = Comparison(other.resolve().name, other, [], settings=rows)
    found = {folder: read_evaluations(folder) for folder in (other, run)}
    if missing := [str(folder) for folder, evaluations in found.items() if not evaluations]:
        result.reasons = [f"{' and '.join(missing)}: no held-out evaluation yet"]
        return result
    theirs, ours = (evaluations[-1] for evaluations in found.values())
    result.folders = theirs.folder, ours.folder
    shared = [name for name in theirs.records if name in ours.records]
    result.reasons = _why_not(rows, theirs, ours, shared)
    is_same = {row["key"] for row in rows} <= OF_A_CONTROL and all(
        reason.startswith("other noise")
        for reason in result.reasons  # as another seed brings
    )
    if is_same and is_control(read_config(other)):
        result.control = _held_out(other)
    if result.reasons:
        return result
    if theirs.iteration != ours.iteration:
        result.notes.append(
            f"after {theirs.iteration} iterations of {result.name}, and {ours.iteration} here"
        )
    if len(shared) < max(len(theirs.records), len(ours.records)):
        sizes = f"{len(theirs.records)} and {len(ours.records)}"
        result.notes.append(f"on the {len(shared)} samples that both have, of {sizes}")
    result.parts = changes_of(theirs.records, ours.records, of_parts=True)
    if sums := [escaped(row["key"], 60) for row in rows if row["key"].startswith(SUM)]:
        result.notes.append(
            f"the final rewards are different sums ({', '.join(sums)}): only parts are compared"
        )
        return result
    result.changes = changes_of(theirs.records, ours.records)
    return result


def _why_not(
    rows: Sequence[Mapping[str, Any]], theirs: Evaluation, ours: Evaluation, shared: Sequence[str]
) -> list[str]:
    """Why rewards of the two evaluations do not mean the same; [] if they do."""
    reasons = [
        f"another {'judge' if row['key'].startswith('judge.') else 'reward'}: {row['key']} is "
        f"{escaped(row['value'], 60)} here and {escaped(row['other'], 60)} in the other run"
        for row in rows
        if f"{row['key']}.".startswith(REWARD + JUDGE)
    ]
    if not shared:
        return ["other held-out data: no sample is in both", *reasons]
    tests: dict[str, Callable[[Record], Any]] = {
        "other held-out data: sample {} has another instruction": lambda r: r.get("instruction"),
        "other held-out data: sample {} shows another picture": lambda r: shown_of(r) or None,
        "other noise: sample {} was drawn from another seed": lambda r: (
            r.get("noise_seed") if r.get("image_file") else None  # None: nothing was drawn
        ),
    }
    for text, value_of in tests.items():
        values_of = {n: (value_of(theirs.records[n]), value_of(ours.records[n])) for n in shared}
        unlike = [n for n, (old, new) in values_of.items() if old != new and None not in (old, new)]
        reasons += [text.format(escaped(name, 60)) for name in unlike[:1]]
    return reasons


def _held_out(run: Path) -> list[float]:
    """Mean reward at each evaluation; [] with fewer than two."""
    rewards = [reward for reward in held_out_rewards(run).values() if reward is not None]
    return rewards if len(rewards) > 1 else []


def by_chance(run: Path, results: Sequence[Comparison]) -> list[str]:
    """How far the held-out reward of the controls of the run's config wandered, and whether the
    run gained more; [] without such controls."""
    curve_of = {r.other.resolve(): r.control for r in results if r.control}
    if not curve_of:
        return []
    rises = [max(reward - curve[0] for reward in curve[1:]) for curve in curve_of.values()]
    found = ["Chance: controls of this config (rewards shuffled), held-out reward"]
    for (path, curve), rise in zip(curve_of.items(), rises, strict=True):
        found.append(f"  {path.name}: {curve[0]:.3f} -> {curve[-1]:.3f}, at most {rise:+.3f}")
    if ours := _held_out(run):
        gain, most = ours[-1] - ours[0], max(rises)
        if gain > most:
            found.append(f"  this run: {gain:+.3f}, more than any control at any evaluation")
            found.append(f"    (chance alone does that in at most one run of {len(rises) + 1})")
        else:
            found.append(
                f"  this run: {gain:+.3f}, no more than a control's {most:+.3f}: chance can do that"
            )
    return found


def lines(name: str, result: Comparison) -> list[str]:
    """The comparison for a terminal."""
    title = f"{name} against {result.name}"
    if result.reasons:
        return [f"{title}: NOT COMPARABLE", *(f"  {text}" for text in result.reasons)]
    keys = ", ".join(escaped(str(row["key"]), 60) for row in result.settings)
    return [
        f"{title} (held-out; {result.name} -> {name})",
        *(f"  {note}" for note in result.notes),
        *table([*result.changes, *result.parts], Change.difference),
        f"  settings that differ: {keys or 'none'}",
    ]


def write_comparison(run: Path, results: Sequence[Comparison]) -> Path:
    """Write `<run>/report/compare.html`, which shows all the comparisons; returns its path."""
    folder = run / "report"
    runs = [run, *(result.other for result in results)][: len(STYLES)]
    names = [path.resolve().name for path in runs]
    page = template("compare.html.j2").render(
        name=names[0],
        results=[(r, _samples(folder, r)) for r in results if not r.is_only_chance],
        chance=by_chance(run, results),
        interval=INTERVAL,
        facts=Markup(literal(_overlaid(runs, names))),  # nosec B704
        sources=[Markup((PAGE_FOLDER / file).read_text("utf-8")) for file in SCRIPTS],  # nosec B704
        css=(PAGE_FOLDER / "page.css").read_text("utf-8"),
    )
    file = own_folder(folder) / "compare.html"
    write_atomically(file, without_lone_surrogates(page))
    return file


def _overlaid(runs: Sequence[Path], names: Sequence[str]) -> dict[str, Any]:
    """`curves` for `page/charts.js`, each with a line per run, and their `data` as from
    `curve_data`, where metric `m` of the run number i is called `i:m`."""
    row_of: dict[int, dict[str, Any]] = {}
    for i, run in enumerate(runs):
        for row in named_rows(run / "metrics.jsonl", "iteration")[0]:
            merged = row_of.setdefault(row["iteration"], {"iteration": row["iteration"]})
            merged |= {f"{i}:{metric}": value for metric, value in row.items()}
    data = curve_data([row_of[iteration] for iteration in sorted(row_of)], None)
    curves = []
    for curve in CURVES:
        metric = curve["lines"][0][0]
        lines = [
            [f"{i}:{metric}", name, style]
            for i, (name, style) in enumerate(zip(names, STYLES, strict=False))
        ]
        curves.append({**curve, "lines": lines})
    return {"curves": curves, "data": data}


def _samples(folder: Path, result: Comparison) -> dict[str, list[Any]]:
    """Heading -> samples as (gain, instruction, URL of the source picture, (reward, words, URL of
    the picture) of both runs)."""

    def url(place: Path, file: object) -> str | None:
        shown = picture(place, file)
        relative = os.path.relpath(place.resolve(), folder.resolve())
        return quote(f"{relative}/{shown}") if shown else None

    def drawn(place: Path, row: Record) -> tuple[object, object, str | None]:
        return row.get("reward"), words_of(row), url(place, row.get("image_file"))

    theirs, ours = result.folders or (folder, folder)
    ranked = result.changes[0].ranked if result.changes else []
    gains = [sample for sample in ranked if sample[0] > 0][:NUM_SAMPLES]
    losses = [sample for sample in ranked[::-1] if sample[0] < 0][:NUM_SAMPLES]
    return {
        heading: [
            (
                gain,
                new.get("instruction"),
                url(ours, new.get("source_file")),
                (drawn(theirs, old), drawn(ours, new)),
            )
            for gain, (old, new) in samples
        ]
        for heading, samples in (("Largest gains", gains), ("Largest losses", losses))
    }


# ---- command -------------------------------------------------------------------------------------


@printing.program
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 if there is nothing to report."""
    parser = printing.Parser("rl report", __doc__)
    parser.add_argument("run", help="run folder, or config")
    parser.add_overrides("as given to the run")
    parser.add_argument("--against", metavar="RUN", nargs="+", default=[], help="runs to compare")
    args = parser.parse_intermixed_args(argv)
    tell(find_run(args.run, args.overrides), [find_run(other) for other in args.against])
    return 0


def tell(run_dir: Path, others: Sequence[Path]) -> None:
    """Print and write what a run learnt, and how it compares with the others."""
    results = [compare(run_dir, other) for other in others]
    metrics = read_named(run_dir / "metrics.jsonl", "iteration")
    control = is_control(read_config(run_dir))
    _show(summary(metrics, read_evaluations(run_dir), control))
    print(f"  page: {Page(run_dir).write()}")
    for result in results:
        if not result.is_only_chance:
            _show(lines(run_dir.resolve().name, result))
    if results:
        _show([f"  {INTERVAL}", *by_chance(run_dir, results)])
        print(f"  page: {write_comparison(run_dir, results)}")


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
