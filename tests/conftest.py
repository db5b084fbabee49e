"""Gives every test its own working directory, environment and global state."""

import gc
import json
import os
import random
import signal
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import chdir
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest

from rl.ranks.signals import STOP_SIGNALS

gc.disable()  # until all tests are imported, see `pytest_collection`

_CACHES = TemporaryDirectory(prefix="tests_caches_", ignore_cleanup_errors=True)
os.environ["HF_HOME"] = _CACHES.name  # one per process, and not the user's
for _name, _value in {
    "OMP_NUM_THREADS": "1",  # tiny models are slower with two
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "DS_ACCELERATOR": "cpu",
    "WANDB_MODE": "offline",
}.items():
    os.environ.setdefault(_name, _value)

BUDGET = json.loads(Path(__file__).with_name("budget.json").read_text(encoding="utf-8"))
TIERS = {"not slow": "fast", "slow": "slow"}
"""`-m` -> the tier's name in the budget."""
BUSY = 3
"""Factor over the budget that a busy machine may take; beyond it the tests are too slow."""
MAX_WORKERS = 8
"""Each takes 2 GB for torch, transformers and vLLM."""
STARTED_S = pytest.StashKey[float]()
LONGEST = ("test_rehearsal", "test_systems_learn", "test_train_ranks", "test_two_nodes",
           "test_train_hangs", "test_pool_ray", "test_documents", "test_policies_conformance",
           "test_notebook", "test_train_full_disk", "test_config_shipped")  # fmt: skip
"""Files with slow tests of one to five minutes. Each worker gets a contiguous share of the tests,
which begins with some of these: at the end they would leave other workers without work."""
TESTS = ["tests"]
"""`testpaths`: the arguments if all tests are requested."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One worker per core of this process (xdist counts all physical cores). Slow tests get two
    more, because some of them wait for a minute or two."""
    cores = len(os.sched_getaffinity(0))
    return min(cores + 2 * (config.option.markexpr == "slow"), MAX_WORKERS)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports make a million objects that stay; a search for garbage among them, again and again,
    took a third of their time and a tenth of the tests'."""
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files without a test of the tier: half have no slow one, an eighth is slow as a whole. Each
    worker would import them."""
    if config.option.markexpr not in TIERS or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text(encoding="utf-8")
    all_slow = "\npytestmark = pytest.mark.slow\n" in text
    return ("mark.slow" not in text if config.option.markexpr == "slow" else all_slow) or None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Campaign tests run only with `-m campaign`, and without a time limit."""
    if "campaign" in config.option.markexpr:
        for item in items:
            item.add_marker(pytest.mark.timeout(0))
        return
    campaign = [item for item in items if item.get_closest_marker("campaign")]
    if campaign:
        items[:] = [item for item in items if item not in campaign]
        config.hook.pytest_deselected(items=campaign)
    if config.option.markexpr == "slow" and hasattr(config, "workerinput"):
        shares = config.workerinput["workercount"]
        longest = [[i for i in items if i.path.stem in LONGEST[n::shares]] for n in range(shares)]
        others = iter([item for item in items if item.path.stem not in LONGEST])
        size = len(items) // shares
        mixed = [i for own in longest for i in (*own, *islice(others, max(0, size - len(own))))]
        items[:] = [*mixed, *others]


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[STARTED_S] = time.monotonic()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails a tier that takes far more minutes than its budget."""
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
    """Shared fixtures get the same random numbers whichever test comes first."""
    if fixturedef.scope != "function":
        _seed()


def _seed() -> None:
    import numpy as np
    import torch  # not by the process that only gives tests to its workers, and makes them wait

    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` also notes the stack, for CUDA


@pytest.fixture(scope="session", autouse=True)
def _outside_of_the_repository(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Shared fixtures are made in an empty folder, too."""
    os.chdir(tmp_path_factory.mktemp("working_directory"))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Role ('policy', 'editor') -> folder of a model with random weights, only to be read."""
    import tiny_loop

    folder = tiny_loop.made_once(tmp_path_factory, "models", tiny_loop.save_models)
    return {"policy": str(folder / "policy"), "editor": str(folder / "editor")}


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path) -> Iterator[None]:
    """Each test starts in its own empty folder with the same random numbers; afterwards the state
    of the process is restored, so that the order of tests does not matter."""
    import numpy as np
    import torch

    path, handlers = list(sys.path), {n: signal.getsignal(n) for n in STOP_SIGNALS}
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    grad = torch.is_grad_enabled()
    generators = random.getstate(), np.random.get_state(), torch.get_rng_state()
    with chdir(tmp_path), patch.dict(os.environ):
        _seed()
        yield
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
