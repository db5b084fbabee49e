"""Loads the config of a rank; under torchrun, adapts and checks it as `rl train` does."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rl.check import check_report
from rl.config.schema import ConfigError, RunConfig, load_config


def load_in_rank(file: str, overrides: Sequence[str]) -> RunConfig:
    """The config. If torchrun started this process, `world_size` is its number of ranks, and the
    first rank of each node raises ConfigError for a config that cannot run; torchrun then ends the
    others."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return load_config(file, overrides)
    config = load_config(file, [*overrides, f"world_size={os.environ['WORLD_SIZE']}"])
    if os.environ["LOCAL_RANK"] == "0" and (problems := check_report.problems(config)):
        raise ConfigError(problems)
    return config
