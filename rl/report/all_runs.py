"""Writes `<folder>/all_runs.html`, a table of the folder's runs to sort and filter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from rl.files import write_atomically
from rl.printing import without_lone_surrogates
from rl.record.run_summary import Summary, folders, summarise
from rl.report.curves import MAX_POINTS, points
from rl.report.page import NAMING, PAGE_FOLDER, flat, template
from rl.report.reading import named_rows, read_config

CURVES = {"eval/reward": "held-out", "reward/mean": "training"}


def write_all_runs(folder: Path) -> Path:
    """Write the page; returns its path. Raises ValueError if `folder` holds no run."""
    found = [summarise(path) for path in folders(folder)] if folder.is_dir() else []
    runs = [run for run in found if not run.problem and run.path != folder]
    if not runs:
        raise ValueError(f"{folder}: no runs in it; name the folder that holds the run folders")
    configs = [flat(read_config(run.path)) for run in runs]
    page = template("all_runs.html.j2").render(
        folder=str(folder),
        runs=list(map(_row, runs, differing(configs))),
        curves=CURVES,
        css=(PAGE_FOLDER / "page.css").read_text("utf-8"),
        script=Markup((PAGE_FOLDER / "all_runs.js").read_text("utf-8")),  # nosec B704
    )
    write_atomically(folder / "all_runs.html", without_lone_surrogates(page))
    return folder / "all_runs.html"


def differing(configs: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """For each config, its values that are not the most frequent ones; '-': it lacks the key."""
    unlike: list[dict[str, str]] = [{} for _ in configs]
    for key in sorted({key for config in configs for key in config} - {*NAMING}):
        values = [config.get(key, "-") for config in configs]
        usual = Counter(values).most_common(1)[0][0]
        for found, value in zip(unlike, values, strict=True):
            if value != usual:
                found[key] = value
    return unlike


def _row(run: Summary, settings: Mapping[str, str]) -> dict[str, Any]:
    metrics, _ = named_rows(run.path / "metrics.jsonl", "iteration")
    page = run.path / "report" / "index.html"
    return {
        "run": run,
        "link": quote(f"{run.path.name}/report/index.html") if page.is_file() else None,
        "written": f"{datetime.fromtimestamp(run.written_s):%Y-%m-%d %H:%M}",
        "sparklines": [sparkline(points(metrics, name)) for name in CURVES],
        "settings": settings,
    }


def sparkline(series: list[tuple[float, float]]) -> str:
    """`points` of an SVG polyline in a box of 100 x 24; rewards are 0 to 1."""
    if not series:
        return ""
    series = [*series[: -1 : 1 + len(series) // MAX_POINTS], series[-1]]
    first, last = series[0][0], series[-1][0]
    return " ".join(
        f"{100 * (x - first) / ((last - first) or 1):.1f},{23 - 22 * min(1, max(0, y)):.1f}"
        for x, y in series
    )
