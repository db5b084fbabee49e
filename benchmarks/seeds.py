"""Measures how a config's results vary with the seed, and prints all of them.

python -m benchmarks.seeds quickstart tiny_earl --first 100 --count 24 --at-once 2
python -m benchmarks.seeds quickstart --fresh 256     evaluates on 256 samples of a new data seed
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median, stdev

from benchmarks.training import train
from rl.files import read_rows
from rl.run.paired import paired
from rl.tools.reading import read_evaluations

REWARD = ("eval/reward", "reward/mean")
MEASURES = {"tiny_reasoning": ("eval/part/accuracy", "reward/part/accuracy")}
"""Config -> (held-out metric, training metric) where these differ from `REWARD`."""
REFERENCE = "eval_reference/reward"
"""The reward of reference descriptions, written by no policy."""
DRIFT = "drift/state_l2"
"""Relative distance of the policy's hidden states of fixed texts from the base model's."""
SPAN = 10
"""Number of iterations in each average."""
FRESH_SEED = 7777
"""Data seed of `--fresh`, which no shipped config uses."""


@dataclass(frozen=True)
class Seed:
    """The results of one run."""

    line: str
    """Its row of the table."""
    held_out: Sequence[float]
    """The held-out metric of each evaluation, the first of which is before training."""
    sampled: tuple[float, float]
    """Means of the training metric over the first and over the last SPAN iterations."""
    error: float | None
    """Standard error of the last held-out metric over its samples."""


def main(argv: Sequence[str] | None = None) -> None:
    """Trains the runs that are not finished, and prints a table of each config."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.seeds", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("configs", nargs="+")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("runs/seeds"))
    parser.add_argument("--fresh", type=int, default=0, metavar="N", help="fresh held-out samples")
    args = parser.parse_args(argv)
    runs = [(c, s) for c in args.configs for s in range(args.first, args.first + args.count)]
    with ThreadPoolExecutor(args.at_once) as pool:
        list(pool.map(partial(_train, args.out, args.fresh), runs))
    for config in args.configs:
        seeds = [_read(args.out, args.fresh, config, seed) for name, seed in runs if name == config]
        print(f"\n### {config}\n\n" + "\n".join(table(seeds)))


def table(seeds: Sequence[Seed]) -> Iterable[str]:
    """Markdown: a row per seed, then mean, deviation, median and worst of the last evaluations."""
    yield (
        "| seed | held-out, before and at each evaluation | reference words, last "
        "| dead groups, last ten iterations | most in any ten | state drift, at most | s |"
    )
    yield "|---" * 7 + "|"
    yield from (run.line for run in seeds)
    last = [run.held_out[-1] for run in seeds]
    errors = [run.error for run in seeds if run.error is not None]
    before, after = (_spread([run.sampled[i] for run in seeds]) for i in (0, 1))
    yield (
        f"\n{len(last)} seeds: mean {_spread(last)} (standard deviation over seeds), "
        f"median {median(last):.3f}, worst {min(last):.3f}, best {max(last):.3f}; "
        f"before training {_spread([run.held_out[0] for run in seeds])}. Sampled in training: "
        f"{before} in the first ten iterations, {after} in the last."
        + (f" Standard error over the held-out samples: {fmean(errors):.3f}." if errors else "")
    )


def _spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.3f}" + (f" +- {stdev(values):.3f}" if len(values) > 1 else "")


def _train(out: Path, fresh: int, run: tuple[str, int]) -> None:
    config, seed = run
    overrides = [f"seed={seed}"]
    if fresh:
        overrides += [f"evaluation.num_samples={fresh}", f"data.validation.0.num_samples={fresh}"]
        overrides.append(f"data.validation.0.seed={FRESH_SEED}")
    train(out / _name(config, seed, fresh), config, *overrides)


def _read(out: Path, fresh: int, config: str, seed: int) -> Seed:
    folder = out / _name(config, seed, fresh)
    rows, _ = read_rows(folder / "metrics.jsonl")
    held_out, sampled = MEASURES.get(config.removesuffix("_control"), REWARD)

    def values(key: str) -> list[float]:
        return [row[key] for row in rows if key in row]

    dead, reference, drift = (values(key) for key in ("groups/dead", REFERENCE, DRIFT))
    means = [fmean(dead[start : start + SPAN]) for start in range(len(dead) - SPAN + 1)]
    cells = (
        str(seed),
        " ".join(f"{value:.3f}" for value in values(held_out)),
        f"{reference[-1]:.3f}" if reference else "",  # without reference descriptions
        f"{means[-1]:.0%}",
        f"{max(means):.0%}",
        f"{max(drift):.2f}" if drift else "",  # the renderer reads no states
        f"{sum(row.get('time/iteration_s', 0.0) for row in rows):.0f}",
    )
    return Seed(
        f"| {' | '.join(cells)} |",
        values(held_out),
        (fmean(values(sampled)[:SPAN]), fmean(values(sampled)[-SPAN:])),
        _error(folder, held_out.partition("eval/part/")[2]),
    )


def _error(run_dir: Path, part: str) -> float | None:
    """Standard error, over the last held-out samples, of the reward or of a part of it."""
    if not (evaluations := read_evaluations(run_dir)):
        return None
    rows = evaluations[-1].records.values()
    values = [row["parts"].get(part) if part else row["reward"] for row in rows]
    graded = [value for value in values if value is not None]
    return difference.error if (difference := paired(graded)) else None


def _name(config: str, seed: int, fresh: int = 0) -> str:
    return f"{config}-seed-{seed}" + (f"-fresh-{fresh}" if fresh else "")


if __name__ == "__main__":
    main()
