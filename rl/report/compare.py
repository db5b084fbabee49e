"""Compares runs on the held-out samples that they share: numbers, and `report/compare.html`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from rl.config.printing import escaped
from rl.files.atomic import write_atomically
from rl.report.curves import CURVES, Curve, Line, curve_data
from rl.report.folder import locked
from rl.report.page import NAMING, PAGE_FOLDER, flat, spec, template
from rl.report.pages import literal
from rl.report.reading import (
    Evaluation,
    Record,
    named_rows,
    number,
    picture,
    read_config,
    read_evaluations,
    shown_of,
    words_of,
)
from rl.report.summary import INTERVAL, Change, changes_of
from rl.text.untrusted import without_lone_surrogates

MEASURE = ("rewards.", "final_reward.", "evaluation.temperature", "evaluation.top_k")
JUDGE = ("judge.model", "judge.revision", "judge.temperature", "judge.image_side_px")
"""Config keys that decide what a held-out reward means; a key that ends in a dot: all below it."""
SCRIPTS = ("base.js", "charts.js", "compare.js")
NUM_SAMPLES, NUM_IN_TERMINAL = 6, 3
"""Samples with the largest gains, and as many with the largest losses."""
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
    means: list[float | None] = field(default_factory=list)
    """Mean held-out reward of the other run and of A, each over all its own samples."""
    changes: list[Change] = field(default_factory=list)
    """Held-out reward of all shared samples, then by category: (other run, A)."""
    parts: list[Change] = field(default_factory=list)
    """The same of each reward part."""
    best: list[tuple[float, Record, Record]] = field(default_factory=list)
    """(gain, other run's record, A's record) of the samples that gained most."""
    worst: list[tuple[float, Record, Record]] = field(default_factory=list)
    folders: tuple[Path, ...] = ()
    """Of the evaluations: the other run's and A's."""
    settings: list[dict[str, Any]] = field(default_factory=list)
    """The keys that differ: key, value (A's), other."""


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
    last = [read_evaluations(folder)[-1:] for folder in (other, run)]
    if not all(last):
        missing = [str(folder) for folder, one in zip((other, run), last, strict=True) if not one]
        result.reasons = [f"{' and '.join(missing)}: no held-out evaluation yet"]
        return result
    theirs, ours = last[0][0], last[1][0]
    result.folders = theirs.folder, ours.folder
    result.means = [_mean(one.records) for one in (theirs, ours)]
    shared = [name for name in theirs.records if name in ours.records]
    result.reasons = _why_not(rows, theirs, ours, shared)
    if result.reasons:
        return result
    if theirs.iteration != ours.iteration:
        text = f"after {theirs.iteration} iterations of {result.name}, and {ours.iteration} here"
        result.notes.append(text)
    if len(shared) < max(len(theirs.records), len(ours.records)):
        sizes = f"{len(theirs.records)} and {len(ours.records)}"
        result.notes.append(f"on the {len(shared)} samples that both have, of {sizes}")
    changed = partial(changes_of, theirs.records, ours.records)
    result.changes = changed(
        lambda row: {"", str(row.get("category") or "")}, lambda row, _: row.get("reward")
    )
    result.parts = changed(_parts, lambda row, name: _parts(row).get(name))
    gains = [
        (new - old, theirs.records[name], ours.records[name])
        for name in shared
        if (old := number(theirs.records[name].get("reward"))) is not None
        and (new := number(ours.records[name].get("reward"))) is not None
    ]
    gains.sort(key=lambda gain: -gain[0])
    result.best = [gain for gain in gains[:NUM_SAMPLES] if gain[0] > 0]
    result.worst = [gain for gain in reversed(gains[-NUM_SAMPLES:]) if gain[0] < 0]
    return result


def _parts(row: Record) -> Mapping[str, Any]:
    parts = row.get("parts")
    return parts if isinstance(parts, Mapping) else {}


def _mean(records: Mapping[str, Record]) -> float | None:
    rewards = [r for row in records.values() if (r := number(row.get("reward"))) is not None]
    return sum(rewards) / len(rewards) if rewards else None


def _why_not(
    rows: Sequence[Mapping[str, Any]], theirs: Evaluation, ours: Evaluation, shared: Sequence[str]
) -> list[str]:
    """Why rewards of the two evaluations do not mean the same; [] if they do."""
    keys = (*MEASURE, *JUDGE)
    reasons = [
        f"another {'judge' if row['key'] in JUDGE else 'measure'}: {row['key']} is "
        f"{escaped(row['value'], 60)}, there {escaped(row['other'], 60)}"
        for row in rows
        if any(row["key"].startswith(key) if key[-1] == "." else row["key"] == key for key in keys)
    ]
    if not shared:
        return ["other held-out data: no sample is in both", *reasons]
    tests: dict[str, Callable[[Record], Any]] = {
        "other held-out data: sample {} has another instruction": lambda r: r.get("instruction"),
        "other held-out data: sample {} shows another picture": shown_of,
        "other noise: sample {} was drawn from another seed": lambda r: (
            r.get("noise_seed") if r.get("image_file") else None  # None: nothing was drawn
        ),
    }
    for text, value_of in tests.items():
        for name in shared:
            values = value_of(theirs.records[name]), value_of(ours.records[name])
            if None not in values and values[0] != values[1]:
                reasons.append(text.format(escaped(name, 60)))
                break
    return reasons


def lines(name: str, result: Comparison) -> list[str]:
    """The comparison for a terminal."""
    title = f"{name} against {result.name}"
    if result.reasons:
        means = ["?" if mean is None else f"{mean:.3f}" for mean in result.means]
        apart = [f"  each on its own: {result.name} {means[0]}, {name} {means[1]}"] if means else []
        return [f"{title}: NOT COMPARABLE", *(f"  {reason}" for reason in result.reasons), *apart]
    rows = [*result.changes, *result.parts]
    width = max((len(change.name) for change in rows), default=0)
    samples = [
        f"  {gain:+.3f}  {escaped(str(new.get('id')), 40)}: "
        f"{escaped(str(new.get('instruction')), 60)}"
        for gain, _, new in (*result.best[:NUM_IN_TERMINAL], *result.worst[:NUM_IN_TERMINAL])
    ]
    keys = [escaped(str(row["key"]), 60) for row in result.settings]
    return [
        f"{title} (held-out; {result.name} -> {name})",
        *(f"  {note}" for note in result.notes),
        *(change.sentence(width) for change in rows),
        *(["  the samples that differ most:", *(f"  {line}" for line in samples)] * bool(samples)),
        f"  settings that differ: {', '.join(keys[:12]) or 'none'}{' ...' * (len(keys) > 12)}",
    ]


def write_comparison(run: Path, results: Sequence[Comparison]) -> Path:
    """Write `<run>/report/compare.html`, which shows all the comparisons; returns its path."""
    folder = run / "report"
    runs = [run, *(result.other for result in results)][: len(STYLES)]
    metrics = [named_rows(path / "metrics.jsonl", "iteration")[0] for path in runs]
    names = [path.resolve().name for path in runs]
    curves, data = _overlaid(names, metrics)
    facts = {
        "data": data,
        "curves": {heading: list(map(spec, each)) for heading, each in curves.items()},
    }
    page = template("compare.html.j2").render(
        name=names[0],
        legend=list(zip(names, STYLES, strict=False)),
        results=[(result, _samples(folder, result)) for result in results],
        interval=INTERVAL,
        headings=[heading for heading, each in curves.items() if each],
        facts=Markup(literal(facts)),  # nosec B704
        sources=[Markup((PAGE_FOLDER / file).read_text("utf-8")) for file in SCRIPTS],  # nosec B704
        css=(PAGE_FOLDER / "page.css").read_text("utf-8"),
    )
    with locked(folder):
        write_atomically(folder / "compare.html", without_lone_surrogates(page))
    return folder / "compare.html"


def _overlaid(
    names: Sequence[str], metrics: Sequence[Sequence[Record]]
) -> tuple[dict[str, list[Curve]], dict[str, Any]]:
    """(heading -> curves with a line for each run that has the metric, their data as from
    `curve_data`; metric `m` of the run number i is called `i:m`)."""
    tables = [curve_data(rows, None) for rows in metrics]
    iterations = sorted({it for table in tables for it in table["it"]})
    of: dict[str, list[Any]] = {}
    docs: dict[str, Any] = {}
    for i, table in enumerate(tables):
        for name, column in table["of"].items():
            at = dict(zip(table["it"], column, strict=True))
            of[f"{i}:{name}"] = [at.get(it) for it in iterations]
        docs |= {f"{i}:{name}": doc for name, doc in table["docs"].items()}
    known = sorted({name for table in tables for name in table["of"]})
    groups: dict[str, list[tuple[str, str, float | None]]] = {
        "Curves": [(c.title, c.lines[0].metric, c.top) for c in CURVES],
        "Reward parts": [
            (n, n, None) for n in known if n.startswith(("eval/part/", "reward/part/"))
        ],
        "Categories": [(n, n, 1.0) for n in known if n.startswith("eval/reward/")],
    }
    runs = list(enumerate(zip(names, STYLES, strict=False)))
    curves = {
        heading: [
            Curve(title, [Line(f"{i}:{metric}", name, style) for i, (name, style) in runs], top)
            for title, metric, top in wanted
            if metric in known
        ]
        for heading, wanted in groups.items()
    }
    span = max((table["span"] for table in tables), default=1)
    return curves, {"it": iterations, "of": of, "docs": docs, "span": span}


def _samples(folder: Path, result: Comparison) -> dict[str, list[Any]]:
    """Heading -> (gain, instruction, source picture, words, reward and picture of both runs)."""

    def url(place: Path, file: object) -> str | None:
        shown = picture(place, file)
        relative = os.path.relpath(place.resolve(), folder.resolve())
        return quote(f"{relative}/{shown}") if shown else None

    return {
        heading: [
            {
                "gain": gain,
                "instruction": new.get("instruction"),
                "source": url(result.folders[1], new.get("source_file")),
                "arms": [
                    (row.get("reward"), words_of(row), url(place, row.get("image_file")))
                    for row, place in zip((old, new), result.folders, strict=True)
                ],
            }
            for gain, old, new in rows
        ]
        for heading, rows in (("Largest gains", result.best), ("Largest losses", result.worst))
    }
