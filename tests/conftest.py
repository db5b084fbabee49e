"""What every test gets: its own working directory, environment and global state.

One thread per process: tiny models are slower on two. `-n auto` of pytest-xdist is one worker per
core that is ours. A campaign runs by `-m campaign` only.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

_CACHES = TemporaryDirectory(prefix="tests_caches_", ignore_cleanup_errors=True)
os.environ["HF_HOME"] = _CACHES.name  # each process's own, and not the user's
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("WANDB_MODE", "offline")

import numpy as np  # noqa: E402
import torch  # noqa: E402

import rl  # noqa: E402, F401 (before `transformers` and the like: it makes them importable)
from rl.ranks.signals import STOP_SIGNALS  # noqa: E402

BUDGET = json.loads(Path(__file__).with_name("budget.json").read_text(encoding="utf-8"))
TIERS = {"not slow": "fast", "slow": "slow"}
"""`-m` -> its name in the budget."""
BUSY = 3
"""A machine that does other work takes longer; beyond this factor it is the tests."""
MAX_WORKERS = 8
"""Each holds torch, transformers and vLLM: 2 GB."""
STARTED_S = pytest.StashKey[float]()
TESTS = ["tests"]
"""`testpaths`: nothing less was asked for."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """xdist's own count is of physical cores, ours or not. Slow tests get one worker more, because
    some of them wait for a minute or two."""
    cores = len(os.sched_getaffinity(0))
    return min(cores + (config.option.markexpr == "slow"), MAX_WORKERS)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Whatever else is selected, a campaign is run only by `-m campaign`."""
    if "campaign" in config.option.markexpr:
        return
    campaign = [item for item in items if item.get_closest_marker("campaign")]
    if campaign:
        items[:] = [item for item in items if item not in campaign]
        config.hook.pytest_deselected(items=campaign)


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[STARTED_S] = time.monotonic()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A tier that takes far more minutes than its budget fails."""
    config = session.config
    tier = TIERS.get(config.option.markexpr)
    if (
        hasattr(config, "workerinput")
        or tier is None
        or config.option.keyword
        or config.args != TESTS
    ):
        return
    minutes = (time.monotonic() - config.stash[STARTED_S]) / 60
    budget = BUDGET["minutes"][tier]
    print(f"\n{tier} tests: {minutes:.1f} minutes of {budget} (tests/budget.json)", end="")
    if minutes > BUSY * budget and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> None:
    """What several tests share is made of the same random numbers whichever test comes first."""
    if fixturedef.scope != "function":
        _seed()


def _seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _outside_of_the_repository(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Fixtures that several tests share are made in an empty folder, too."""
    os.chdir(tmp_path_factory.mktemp("working_directory"))


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path) -> Iterator[None]:
    """Each test starts in its own empty folder with the same random numbers, and leaves the
    process as it found it, in whatever order tests run."""
    folder, environment, path = os.getcwd(), dict(os.environ), list(sys.path)
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    threads, dtype, grad = (
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
    )
    generators = random.getstate(), np.random.get_state(), torch.get_rng_state()
    os.chdir(tmp_path)
    _seed()
    yield
    os.chdir(folder)
    if os.environ != environment:
        os.environ.clear()
        os.environ.update(environment)
    sys.path[:] = path
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler is not None:
            signal.signal(number, handler)
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)
    random.setstate(generators[0])
    np.random.set_state(generators[1])
    torch.set_rng_state(generators[2])
