"""Plots where an iteration's time goes with 0 to 512 render workers: docs/images/scale_plan.png.

    python -m benchmarks.scale_plan

Nothing is timed: `rl pool plan` prints the same numbers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.run_hours import ENVIRONMENT
from rl import build
from rl.check.iteration_time import Machines, computed, simulate
from rl.config.schema import load_config

IMAGE = Path("docs/images/scale_plan.png")
WORKERS = [0, *(2**n for n in range(3, 10))]
PANELS = (
    ("qwen_image_edit", "renderer.batch_size=4", 1),
    ("qwen_image_edit", "renderer.batch_size=1", 4),
    ("qwen_image_21", "renderer.batch_size=4", 1),
    ("qwen_image_21", "renderer.batch_size=1", 4),
)
"""(config, override, judges)."""
COLOURS = {
    "generate": "#6b8ba4",
    "condition": "#1b3a4b",
    "render": "#d1495b",
    "judge_wait": "#edae49",
    "learn": "#3d6482",
    "sync": "#9a9a9a",
}


def plot(axis: Any, name: str, override: str, judges: int) -> None:
    """Stacked bars of the slowest rank's phases, in seconds, for each number of workers."""
    times = computed(build.resolve(load_config(f"configs/{name}.jsonnet", [override], ENVIRONMENT)))
    machines = Machines(judge_slots=judges * times.slots_per_judge)
    outcomes = [simulate(times.iteration, replace(machines, workers=n)) for n in WORKERS]
    bottoms, places = [0.0] * len(WORKERS), range(len(WORKERS))
    for phase, colour in COLOURS.items():
        heights = [outcome.phases_s[phase] for outcome in outcomes]
        axis.bar(places, heights, bottom=bottoms, color=colour, label=phase)
        bottoms = [sum(pair) for pair in zip(bottoms, heights, strict=True)]
    axis.set_xticks(places, [str(n) for n in WORKERS])
    title = f"{name}, {override.removeprefix('renderer.')}, {judges} judge{'s' * (judges > 1)}"
    axis.set(title=title, xlabel="render workers", ylabel="s an iteration")
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    axes = figure.subplots(2, 2).flat
    for axis, panel in zip(axes, PANELS, strict=True):
        plot(axis, *panel)
    figure.axes[0].legend(frameon=False)
    figure.savefig(IMAGE, dpi=100)
