"""Runs a shipped config of the tiny world as a user does, and measures how much it learnt."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from tiny_config import REPO
from tiny_loop import rows_of


def run(config: str, base_exp_dir: Path, *overrides: str) -> list[dict[str, Any]]:
    """Runs the config; returns the rows of metrics.jsonl."""
    command = [sys.executable, "-m", "rl.simple_launch", config, f"base_exp_dir={base_exp_dir}"]
    ended = subprocess.run(
        [*command, *overrides], cwd=REPO, capture_output=True, text=True, timeout=3000
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    [metrics] = base_exp_dir.glob("*/metrics.jsonl")
    assert (metrics.parent / "report" / "index.html").is_file(), "every run writes its page"
    return rows_of(metrics)


def climb(rows: list[dict[str, Any]]) -> float:
    """Mean reward of the last ten iterations minus that of the first ten, over 960 completions of
    new prompts each. The greedy held-out reward is too coarse for a control: if two answers are
    about equally likely, a random step changes the answers to all scenes of a kind at once."""
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    return fmean(rewards[-10:]) - fmean(rewards[:10])


def most_dead_groups(rows: list[dict[str, Any]]) -> float:
    """Share of dead groups in the worst ten consecutive iterations: at most 0.20 in 48 seeds that
    learnt, up to 0.38 in runs that lost a wording permanently."""
    dead = [row["groups/dead"] for row in rows if "groups/dead" in row]
    return max(fmean(dead[start : start + 10]) for start in range(len(dead) - 9))
