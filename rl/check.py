"""What a config would do, without doing it: `python -m rl.simple_launch --check config.jsonnet`.

What: `problems` (everything wrong, quietly, asked before every launch) and `report`. What not: the
rules themselves (`build.py`, `validation.py`). No torch, no vLLM, no GPU: seconds on a laptop.
"""

from __future__ import annotations

from rl import build
from rl.config import ConfigError, RunConfig


def problems(config: RunConfig) -> list[str]:
    """Everything that keeps this config from running, each with its key and remedy."""
    try:
        resolved = build.resolve(config)
    except ConfigError as error:
        return list(error.problems)
    return build.fit_problems(resolved)


def report(config: RunConfig, gpu_gb: float) -> int:
    """Print; returns the exit code."""
    found = problems(config)
    print(found)
    return int(bool(found))
