"""Writes `<run>/report/index.html`, a page that loads only files beside it and escapes all text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from jinja2 import Template
from markupsafe import Markup

from rl.files import write_atomically
from rl.printing import load_template, without_lone_surrogates
from rl.report.curves import CURVES, Curve, curve_data, points
from rl.report.episode_rows import Limits, Pieces, record_row
from rl.report.folder import locked
from rl.report.pages import CHUNK, PageIndex, call, literal, refresh
from rl.report.reading import Evaluation, Record, named_rows, picture, read_config, read_evaluations
from rl.report.summary import INTERVAL, alarms, context, learnt
from rl.trackers import MAIN_METRICS

NAMING = ("run_name", "base_exp_dir")
"""Config keys that differ between any two runs."""
PAGE_FOLDER = Path(__file__).with_name("page")
_SOURCES = ("page.css", "base.js", "lists.js", "charts.js", "samples.js", "start.js")


def write_page(run_dir: Path) -> tuple[Path, PageIndex]:
    """Update `<run>/report/` from the run folder."""
    folder = run_dir / "report"
    with locked(folder):
        index = refresh(run_dir, folder / "data")
        data = call("metrics", metrics_data(run_dir, index))
        write_atomically(folder / "data" / "metrics.js", data)
        write_atomically(folder / "index.html", rendered(run_dir, index))
    return folder / "index.html", index


def rendered(
    run_dir: Path, index: PageIndex, embedded: Sequence[Markup] = (), note: str = ""
) -> str:
    """The page's HTML. `embedded`: scripts of data pages; `note`: shown at the top."""
    metrics, damaged = named_rows(run_dir / "metrics.jsonl", "iteration")
    config = read_config(run_dir)
    num_damaged = dict(index.damaged)
    if damaged:
        num_damaged["metrics.jsonl"] = len(damaged)
    evaluations = read_evaluations(run_dir)
    facts = _facts(run_dir, config, index, bool(embedded))
    page = template("index.html.j2").render(
        name=str(config.get("run_name") or run_dir.resolve().name),
        note=note,
        progress=_progress(metrics, config, index),
        learnt=learnt(evaluations),
        interval=INTERVAL,
        context=context(metrics),
        alarms=alarms(metrics, config, num_damaged),
        has_metrics=any(len(row) > 1 for row in metrics),
        alone=bool(embedded),
        times=times(metrics),
        settings=flat(config),
        sources={name: Markup((PAGE_FOLDER / name).read_text("utf-8")) for name in _SOURCES},  # nosec B704
        facts=Markup(literal(facts | {"first": first_drawn(evaluations)})),  # nosec B704
        is_drift_measured=any(row.get("drift/alarm") is not None for row in metrics),
        embedded=embedded,
    )
    return without_lone_surrogates(page)


@cache
def template(name: str) -> Template:
    return load_template(PAGE_FOLDER / name, autoescape=True)


def metrics_data(run_dir: Path, index: PageIndex) -> dict[str, Any]:
    """The data page `metrics`: every metric, and the histograms of rewards and advantages."""
    config = read_config(run_dir)
    keys = ("prompts_per_iteration", "generations_per_prompt", "images_per_completion")
    factors: list[Any] = [config.get(key) for key in keys]
    known = all(type(factor) is int and 0 < factor < 10**6 for factor in factors)
    metrics = named_rows(run_dir / "metrics.jsonl", "iteration")[0]
    data = curve_data(metrics, prod(factors) if known else None)
    return data | {"histograms": index.histograms}


def _facts(
    run_dir: Path, config: Mapping[str, Any], index: PageIndex, is_alone: bool
) -> dict[str, Any]:
    """Data for the page's scripts. `is_alone`: the page has no data files beside it."""
    sets = [
        {
            "page": f"eval_{it:06d}",
            "it": it,
            "files": num_files,
            "base": f"../evaluation/it_{it:06d}/",
        }
        for it, num_files in index.evaluations
    ]
    return {
        "alone": is_alone,
        "iterations": [it for it, _ in index.iterations],
        "groups": [num for _, num in index.iterations],
        "chunks": sorted({iteration // CHUNK for iteration, _ in index.iterations}),
        "sets": sets,
        "run": _path(run_dir, config),
        "checkpoints": _checkpoints(run_dir),
        "curves": list(map(_spec, sorted(CURVES, key=_rank))),
    }


def first_drawn(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """The first held-out sample that both evaluations have and the second drew, as rows of their
    data pages with short texts; [] if there is none."""
    if len(evaluations) < 2:
        return []
    before, after = evaluations
    both = (name for name in after.records if name in before.records)
    name = next(
        (n for n in both if picture(after.folder, after.records[n].get("image_file"))), None
    )
    return [
        record_row(each.records[name], (), each.folder, None, Pieces({}), Limits(160, 0, 0))
        for each in (before, after)
        if name is not None
    ]


def _rank(curve: Curve) -> int:
    """Position of the curve's metric among `MAIN_METRICS`, or behind them."""
    main = list(MAIN_METRICS)
    metrics = [line.metric for line in curve.lines if line.style == "main"]
    return min((main.index(name) for name in metrics if name in main), default=len(main))


def _spec(curve: Curve) -> dict[str, Any]:
    """A curve for `page/charts.js`."""
    lines = [[line.metric, line.label, line.style] for line in curve.lines]
    main = _rank(curve) < len(MAIN_METRICS)
    return {"title": curve.title, "top": curve.top, "lines": lines, "main": main}


def _path(run_dir: Path, config: Mapping[str, Any]) -> str:
    """The run folder as its config names it: a page that is sent away has no path of this user."""
    base, name = config.get("base_exp_dir"), config.get("run_name")
    return f"{base}/{name}" if isinstance(base, str) and isinstance(name, str) else run_dir.name


def _checkpoints(run_dir: Path) -> list[int]:
    names = (path.name.removeprefix("step_") for path in run_dir.glob("checkpoints/step_*"))
    return sorted(int(name) for name in names if name.isdecimal() and name.isascii())


def _progress(metrics: Sequence[Record], config: Mapping[str, Any], index: PageIndex) -> str:
    last = max((int(row["iteration"]) for row in metrics), default=0)
    planned = config.get("num_iterations")
    of_planned = f" of {planned}" if type(planned) is int and planned > 0 else ""
    num_groups = sum(num for _, num in index.iterations)
    num_evaluations = len(index.evaluations)
    evaluations = f"{num_evaluations} held-out evaluation{'' if num_evaluations == 1 else 's'}"
    return f"{last:,}{of_planned} iterations, {evaluations}, {num_groups:,} groups on record"


def times(metrics: Sequence[Record]) -> list[tuple[str, float, float]]:
    """(phase, seconds, share of total time), longest first; time outside phases is '(other)'."""
    total = sum(value for _, value in points(metrics, "time/iteration_s"))
    names = {
        name: name.removeprefix("time/").removesuffix("_s")
        for row in metrics
        for name in row
        if name.startswith("time/") and name.endswith("_s") and name != "time/iteration_s"
    }
    seconds_of = {short: sum(v for _, v in points(metrics, name)) for name, short in names.items()}
    if total <= 0:
        return []
    seconds_of["(other)"] = max(0.0, total - sum(seconds_of.values()))
    longest = sorted(seconds_of.items(), key=lambda item: -item[1])
    return [(name, seconds, seconds / total) for name, seconds in longest if seconds > 0]


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, item in value.items():
        name = f"{prefix}{key}"
        children: Any = item
        if isinstance(item, list) and any(isinstance(entry, Mapping) for entry in item):
            children = {str(position): entry for position, entry in enumerate(item)}
        if isinstance(children, Mapping) and children:
            found |= flat(children, f"{name}.")
        else:
            found[name] = item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)
    return found
