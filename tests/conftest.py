"""One thread per process: tiny models are slower on two, and results repeat bit for bit.

Wheels are mended before any test file imports `datasets`, `transformers` or `diffusers`. A campaign
runs by `-m campaign` only; `-n auto` of pytest-xdist is one worker per core that is ours.
"""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("WANDB_MODE", "offline")

from rl.ranks.wheels import mend_mismatched_wheels

mend_mismatched_wheels()

MAX_WORKERS = 8
"""Each holds torch, transformers and vLLM: 2 GB."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """xdist's own count is of physical cores, ours or not."""
    return min(len(os.sched_getaffinity(0)), MAX_WORKERS)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Whatever else is selected, a campaign is run only by `-m campaign`."""
    if "campaign" in config.option.markexpr:
        return
    campaign = [item for item in items if item.get_closest_marker("campaign")]
    if campaign:
        items[:] = [item for item in items if item not in campaign]
        config.hook.pytest_deselected(items=campaign)
