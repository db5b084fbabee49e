"""Stage drift: imitates how training changes the policy, so that the frozen editor stays usable.

The editor reads the policy's hidden states, and reinforcement learning changes these with a LoRA.
An editor trained only on the warm start fails on a drifted policy: better words give worse
pictures. So the editor is trained on many drifted policies: short LoRA fine-tunings towards right
and towards wrong answers, added with random strength, plus a little low-rank noise.

All of them start from `policy_doubting`, the policy before its last lesson ("settle"). For the
editor that lesson is one more drift: it draws right descriptions equally well before and after.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tiny_world.builder.models import load_policy
from tiny_world.builder.policy import random_op
from tiny_world.builder.reader import Reader
from tiny_world.builder.training import WEIGHTS
from tiny_world.scenes import (
    COLOURS,
    Op,
    Scene,
    Task,
    describe,
    draw_array,
    make_instruction,
    make_scene,
)

Deltas = dict[str, torch.Tensor]
Answer = Callable[[Scene, Task], Op]
Examples = tuple[Sequence, Sequence[str], Sequence[str]]
"""(pictures, instructions, descriptions)"""
LORA_TARGETS = r".*language_model.*(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
NUM_TUNINGS, STEPS, SNAPSHOTS = 8, 50, (20, 50)


def build(work: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS / "policy")  # nosec B615 # local
    save_bank(
        work / "drift.safetensors",
        lambda: load_policy(work / "policy_doubting"),
        lambda policy: Reader(policy, tokenizer),
        _examples,
    )


def save_bank(
    file: Path,
    load: Callable[[], torch.nn.Module],
    reader_of: Callable[[torch.nn.Module], Reader],
    examples: Callable[[random.Random, Answer, int], Examples],
    num_tunings: int = NUM_TUNINGS,
    batch: int = 24,
) -> None:
    """`examples(rng, answer, batch)`: the batch of one step of a fine-tuning towards `answer`."""
    bank: Deltas = {}
    for k in range(num_tunings):
        for i, deltas in enumerate(_tune(load(), reader_of, examples, k, batch)):
            bank |= {f"{k}.{i}.{name}": delta.contiguous() for name, delta in deltas.items()}
    save_file(bank, file)


def load_bank(file: Path) -> list[Deltas]:
    bank: dict[str, Deltas] = {}
    for key, delta in load_file(file).items():
        k, i, name = key.split(".", 2)
        bank.setdefault(f"{k}.{i}", {})[name] = delta
    return list(bank.values())


class Drifter:
    """Adds random drifts to a policy's weights, and restores them."""

    def __init__(self, policy, bank: list[Deltas]) -> None:
        self.weights = {n: p for n, p in policy.named_parameters() if n in bank[0]}
        self.base = {n: p.clone() for n, p in self.weights.items()}
        self.bank = bank

    @torch.no_grad()
    def drift(self, rng: random.Random) -> None:
        steps = [(rng.choice(self.bank), 1.4 * rng.random())] if rng.random() < 0.7 else []
        if steps and rng.random() < 0.3:
            steps.append((rng.choice(self.bank), 0.8 * rng.random()))
        noise = 0.0 if rng.random() < 0.25 else 0.12 * rng.random()
        for name, weight in self.weights.items():
            base = self.base[name]
            low_rank = torch.randn(base.shape[0], 8) @ torch.randn(8, base.shape[1])
            drifted = base + low_rank * (noise * base.norm() / low_rank.norm())
            for deltas, strength in steps:
                drifted += strength * deltas[name]
            weight.copy_(drifted)

    @torch.no_grad()
    def restore(self) -> None:
        for name, weight in self.weights.items():
            weight.copy_(self.base[name])


def _examples(rng: random.Random, answer: Answer, batch: int) -> Examples:
    scenes = [make_scene(rng) for _ in range(batch)]
    tasks = [make_instruction(rng, scene) for scene in scenes]
    texts = [describe(answer(s, t), s) for s, t in zip(scenes, tasks, strict=True)]
    return [draw_array(scene) for scene in scenes], [task.instruction for task in tasks], texts


def _tune(policy, reader_of, examples, k: int, batch: int) -> list[Deltas]:
    """One short LoRA fine-tuning: towards right answers if `k` is even, else towards wrong ones."""
    torch.manual_seed(k)
    rng = random.Random(900 + k)
    config = LoraConfig(r=(8, 16)[k % 2], lora_alpha=16, target_modules=LORA_TARGETS)
    model = get_peft_model(policy, config)
    reader = reader_of(model.get_base_model())
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, (3e-3, 4e-3, 5e-3)[k % 3], betas=(0.9, 0.95))
    answer = (lambda scene, task: task.op) if k % 2 == 0 else _wrong_answer(rng)
    snapshots = []
    for step in range(1, STEPS + 1):
        reading = reader.read(*examples(rng, answer, batch))
        loss = reader.nll(reading).sum() / reading.written.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in SNAPSHOTS:
            snapshots.append(_deltas(model))
    print(f"drift {k}: loss {loss.item():.3f}", flush=True)
    return snapshots


def _wrong_answer(rng: random.Random) -> Answer:
    mapping = dict(zip(COLOURS, rng.sample(COLOURS, len(COLOURS)), strict=True))
    mapping[None] = rng.choice((None, *COLOURS))

    def answer(scene: Scene, task: Task) -> Op:
        if rng.random() < 0.1:
            return random_op(rng, scene)
        return Op(task.op.shape, mapping[task.op.paint])

    return answer


@torch.no_grad()
def _deltas(model) -> Deltas:
    return {
        name.removeprefix("base_model.model.") + ".weight": m.get_delta_weight("default").clone()
        for name, m in model.named_modules()
        if hasattr(m, "get_delta_weight")
    }
