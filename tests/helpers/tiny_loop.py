"""A whole run at tiny size: random models of the real classes on disk, a config, a process.

`python tests/helpers/tiny_loop.py <config> <where> <count> [SIGTERM]` runs the loop, which gets
SIGKILL (or the named signal) at its `count`-th call of `where`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from filelock import FileLock
from tiny_config import REPO

from benchmarks.faults.inject import end_at, end_at_phase
from rl.config.loading import evaluate
from rl.files import read_rows

HELPERS = Path(__file__).parent
STATE_DIM = 64
"""Width of the tiny policy's hidden states, which the tiny editor reads."""

STEP = "rl.learner.train_step:TrainStep.step"
"""A function at which runs are killed."""
JUDGE = ["{python}", "-m", "tiny_world.judge_server", "{url_file}", "{model}"]
"""`judge.start_command`."""

NOT_REPEATED = ("time/", "judge/", "work/", "memory/")
"""Prefixes of metrics that differ after a resume: times, memory, replies from the journal."""


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that all test processes share; the first one that needs it calls `make`."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"shared_{name}"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            make(folder)
    return folder


def run_once(
    factory: pytest.TempPathFactory, name: str, models: dict[str, str], **changes: Any
) -> Path:
    """The folder of a finished run of `config_of`, which nothing interrupted."""
    return made_once(factory, name, lambda folder: run(written(models, folder, **changes))) / "tiny"


def save_models(folder: Path) -> dict[str, str]:
    """Writes folders of a random Qwen2.5-VL and a Qwen-Image-Edit that reads its states."""
    import tiny_editor
    import tiny_qwen

    tiny_qwen.save_policy_folder(folder / "policy")
    tiny_editor.make_stock(state_dim=STATE_DIM).save(folder / "editor")
    return {"policy": str(folder / "policy"), "editor": str(folder / "editor")}


def config_of(models: dict[str, str], base_exp_dir: Path, **changes: Any) -> dict[str, Any]:
    """Two prompts x four completions; brightness is the reward, and the tiny judge also grades."""
    config: dict[str, Any] = {
        "run_name": "tiny",
        "base_exp_dir": str(base_exp_dir),
        "seed": 3,
        "num_iterations": 4,
        "prompts_per_iteration": 2,
        "generations_per_prompt": 4,
        "policy": {
            "type": "qwen2_5_vl",
            "model_path": models["policy"],
            "dtype": "float32",
            "lora": {"r": 4, "alpha": 8, "init_seed": 0},  # the golden trace's
        },
        "engine": {"type": "transformers"},
        "renderer": {
            "type": "qwen_image_edit",
            "model_path": models["editor"],
            "dtype": "float32",
            "num_steps": 2,
            "true_cfg_scale": 1.0,
            "output_area_px": 64 * 64,
            "condition_area_px": 64 * 64,
            "policy_image_area_px": 64 * 64,
        },
        "rewards": {
            "brightness": {"type": "tests.helpers.brightness_reward"},
            "viescore": {"type": "viescore"},
        },
        "final_reward": {"weights": {"brightness": 1}},
        "judge": {"start_command": JUDGE},
        "data": {
            "train": [{"type": "tiny_world.data.shapes", "num_samples": 20, "seed": 1}],
            "validation": [{"type": "tiny_world.data.shapes", "num_samples": 3, "seed": 2}],
        },
        "sampling": {"max_completion_tokens": 6},
        "algorithm": {"kl_coeff": 0.05},
        "optimizer": {
            "backend": "torch",
            "learning_rate": 1e-2,
            "adam_eps": 1e-3,  # a smaller one amplifies gradients that are only rounding
            "max_tokens_per_micro_batch": 200,
        },
        "evaluation": {"every_n_iterations": 4, "num_samples": 3},
        "checkpoint": {"save_every_n_iterations": 1},
        "tracking": {"page": False},
    }
    return {**config, **changes}


def written(models: dict[str, str], folder: Path, **changes: Any) -> Path:
    """The path of a file with `config_of`, for a run in the same folder."""
    return write_config(folder, config_of(models, folder, **changes))


def without_judge(models: dict[str, str], folder: Path, **changes: Any) -> dict[str, Any]:
    """`config_of` with only the brightness as its reward, and without evaluations."""
    fewer: dict[str, Any] = {
        "rewards": {"brightness": {"type": "tests.helpers.brightness_reward"}},
        "judge": {},
        "evaluation": {"every_n_iterations": 0},
    }
    return config_of(models, folder, **{**fewer, **changes})


def iterations_of(run_dir: Path) -> list[int]:
    """Of the lines of its metrics."""
    return [row["iteration"] for row in metrics_of(run_dir)]


def saved_in(run_dir: Path) -> list[str]:
    """The names of its checkpoints."""
    return sorted(path.name for path in (run_dir / "checkpoints").glob("step_*"))


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.jsonnet"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def run(path: Path, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs the loop in a new process; `arguments`: of `end_at`, or 'phase', *of `end_at_phase`."""
    command = [sys.executable, str(Path(__file__)), str(path), *arguments]
    ended = subprocess.run(
        command, env=environment(), cwd=REPO, capture_output=True, text=True, timeout=300
    )
    return _checked(ended, check)


def _checked(
    ended: subprocess.CompletedProcess[str], check: bool
) -> subprocess.CompletedProcess[str]:
    assert ended.returncode == 0 or not check, ended.stdout[-2000:] + ended.stderr[-4000:]
    return ended


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{REPO}:{HELPERS}", **more}


def launch(
    path: Path, num_ranks: int, *options: str, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Launches `train_on_ranks.py` with the config. The launcher is forked, as by `run_forked`; the
    ranks are new interpreters."""
    import tiny_ranks

    arguments = ["--nproc", str(num_ranks), *options, str(HELPERS / "train_on_ranks.py"), str(path)]
    variables = environment(**environ)
    variables.pop("DS_ACCELERATOR", None)  # the run sets it
    return tiny_ranks.run_forked(launch_here, variables, *arguments)


def launch_here(variables: dict[str, str], *arguments: str) -> None:
    """`python -m rl.simple_launch` with this environment, in a forked process."""
    from rl.simple_launch import main

    os.environ.clear()
    os.environ |= variables
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would be ignored
    main(arguments)


def listeners(process: psutil.Process) -> list[str]:
    """The addresses on which it listens."""
    sockets = process.net_connections("inet")
    return [socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN]


@contextmanager
def listening() -> Iterator[set[str]]:
    """The addresses on which this process's descendants listen meanwhile."""
    addresses: set[str] = set()
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.5):
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):  # it has ended
                    addresses.update(listeners(process))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield addresses
    finally:
        is_over.set()
        thread.join()


def run_forked(path: Path, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """As `run`, but forked, without the start of an interpreter and imports. Of two runs that must
    be equal bit for bit only one may be forked, as forked processes share one hash seed."""
    import tiny_ranks

    return _checked(tiny_ranks.run_forked(_train, str(path), *arguments), check)


def kill_and_resume(
    path: Path, *arguments: str, meanwhile: Callable[[], object] = lambda: None
) -> str:
    """Kills a run as `arguments` say and resumes it; returns the output of the second process."""
    killed = run_forked(path, *arguments, check=False)
    assert killed.returncode == -9, killed.stderr[-2000:]
    meanwhile()
    resumed = run_forked(path).stdout
    assert "resumed from" in resumed
    return resumed


def _train(path: str, *end: str) -> None:
    if end[:1] == ("phase",):
        end_at_phase(end[1], int(end[2]))
    elif end:
        end_at(end[0], int(end[1]), *end[2:])
    from rl.train import main

    main([path])


def shortened(system: str, base_exp_dir: Path, engine: str) -> dict[str, Any]:
    """A shipped config with three iterations of two prompts and three held-out samples."""
    values, problems = evaluate(REPO / "configs" / f"{system}.jsonnet", (), {})
    assert values is not None and not problems
    return values | {
        "run_name": "tiny",
        "base_exp_dir": str(base_exp_dir),
        "num_iterations": 3,
        "prompts_per_iteration": 2,
        "generations_per_prompt": 4,
        "engine": {"type": engine},
        "optimizer": values["optimizer"]
        | {"warmup_iterations": 0, "max_tokens_per_micro_batch": 300},
        "evaluation": values["evaluation"] | {"every_n_iterations": 3, "num_samples": 3},
        "checkpoint": values["checkpoint"] | {"save_every_n_iterations": 1},
        "tracking": values["tracking"] | {"page": False},
    }


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file; asserts that no line is damaged."""
    rows, damaged = read_rows(path)
    assert not damaged, (path, damaged)
    return rows


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    rows = rows_of(run_dir / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(NOT_REPEATED)} for row in rows]


def episodes_of(run_dir: Path) -> list[dict[str, Any]]:
    paths = sorted((run_dir / "episodes").glob("*.jsonl"))
    rows = [row for path in paths for row in rows_of(path)]
    return [{k: v for k, v in row.items() if k != "judge_s"} for row in rows]


def assert_same_run(one: Path, other: Path, num_iterations: int = 4) -> None:
    """Equal weights, moments, metrics and episodes, bit for bit."""
    assert_same_weights(one, other, num_iterations)
    assert metrics_of(one) == metrics_of(other)
    assert episodes_of(one) == episodes_of(other)


def assert_same_weights(one: Path, other: Path, num_iterations: int = 4) -> None:
    """Equal weights and moments, bit for bit."""
    import torch
    from safetensors.torch import load_file

    name = f"checkpoints/step_{num_iterations:06d}/state.safetensors"
    left, right = load_file(one / name), load_file(other / name)
    assert left.keys() == right.keys()
    different = [key for key in left if not torch.equal(left[key], right[key])]
    assert not different, different


if __name__ == "__main__":
    _train(*sys.argv[1:])
