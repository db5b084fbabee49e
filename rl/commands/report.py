"""What a run learnt, printed and drawn: `rl report <run folder | config.jsonnet [key=value ...]>`.

Draws `<run>/report/reward_curve.png` and `before_after.png`: the FIRST held-out samples, not the
best. Measures nothing of its own.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from rl.config import formats
from rl.config.printing import printable
from rl.config.schema import load_config
from rl.files.atomic import read_rows
from rl.record import terminal
from rl.record.checkpoint import too_new

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_SAMPLES_DRAWN = 10
SMOOTHING_ITERATIONS = 5
STYLES = {
    "eval/reward": ("tab:orange", "o-", "held-out prompts"),
    "eval/stock_reward": ("tab:red", "--", "held-out, the untrained system"),
    "eval/bare_reward": ("tab:gray", ":", "held-out, the user's own words"),
    "eval_reference/reward": ("tab:green", "s--", "held-out, given the right words"),
}
"""Curves of the held-out run: (colour, marks, label)."""
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """One held-out evaluation, as `rl/run/evaluation.py` wrote it."""

    iteration: int
    """Iterations done when it was made."""
    folder: Path
    records: Mapping[str, Record]
    """Sample id -> record."""


@dataclass(frozen=True)
class Change:
    """Rewards before and after of the samples that were graded both times."""

    name: str
    rewards: Sequence[tuple[float, float]]

    def sentence(self, width: int) -> str:
        """One line: means, their difference with its standard error, how many samples."""
        before, after = (fmean(column) for column in zip(*self.rewards, strict=True))
        gains = [b - a for a, b in self.rewards]
        error = f" +- {stdev(gains) / len(gains) ** 0.5:.3f}" if len(gains) > 1 else ""
        return (
            f"  {self.name:{width}}  {before:.3f} -> {after:.3f}   "
            f"({after - before:+.3f}{error}, {len(gains)} samples)"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 1 when there is nothing to report on."""
    terminal.guard()
    parser = argparse.ArgumentParser("rl report", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", help="run folder, or the config it was started with")
    parser.add_argument("overrides", nargs="*", help="key=value, as given to the run")
    args = parser.parse_args(argv)
    try:
        run_dir = find_run(args.run, args.overrides)
        metrics = read_named(run_dir / "metrics.jsonl", "iteration")
    except (ValueError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 1
    evaluations = read_evaluations(run_dir)
    print("\n".join(summary(metrics, evaluations)))
    for path in draw(run_dir / "report", metrics, evaluations):
        print(f"  drawn: {path}")
    return 0


def find_run(run: str, overrides: Sequence[str]) -> Path:
    """The run folder itself, or the one that a config leads to."""
    path = Path(run)
    run_dir = path if path.is_dir() else load_config(run, list(overrides)).run_dir
    if not (run_dir / "metrics.jsonl").is_file():
        raise FileNotFoundError(f"{run_dir} has no metrics.jsonl: no run has been there")
    if problem := too_new(run_dir):
        raise ValueError(problem)
    return run_dir


def read_named(path: Path, key: str) -> list[dict[str, Any]]:
    """The rows of a JSONL file that have `key`, under today's names; a line that is none, such as a
    last one that a kill cut short, is named and left out."""
    rows, damaged = read_rows(path)
    if damaged:
        numbers = ", ".join(map(str, damaged))
        print(f"{path}: damaged lines are left out: {numbers}", file=sys.stderr)
    return [formats.recorded(row) for row in rows if key in row]


def read_evaluations(run_dir: Path) -> list[Evaluation]:
    found = []
    for path in sorted(run_dir.glob("evaluation/it_*/records.jsonl")):
        records = {record["id"]: record for record in read_named(path, "id")}
        found.append(Evaluation(int(path.parent.name.removeprefix("it_")), path.parent, records))
    return found


def compare(before: Evaluation, after: Evaluation) -> list[Change]:
    """All samples first, then each category; only what was graded both times."""
    rewards: dict[str, list[tuple[float, float]]] = {"held-out reward": []}
    for identity, old in before.records.items():
        new = after.records.get(identity)
        if new is None or old["reward"] is None or new["reward"] is None:
            continue
        for name in ["held-out reward", *([printable(old["category"])] if old["category"] else [])]:
            rewards.setdefault(name, []).append((old["reward"], new["reward"]))
    first, *categories = rewards
    return [Change(name, rewards[name]) for name in (first, *sorted(categories)) if rewards[name]]


def summary(metrics: Sequence[Record], evaluations: Sequence[Evaluation]) -> list[str]:
    """What was learnt, in lines."""
    if len(evaluations) < 2:
        lines = ["Fewer than two held-out evaluations: nothing to compare."]
    else:
        before, after = evaluations[0], evaluations[-1]
        changes = compare(before, after)
        width = max((len(change.name) for change in changes), default=0)
        span = f"(0 to 1; before training -> after {after.iteration} iterations)"
        lines = [f"What was learnt {span}", *(change.sentence(width) for change in changes)]
        num_graded = len(changes[0].rewards) if changes else 0
        if num_graded < len(before.records):
            lines.append(f"  left out: {len(before.records) - num_graded} not graded both times")
    name = "eval_reference/reward"
    reference = [row[name] for row in metrics if row.get(name) is not None]
    if len(reference) > 1:
        lines.append(
            f"  the renderer, given the right words: {reference[0]:.3f} -> {reference[-1]:.3f}"
        )
    gains = [row for row in metrics if row.get("eval/reward_gain") is not None]
    if len(gains) > 1:
        first, last = gains[0], gains[-1]
        lines.append(
            f"  the user's own words, as they are: {first['eval/bare_reward']:.3f}; gain over "
            f"them {first['eval/reward_gain']:+.3f} -> {last['eval/reward_gain']:+.3f}"
        )
    return [*lines, *stock_lines(metrics), *drift_lines(metrics)]


def stock_lines(metrics: Sequence[Record]) -> list[str]:
    """What was gained over the untrained system."""
    name = "eval/gain_over_stock"
    rows = [row for row in metrics if row.get(name) is not None]
    if not rows:
        return []
    first, last = (f"{row[name]:+.3f}{_error(row, name)}" for row in (rows[0], rows[-1]))
    upstream = rows[-1].get("eval/stock_upstream_reward")
    beside = "" if upstream is None else f" ({upstream:.3f} as upstream calls its text encoder)"
    return [
        f"  the untrained system on the user's words: {rows[-1]['eval/stock_reward']:.3f}{beside}; "
        f"gain over it {first} -> {last}"
    ]


def drift_lines(metrics: Sequence[Record]) -> list[str]:
    """How far training has moved what the renderer reads, where it reads what is trained."""
    rows = [row for row in metrics if row.get("drift/alarm") is not None]
    lines = []
    if alarmed := [str(row["iteration"]) for row in rows if row["drift/alarm"]]:
        lines.append(
            f"  DRIFT: after {', '.join(alarmed)} iterations words that training does not change "
            "had lost more than noise"
        )
    for arm, words in (("bare", "the user's own words"), ("reference", "the right words")):
        name = f"drift/{arm}_fall"
        if rows and rows[-1].get(name) is not None:
            lost = f"{rows[-1][name]:+.3f}{_error(rows[-1], name)}"
            lines.append(f"  lost by {words} since training began: {lost}")
    moved = [row for row in metrics if row.get("drift/state_l2") is not None]
    if moved:
        lines.append(
            f"  the states of the user's own words moved by {moved[-1]['drift/state_l2']:.1%} of "
            f"their length (cosine {moved[-1]['drift/state_cosine']:.3f})"
        )
    return lines


def _error(row: Record, name: str) -> str:
    """' +- 0.012', where a metric has a standard error."""
    error = row.get(f"{name}_error")
    return "" if error is None else f" +- {error:.3f}"


def draw(folder: Path, metrics: Sequence[Record], evaluations: Sequence[Evaluation]) -> list[Path]:
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [folder / "reward_curve.png"]
    draw_curve(drawn[0], metrics)
    if len(evaluations) > 1:
        drawn.append(folder / "before_after.png")
        draw_grid(drawn[1], evaluations[0], evaluations[-1])
    return drawn


def draw_curve(path: Path, metrics: Sequence[Record]) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5), dpi=120)
    curves = {
        name: [(row["iteration"], row[name]) for row in metrics if row.get(name) is not None]
        for name in ("reward/mean", *STYLES)
    }
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
    figure.savefig(path)
    plt.close(figure)


def smooth(values: Sequence[float]) -> list[float]:
    windows = (values[max(0, i + 1 - SMOOTHING_ITERATIONS) : i + 1] for i in range(len(values)))
    return [fmean(window) for window in windows]


def draw_grid(path: Path, before: Evaluation, after: Evaluation) -> None:
    """The first held-out samples, two per row: source with instruction, edit before, edit after.

    Where nothing is edited, the first picture is what the user's own words give."""
    import matplotlib.pyplot as plt

    shown = [i for i in before.records if i in after.records][:MAX_SAMPLES_DRAWN]
    num_rows = (len(shown) + 1) // 2
    height_in = 4.0 * num_rows + 0.8
    figure = plt.figure(figsize=(18, height_in), dpi=100)
    # The fourth of seven columns stays empty: it keeps the two samples of a row apart.
    grid = figure.add_gridspec(num_rows, 7, width_ratios=[1, 1, 1, 0.12, 1, 1, 1])
    top, bottom = 1 - 1.1 / height_in, 1.0 / height_in
    grid.update(left=0.01, right=0.99, top=top, bottom=bottom, wspace=0.06, hspace=0.45)
    for number, identity in enumerate(shown):
        row, side = divmod(number, 2)
        source, left, right = (figure.add_subplot(grid[row, 4 * side + k]) for k in range(3))
        old, new = before.records[identity], after.records[identity]
        bare = old["source_file"] is None and old.get("bare_file") is not None
        first = ("bare_file", "the words as they are") if bare else ("source_file", "source")
        show(source, before.folder, old[first[0]], first[1], old["instruction"])
        show(left, before.folder, old["image_file"], f"before: {score(old)}", old["completion"])
        show(right, after.folder, new["image_file"], f"after: {score(new)}", new["completion"])
    figure.suptitle(
        f"The first {len(shown)} held-out samples, before training and after "
        f"{after.iteration} iterations (reward 0 to 1)",
        fontsize=16,
    )
    figure.savefig(path)
    plt.close(figure)


def show(axes: Axes, folder: Path, file: str | None, title: str, text: str) -> None:
    """One picture with its title above and its words below, or the words in its place; tiny
    pictures keep crisp pixels."""
    from PIL import Image

    axes.axis("off")
    drawn = file is not None and (folder / file).is_file()
    if drawn:
        with Image.open(folder / str(file)) as image:
            crisp = max(image.size) < 256
            axes.imshow(image.convert("RGB"), interpolation="nearest" if crisp else "antialiased")
    axes.set_title(printable(title), fontsize=13)
    width, num_lines = (34, 4) if drawn else (22, 10)
    words = textwrap.wrap(
        printable(text, but="\n\t"), width, max_lines=num_lines, placeholder=" ..."
    )
    # `parse_math`: a dollar sign in a user's instruction is a dollar sign.
    axes.text(
        0.5,
        -0.04 if drawn else 0.5,
        "\n".join(words) or "(no words)",
        ha="center",
        va="top" if drawn else "center",
        fontsize=11,
        transform=axes.transAxes,
        parse_math=False,
    )


def score(record: Record) -> str:
    """A record's reward, or why it has none."""
    return "not graded" if record["reward"] is None else f"{record['reward']:.2f}"


if __name__ == "__main__":
    sys.exit(main())
