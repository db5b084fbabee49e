"""The loop in one file, `examples/nano.py`, computes what the trainer does: with a loop, a loss and
an optimizer of its own it reproduces the golden run."""

from __future__ import annotations

import ast
import importlib
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
from tiny_config import REPO
from tiny_loop import environment

from rl.algorithm.grpo import group_advantages, objective
from rl.api.engine import EngineSetup
from rl.api.loss import Denominators
from rl.api.plugin import PluginConfig
from rl.api.policy import LoraSection
from rl.api.types import Completion, TrainSequence
from rl.config.schema import AlgorithmConfig
from rl.judge.reply import read_scores
from rl.learner.learner import learning_rate
from rl.learner.train_step import loss_inputs
from tiny_world.data import write_shapes

FILE = REPO / "examples" / "nano.py"
MAX_LINES = 650
TRAINER = ("train", "rollout", "learner", "run", "record", "build", "algorithm")
"""What it must not import from `rl`: it would compare the trainer with itself."""
COMPARED = (
    "loss/total", "loss/policy", "loss/kl", "optimizer/grad_norm", "kl/reference_k3", "reward/mean"
)  # fmt: skip
LOGPROB_TOL = 1e-3
"""Of any token's log-prob, nats."""


@pytest.fixture
def nano(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FILE.parent)
    return importlib.import_module("nano")


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
        prompts_per_iteration=2,
        group_size=4,
        policy=models["policy"],
        text_encoder="",
        dtype="float32",
        lora_rank=4,
        max_tokens=6,
        editor=models["editor"],
        denoising_steps=2,
        side_px=64,
        kl_coeff=0.05,
        learning_rate=1e-2,
        adam_eps=1e-3,
    )
    golden_run.assert_recorded(list(nano.train(settings)), COMPARED)
    completions = golden_run.recorded()["completions"].values()
    recorded_PGT = [[nats for _, nats in group] for group in completions]
    for logprobs_GT, nats_GT in zip(logprobs_PGT, recorded_PGT, strict=True):
        torch.testing.assert_close(logprobs_GT, torch.tensor(nats_GT), rtol=0, atol=LOGPROB_TOL)


def test_a_step_of_uneven_groups_has_the_trainers_loss_and_gradient(nano: ModuleType) -> None:
    """Completions of different lengths, one ungraded, one failed, a group with equal rewards, and
    log-probs of the engine that are far from the trainer's."""
    rewards_PG = [[0.1, None, 0.7, 0.0], [0.5, 0.5, 0.5, 0.5], [0.9, 0.2, 0.2, 0.4]]
    lengths_PG = [[3, 5, 1, 2], [4, 4, 2, 1], [7, 1, 3, 2]]
    settings = nano.Settings(kl_coeff=0.3)
    config = AlgorithmConfig(kl_coeff=settings.kl_coeff)
    groups_P, logprobs_P, reference_P, sequences_PG = [], [], [], []
    for rewards_G, lengths_G in zip(rewards_PG, lengths_PG, strict=True):
        is_token_GT = torch.arange(max(lengths_G)) < torch.tensor(lengths_G)[:, None]
        logprobs_GT, sampler_GT, reference_GT = (
            -3 * torch.rand(is_token_GT.shape) * is_token_GT for _ in range(3)
        )
        logprobs_P.append(logprobs_GT.requires_grad_())
        reference_P.append(reference_GT)
        nats_G = [row[:n] for row, n in zip(sampler_GT.tolist(), lengths_G, strict=True)]
        completions = [Completion((1,) * len(nats), tuple(nats), "stop") for nats in nats_G]
        edits = [nano.Edit(None, "", None, 0, None, reward) for reward in rewards_G]
        groups_P.append(nano.Group(completions, edits, None, logprobs_GT, sampler_GT))
        advantages_G = group_advantages(rewards_G, "group_std", 1e-4)
        sequences_PG.append(
            [
                None if a is None else TrainSequence((True,) * len(nats), a, tuple(nats))
                for a, nats in zip(advantages_G, nats_G, strict=True)
            ]
        )
    # The first and the last group count: 3 + 1 + 2 tokens that are graded, and 7 + 1 + 3 + 2.
    denominators = Denominators(
        num_tokens=19, num_sequences=7, num_completions=0, max_completion_tokens=0
    )
    expected = torch.zeros(())
    for sequences_G, logprobs_GT, reference_GT in zip(
        sequences_PG, logprobs_P, reference_P, strict=True
    ):
        inputs = loss_inputs(config, sequences_G, logprobs_GT, None, denominators)
        masked_GT = reference_GT.masked_fill(~inputs.mask, 0.0)
        expected = expected + objective(config, inputs, masked_GT).total
    gradients = torch.autograd.grad(expected, logprobs_P)

    advantages_PG = [nano.advantages(rewards_G, settings.advantage_eps) for rewards_G in rewards_PG]
    total = torch.zeros(())
    for group, advantages_G, reference_GT in zip(groups_P, advantages_PG, reference_P, strict=True):
        policy_loss, kl = nano.loss_sums(settings, group, advantages_G, reference_GT)
        total = total + policy_loss + settings.kl_coeff * kl
    total = total / nano.loss_denominator(groups_P, advantages_PG)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(torch.autograd.grad(total, logprobs_P), gradients)


@pytest.mark.parametrize("iteration", range(7))
def test_the_learning_rate_is_the_trainers(nano: ModuleType, iteration: int) -> None:
    settings = nano.Settings(iterations=7, learning_rate=0.1, warmup=3, final_lr_ratio=0.2)
    assert nano.learning_rate(settings, iteration) == pytest.approx(
        learning_rate(iteration, 7, 0.1, 3, 0.2)
    )


def test_it_is_one_short_file_with_a_loop_of_its_own() -> None:
    text = FILE.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_LINES
    nodes = list(ast.walk(ast.parse(text)))
    modules = [f"{n.module}.{n.names[0].name}" for n in nodes if isinstance(n, ast.ImportFrom)]
    modules += [alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names]
    ours = {f"{module}.".split(".")[1] for module in modules if module.split(".")[0] == "rl"}
    assert {"engines", "policies", "renderers"} <= ours and not ours & {*TRAINER, ""}


@pytest.mark.slow
def test_the_command_for_a_laptop_trains_and_saves_an_adapter(tmp_path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(FILE.read_text(encoding="utf-8"))) or ""
    [command] = re.findall(r"On a laptop.*?:\n\n(.*?)\n\n", docstring, re.S)
    for folder in ("examples", "tiny_world"):
        (tmp_path / folder).symlink_to(REPO / folder)
    script = f"{command} --iterations 2 --prompts-per-iteration 2 --save adapter\n"
    script += "status=$?\nkill $!\nexit $status"
    done = subprocess.run(
        ["bash", "-c", script],
        env=environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["1/2", "2/2"], done.stdout
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file()
