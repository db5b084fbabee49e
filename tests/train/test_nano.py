"""The loop in one file, `examples/nano.py`, computes what the trainer does: with a loop, a loss and
an optimizer of its own it reproduces the golden run."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import golden_run
import pytest
import torch
from golden_run import NUM_ITERATIONS, SEED, RecordedEngine

from rl.api.engine import EngineSetup
from rl.api.plugin import PluginConfig
from rl.api.policy import LoraSection
from rl.judge.reply import read_scores
from tiny_world.data import write_shapes

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "nano.py"
MAX_LINES = 650
TRAINER = ("train", "rollout", "learner", "run", "record", "build", "algorithm")
"""What it must not import from `rl`: it would compare the trainer with itself."""
COMPARED = (
    "loss/total", "loss/policy", "loss/kl", "optimizer/grad_norm", "kl/reference_k3", "reward/mean"
)  # fmt: skip
RELATIVE, ABSOLUTE = 1e-3, 1e-5
"""Tolerances of a metric, those of `test_golden_run.py`; the absolute one is for losses that are 0
but for rounding."""
LOGPROB_TOL = 1e-3
"""Of any token's log-prob, nats."""


@pytest.fixture
def nano() -> ModuleType:
    spec = importlib.util.spec_from_file_location("nano", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where `dataclasses` looks up annotations
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_five_iterations_match_the_golden_run(
    nano: ModuleType, models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logprobs_PGT: list[torch.Tensor] = []
    forward = nano.forward

    def engine(settings: Any, policy: Any, device: str) -> RecordedEngine:
        return RecordedEngine(PluginConfig(), EngineSetup(policy, device))

    def noted_forward(*arguments: Any) -> Any:
        group = forward(*arguments)
        logprobs_PGT.append(group.logprobs.detach().clone())
        return group

    def answer(replies: Sequence[str], settings: Any, http: None, *parts: Any) -> Any:
        """Of the question about source and picture, or of that about the picture alone."""
        return read_scores(replies[3 - len(parts)], 2, 0, 10)

    def recorded_judge(settings: Any, edits: Sequence[Any]) -> None:
        for edit in edits:
            replies = golden_run.recorded()["replies"][edit.words]
            monkeypatch.setattr(nano, "ask", partial(answer, replies))
            edit.reward = nano.viescore(settings, None, edit)

    monkeypatch.setattr(nano, "load_engine", engine)
    monkeypatch.setattr(nano, "forward", noted_forward)
    monkeypatch.setattr(nano, "judge", recorded_judge)
    monkeypatch.setattr(nano, "LoraSection", partial(LoraSection, init_seed=0))  # the golden run's
    settings = nano.Settings(
        data=str(write_shapes.write(tmp_path, num_samples=20, seed=1)),
        seed=SEED,
        iterations=NUM_ITERATIONS,
        prompts=2,
        group=4,
        policy=models["policy"],
        text_encoder="",
        dtype="float32",
        lora_rank=4,
        max_tokens=6,
        editor=models["editor"],
        steps=2,
        side_px=64,
        kl=0.05,
        learning_rate=1e-2,
        adam_eps=1e-3,
    )
    rows = list(nano.train(settings))

    recorded = golden_run.recorded()
    for row, expected in zip(rows, recorded["metrics"], strict=True):
        for name in COMPARED:
            value = pytest.approx(expected[name], rel=RELATIVE, abs=ABSOLUTE)
            assert row[name] == value, (name, row["iteration"])
    recorded_PGT = [[nats for _, nats in group] for group in recorded["completions"].values()]
    for logprobs_GT, nats_GT in zip(logprobs_PGT, recorded_PGT, strict=True):
        torch.testing.assert_close(logprobs_GT, torch.tensor(nats_GT), rtol=0, atol=LOGPROB_TOL)


def test_it_is_one_short_file_with_a_loop_of_its_own() -> None:
    text = FILE.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_LINES
    nodes = list(ast.walk(ast.parse(text)))
    modules = [f"{n.module}.{n.names[0].name}" for n in nodes if isinstance(n, ast.ImportFrom)]
    names = [alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names]
    ours = [module.split(".")[1] for module in modules if module.startswith("rl.")]
    assert {"engines", "policies", "renderers"} <= set(ours) and not set(ours) & set(TRAINER)
    assert not [name for name in names if name.split(".")[0] == "rl"]


@pytest.mark.slow
def test_the_command_for_a_laptop_trains_and_saves_an_adapter(tmp_path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(FILE.read_text(encoding="utf-8"))) or ""
    [command] = re.findall(r"On a laptop.*?:\n\n(.*?)\n\n", docstring, re.S)
    for folder in ("examples", "tiny_world"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    script = (
        f"{command} --iterations 2 --prompts 2 --save adapter\nstatus=$?\nkill $!\nexit $status"
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    lines = done.stdout.split("\n")
    assert [line.split()[0] for line in lines if line] == ["1/2", "2/2"], done.stdout
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file()
