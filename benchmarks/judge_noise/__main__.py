"""Trains the quickstart under a noisy judge that is asked in three ways, and grades the held-out
pictures without noise.

python -m benchmarks.judge_noise --noises 1 2 --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from benchmarks.training import train
from rl.files import open_picture, read_rows
from tiny_world.pixel_judge import grade_perception, grade_semantics

ASKED = {
    "plain": "{type: 'viescore'}",
    "three readings": "{type: 'viescore', n_evals: 3, temperature: 0.7}",
    "expected score": "{type: 'expected_score'}",
}
"""How the judge is asked -> the run's reward."""
LAST = 40
OUT = Path("runs/judge_noise")
MODULE = "benchmarks.judge_noise.noisy_judge"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what is missing, one after the other, and prints a table."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.judge_noise", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--noises", nargs="+", default=["1", "2"], help="points of 10")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    args = parser.parse_args(argv)
    for seed, noise, asked in itertools.product(args.seeds, args.noises, ASKED):
        _train(OUT / _name(asked, noise, seed), asked, noise, seed)
    print("| noise, points | asked | requests per iteration | held-out, each seed | mean |")
    print("|---" * 5 + "|")
    for noise, asked in itertools.product(args.noises, ASKED):
        runs = [OUT / _name(asked, noise, seed) for seed in args.seeds]
        rewards = [sound_reward(run) for run in runs]
        rows = [row for run in runs for row in read_rows(run / "metrics.jsonl")[0]]
        requests = fmean(row["judge/requests"] for row in rows if "reward/mean" in row)
        spread = f" +- {stdev(rewards):.3f}" if len(rewards) > 1 else ""
        print(
            f"| {noise} | {asked} | {requests:.0f} "
            f"| {' '.join(f'{reward:.3f}' for reward in rewards)} | {fmean(rewards):.3f}{spread} |"
        )


def sound_reward(run: Path, iteration: int = LAST) -> float:
    """Mean VIEScore (0..1) without noise of the held-out pictures on record."""
    folder = run / "evaluation" / f"it_{iteration:06d}"
    return fmean(_viescore(folder, row) for row in read_rows(folder / "records.jsonl")[0])


def _viescore(folder: Path, row: dict[str, str]) -> float:
    source, edited = (open_picture(folder / row[key]) for key in ("source_file", "image_file"))
    semantics = min(grade_semantics(source, edited, row["instruction"]))
    return math.sqrt(semantics * min(grade_perception(edited))) / 10


def _train(run: Path, asked: str, noise: str, seed: int) -> None:
    train(
        run,
        "quickstart",
        f"seed={seed}",
        f"rewards={{reward: {ASKED[asked]}}}",
        f"judge.start_command=['{{python}}', '-m', '{MODULE}', '{{url_file}}', '{{model}}']",
        f"judge.model=noise-{noise}",
        "judge.audit=off",  # with noise of 2 points it is refused
        "evaluation.every_n_iterations=20",
        "evaluation.reference_drift=false",
        "tracking.page=false",
    )


def _name(asked: str, noise: str, seed: int) -> str:
    return f"{asked.replace(' ', '_')}_{noise}_{seed}"


if __name__ == "__main__":
    main()
