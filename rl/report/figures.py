"""Draws `reward_curve.png`, and `before_after.png` of the first held-out samples."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

from rl.files.atomic import write_atomically
from rl.files.images import open_picture
from rl.files.panels import panel, pyplot
from rl.report.curves import points, smooth
from rl.report.episode_rows import text
from rl.report.folder import to_oneself
from rl.report.reading import Evaluation, Record, number, other_sources, picture, words_of
from rl.text.untrusted import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_SAMPLES_DRAWN = 10
_MAX_CHARS = 2000
STYLES = {
    "eval/reward": ("tab:orange", "o-", "held-out prompts"),
    "eval/stock_reward": ("tab:red", "--", "held-out, the untrained system"),
    "eval/bare_reward": ("tab:gray", ":", "held-out, the user's own words"),
    "eval_reference/reward": ("tab:green", "s--", "held-out, given the right words"),
}
"""Curves of the held-out run: (colour, marks, label)."""


def draw(folder: Path, metrics: Sequence[Record], evaluations: Sequence[Evaluation]) -> list[Path]:
    """Returns the files that were drawn. Raises ValueError as `to_oneself`."""
    wanted = {folder / "reward_curve.png": partial(draw_curve, metrics=metrics)}
    if len(evaluations) > 1:
        grid = partial(draw_grid, before=evaluations[0], after=evaluations[-1])
        wanted[folder / "before_after.png"] = grid
    done = []
    with to_oneself(folder):
        for path, make in wanted.items():
            drawn = io.BytesIO()
            try:
                make(drawn)
                write_atomically(path, drawn.getvalue())
                done.append(path)
            except Exception as error:  # whatever a foreign record holds: the page is made
                print(f"{path} could not be drawn: {shown(str(error), 200)}", file=sys.stderr)
            finally:
                pyplot().close("all")
    return done


def draw_curve(file: Path | IO[bytes], metrics: Sequence[Record]) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(9, 5), dpi=120)
    curves = {name: points(metrics, name) for name in ("reward/mean", *STYLES)}
    if curves["reward/mean"]:
        x, y = zip(*curves["reward/mean"], strict=True)
        axes.plot(x, y, color="tab:blue", alpha=0.3, linewidth=1)
        axes.plot(x, smooth(y), color="tab:blue", label="training prompts, sampled")
    for name, (color, marks, label) in STYLES.items():
        if curves[name]:
            axes.plot(*zip(*curves[name], strict=True), marks, color=color, label=label)
    axes.set(xlabel="iteration", ylabel="reward (0 to 1)", ylim=(0, 1.02), title="Reward")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(file, format="png")
    plt.close(figure)


def draw_grid(file: IO[bytes], before: Evaluation, after: Evaluation) -> None:
    """The first held-out samples, two per row: sources with instruction, edit before, edit after.

    Where nothing is edited, the first picture is what the user's own words give."""
    plt = pyplot()
    both = [i for i in before.records if i in after.records][:MAX_SAMPLES_DRAWN]
    num_rows = (len(both) + 1) // 2
    height_in = 4.0 * num_rows + 0.8
    figure = plt.figure(figsize=(18, height_in), dpi=100)
    # The fourth of seven columns stays empty: it keeps the two samples of a row apart.
    grid = figure.add_gridspec(num_rows, 7, width_ratios=[1, 1, 1, 0.12, 1, 1, 1])
    top, bottom = 1 - 1.1 / height_in, 1.0 / height_in
    grid.update(left=0.01, right=0.99, top=top, bottom=bottom, wspace=0.06, hspace=0.45)
    for place, identity in enumerate(both):
        row, side = divmod(place, 2)
        source, left, right = (figure.add_subplot(grid[row, 4 * side + k]) for k in range(3))
        old, new = before.records[identity], after.records[identity]
        bare = old.get("source_file") is None and old.get("bare_file") is not None
        if bare:
            files, title = [old.get("bare_file")], "the words as they are"
        else:
            files = [old.get("source_file"), *other_sources(old)]
            title = "source" if len(files) == 1 else f"{len(files)} sources"
        show(source, before.folder, files, title, old.get("instruction"))
        for axes, folder, when, record in (
            (left, before.folder, "before", old),
            (right, after.folder, "after", new),
        ):
            title = f"{when}: {score(record)}"
            show(axes, folder, [record.get("image_file")], title, words_of(record))
    figure.suptitle(
        f"The first {len(both)} held-out samples, before training and after "
        f"{after.iteration} iterations (reward 0 to 1)",
        fontsize=16,
    )
    figure.savefig(file, format="png")
    plt.close(figure)


def show(axes: Axes, folder: Path, files: Sequence[object], title: str, words: object) -> None:
    """One picture, or several, or where one is not there its words alone."""
    said = text(words, _MAX_CHARS)
    there = [picture(folder, file) for file in files]
    with ExitStack() as stack:
        images = [
            stack.enter_context(open_picture(folder / file)) for file in there if file is not None
        ]
        if len(images) < len(there):
            panel(axes, None, title, said)
        else:
            panel(axes, images if len(images) > 1 else images[0], title, said)


def score(record: Record) -> str:
    """A record's reward, or why it has none."""
    reward = number(record.get("reward"))
    return "not graded" if reward is None else f"{reward:.2f}"
