"""Writes `<run>/report/index.html`, a page that loads only files beside it and escapes all text."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from rl.files.atomic import write_atomically
from rl.report.curves import CURVES, drawn, how_drawn, points
from rl.report.folder import to_oneself
from rl.report.pages import CHUNK, Made, literal, refresh
from rl.report.reading import Record, named_rows, read_config, read_evaluations
from rl.report.summary import INTERVAL, alarms, beside, learnt
from rl.run.metric_table import doc_of
from rl.text.untrusted import without_lone_surrogates

_HERE = Path(__file__).with_name("page")
_SOURCES = ("page.css", "base.js", "lists.js", "samples.js", "start.js")


def write_page(run_dir: Path, other: Path | None = None) -> tuple[Path, Made]:
    """Update `<run>/report/` to what the run holds now; `other`: a run to compare it with."""
    folder = run_dir / "report"
    with to_oneself(folder):
        made = refresh(run_dir, folder / "data", other)
        write_atomically(folder / "index.html", rendered(run_dir, made, other))
    return folder / "index.html", made


def rendered(
    run_dir: Path,
    made: Made,
    other: Path | None = None,
    inside: Sequence[Markup] = (),
    note: str = "",
) -> str:
    """The page's HTML. `inside`: data pages to put into it; `note`: what they leave out."""
    metrics, damaged = named_rows(run_dir / "metrics.jsonl", "iteration")
    config = read_config(run_dir)
    told = dict(made.damaged)
    if damaged:
        told["metrics.jsonl"] = len(damaged)
    page = _template().render(
        name=str(config.get("run_name") or run_dir.resolve().name),
        other=None if other is None else other.resolve().name,
        note=note,
        progress=_progress(metrics, config, made),
        learnt=learnt(read_evaluations(run_dir)),
        interval=INTERVAL,
        beside=beside(metrics),
        alarms=alarms(metrics, config, told),
        curves=_curves(metrics),
        times=times(metrics),
        settings=settings(config, None if other is None else read_config(other)),
        sources={name: Markup((_HERE / name).read_text("utf-8")) for name in _SOURCES},  # nosec B704
        facts=Markup(literal(_facts(run_dir, made, other, bool(inside)))),  # nosec B704
        is_drift_measured=any(row.get("drift/alarm") is not None for row in metrics),
        inside=inside,
    )
    return without_lone_surrogates(page)


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("index.html.j2")


def _facts(run_dir: Path, made: Made, other: Path | None, is_alone: bool) -> dict[str, Any]:
    """What the page's scripts need. `is_alone`: no data files are beside the page."""
    sets = []
    for run, evaluations in ((None, made.evaluations), (other, made.other_evaluations)):
        way, name, prefix = "..", "", ""
        if run is not None:
            way = os.path.relpath(run.resolve(), (run_dir / "report").resolve())
            way, name, prefix = quote(Path(way).as_posix()), run.resolve().name, "other_"
        sets += [
            {
                "page": f"{prefix}eval_{it:06d}",
                "it": it,
                "files": num_files,
                "base": f"{way}/evaluation/it_{it:06d}/",
                "stock": f"{way}/stock/",
                "run": name,
            }
            for it, num_files in evaluations
        ]
    return {
        "alone": is_alone,
        "iterations": [it for it, _ in made.iterations],
        "groups": [num for _, num in made.iterations],
        "chunks": sorted({iteration // CHUNK for iteration, _ in made.iterations}),
        "sets": sets,
    }


def _progress(metrics: Sequence[Record], config: Mapping[str, Any], made: Made) -> str:
    last = max((int(row["iteration"]) for row in metrics), default=0)
    planned = config.get("num_iterations")
    of = f" of {planned}" if type(planned) is int and planned > 0 else ""
    num_groups = sum(num for _, num in made.iterations)
    measured = len(made.evaluations)
    evaluations = f"{measured} held-out evaluation{'' if measured == 1 else 's'}"
    return f"{last:,}{of} iterations, {evaluations}, {num_groups:,} groups on record"


def _curves(metrics: Sequence[Record]) -> list[dict[str, Any]]:
    """The curves that have points, each with a legend that explains its lines."""
    shown = []
    for curve in CURVES:
        lines = [(line, points(metrics, line.metric)) for line in curve.lines]
        there = [(line, found) for line, found in lines if found]
        if not there:
            continue
        legend = []
        for line, found in there:
            row = doc_of(line.metric)
            legend.append(
                {"style": line.style, "label": line.label, "metric": line.metric}
                | {"first": found[0][1], "last": found[-1][1], "num_points": len(found)}
                | {"unit": row.unit if row else "", "meaning": row.meaning if row else ""}
            )
        picture = {"title": curve.title, "svg": drawn(curve, there), "note": how_drawn(there)}
        shown.append(picture | {"legend": legend})
    return shown


def times(metrics: Sequence[Record]) -> list[tuple[str, float, float]]:
    """(phase, seconds, share of the whole), the longest first; time outside them is '(other)'."""
    whole = sum(value for _, value in points(metrics, "time/iteration_s"))
    names = {
        name: name.removeprefix("time/").removesuffix("_s")
        for row in metrics
        for name in row
        if name.startswith("time/") and name.endswith("_s") and name != "time/iteration_s"
    }
    spent = {short: sum(v for _, v in points(metrics, name)) for name, short in names.items()}
    if whole <= 0:
        return []
    spent["(other)"] = max(0.0, whole - sum(spent.values()))
    longest = sorted(spent.items(), key=lambda item: -item[1])
    return [(name, seconds, seconds / whole) for name, seconds in longest if seconds > 0]


def settings(config: Mapping[str, Any], other: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Every key with its value; keys whose value differs in the other run come first."""
    ours = _flat(config)
    theirs = _flat(other) if other is not None else ours
    rows = [
        {"key": key, "value": ours.get(key, "-"), "other": theirs.get(key, "-")}
        | {"differs": ours.get(key) != theirs.get(key)}
        for key in sorted({*ours, *theirs})
    ]
    return sorted(rows, key=lambda row: not row["differs"])


def _flat(value: Mapping[str, Any], above: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, item in value.items():
        name = f"{above}{key}"
        children: Any = item
        if isinstance(item, list) and any(isinstance(one, Mapping) for one in item):
            children = {str(place): one for place, one in enumerate(item)}
        if isinstance(children, Mapping) and children:
            found |= _flat(children, f"{name}.")
        else:
            found[name] = item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)
    return found
