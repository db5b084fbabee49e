"""The backends' seam on a toy module: what `step` is told, graphs kept, ranks out of step.

Everything is held against plain torch, where autograd and a hand-written step leave no doubt.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import tiny_qwen
import torch
from tiny_ranks import run_ranks
from tiny_rounding import PRODUCT, STEPPED
from torch import nn
from torch.utils.checkpoint import checkpoint

from rl.config.schema import OptimizerConfig
from rl.learner import deepspeed
from rl.learner.backends import Backend, TorchBackend, make_adamw
from rl.learner.deepspeed import DeepSpeedBackend
from rl.ranks.dist import Dist

STAGES = (1, 2, 3)
SCALE = 0.37
"""Planned over real denominator; no power of two, so that every order of rounding shows."""
RATE, CLIP = 1e-2, 5.0
"""The three steps' norms lie on both sides of the clip."""


@dataclass
class Outputs:
    logprobs: torch.Tensor


class Block(nn.Module):
    """A frozen matrix in the middle, as under LoRA."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.frozen, self.trained = nn.Linear(width, width), nn.Linear(width, width)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.trained(torch.tanh(self.frozen(x)))


class Toy(nn.Module):
    """Takes [B, 8] for a batch; recomputes its blocks in the backward if told to."""

    def __init__(self, full: bool, recomputes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recomputes = recomputes
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 5)
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        if full:
            self.requires_grad_(True).bfloat16()

    def forward(self, batch: torch.Tensor) -> Outputs:
        x = self.first(batch.to(self.first.weight.dtype))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return Outputs(self.head(x).float().log_softmax(-1))


class Words(nn.Module):
    """Takes [B] int64 ids for a batch. Its head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.norm = nn.Embedding(8, 6), nn.LayerNorm(6)
        self.linear, self.head = nn.Linear(6, 6), nn.Linear(6, 8, bias=False)
        self.head.weight = self.words.weight

    def forward(self, batch: torch.Tensor) -> Outputs:
        x = self.linear(self.norm(self.words(batch)))
        return Outputs(self.head(x).log_softmax(-1))


def make_backend(
    stage: int | None,
    dist: Dist | None = None,
    full: bool = False,
    recomputes: bool = False,
    module: nn.Module | None = None,
    weight_decay: float = 0.0,
) -> Backend:
    """`stage` None: plain torch."""
    deepspeed.PERSISTENCE_THRESHOLD_NUMEL = 0
    module, dist = module or Toy(full, recomputes), dist or Dist()
    config = OptimizerConfig(
        zero_stage=stage or 0, adam_eps=1e-4, max_grad_norm=CLIP, weight_decay=weight_decay
    )
    if stage is None:
        return TorchBackend(module, config, dist)
    return DeepSpeedBackend(module, config, dist)


@pytest.fixture(autouse=True)
def threshold() -> Iterator[None]:
    """`make_backend` lowers it, in fresh ranks too: ZeRO-3 would leave so small a model whole."""
    default = deepspeed.PERSISTENCE_THRESHOLD_NUMEL
    yield
    deepspeed.PERSISTENCE_THRESHOLD_NUMEL = default


def loss_of(backend: Backend, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    batch: Any = torch.randn(3 + seed % 3, 8, generator=generator)
    return -backend.forward(batch).logprobs[:, seed % 5].sum()


def weights(backend: Backend) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.masters().items()}


def difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)


def plain(
    seeds_by_step: Sequence[Sequence[int]], weight_decay: float = 0.0
) -> tuple[dict[str, Any], list[float]]:
    """Every loss scaled itself, one at a time, on one process: (weights, norms)."""
    backend, norms = make_backend(None, weight_decay=weight_decay), []
    for seeds in seeds_by_step:
        for seed in seeds:
            backend.backward(loss_of(backend, seed) * SCALE)
        norms.append(backend.step(RATE, 1.0).grad_norm)
    return weights(backend), norms


STEPS = ((0, 1, 2), (3, 4), (5, 6, 7))


def test_plain_torch_steps_as_written_by_hand() -> None:
    """The reference of all others: clip, then AdamW, of the scaled sum."""
    module = Toy(full=False, recomputes=False)
    trained = [p for p in module.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.0)
    backend = make_backend(None)
    norms = []
    for seeds in STEPS:
        losses = []
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            batch = torch.randn(3 + seed % 3, 8, generator=generator)
            losses.append(-module(batch).logprobs[:, seed % 5].sum())
            backend.backward(loss_of(backend, seed))
        (SCALE * torch.stack(losses).sum()).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, CLIP)))
        adamw.step()
        adamw.zero_grad()
        assert backend.step(RATE, SCALE).grad_norm == pytest.approx(norms[-1], rel=PRODUCT)
    assert min(norms) < CLIP < max(norms), norms
    by_hand = {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}
    assert difference(weights(backend), by_hand) <= STEPPED


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("recomputes", [False, True])
def test_graphs_are_kept_and_the_gradient_is_scaled(stage: int, recomputes: bool) -> None:
    """All forwards first, one without a graph among them, then the backwards from the last."""
    backend = make_backend(stage, recomputes=recomputes)
    assert backend.keeps_graphs == (stage < 3) and not backend.in_step
    expected, expected_norms = plain(STEPS)
    norms = []
    for seeds in STEPS:
        losses = [loss_of(backend, seed) for seed in seeds]
        with torch.no_grad():
            loss_of(backend, 99)
        for loss in reversed(losses):
            backend.backward(loss)
        norms.append(backend.step(RATE, SCALE).grad_norm)
    assert norms == pytest.approx(expected_norms, rel=PRODUCT)
    assert difference(weights(backend), expected) <= STEPPED


@pytest.mark.parametrize("stage", [None, 2, 3])
def test_the_gradient_of_a_full_fine_tune_is_scaled(stage: int | None) -> None:
    """bfloat16 weights, float32 masters: the scale acts on the float32 sum, where it loses nothing.
    Scaling the loss by a power of two instead loses nothing either."""
    backend, reference = make_backend(stage, full=True), make_backend(None, full=True)
    for seeds in STEPS:
        for seed in seeds:
            backend.backward(loss_of(backend, seed))
            reference.backward(loss_of(reference, seed) * 0.25)
        ours, theirs = backend.step(RATE, 0.25), reference.step(RATE, 1.0)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-2)
    assert {tensor.dtype for tensor in backend.masters().values()} == {torch.float32}
    assert difference(weights(backend), weights(reference)) <= STEPPED


@pytest.mark.parametrize("stage", [None, *STAGES])
def test_a_gradient_that_is_not_finite_leaves_no_scale_behind(stage: int | None) -> None:
    backend = make_backend(stage)
    before = weights(backend)
    backend.backward(loss_of(backend, 0) * float("inf"))
    assert not backend.step(RATE, SCALE).applied
    assert difference(weights(backend), before) == 0
    for seed in STEPS[0]:
        backend.backward(loss_of(backend, seed) * SCALE)
    assert backend.step(RATE, 1.0).applied
    assert difference(weights(backend), plain(STEPS[:1])[0]) <= STEPPED


def loss_of_words(backend: Backend, scale: float) -> torch.Tensor:
    ids: Any = torch.tensor([1, 2, 5])
    return -scale * backend.forward(ids).logprobs[:, 3].sum()


@pytest.mark.parametrize("stage", [None, *STAGES])
def test_weight_decay_is_of_matrices_alone(stage: int | None) -> None:
    """Where no gradient moves anything: a matrix shrinks by rate x decay, the rest stays, bit for
    bit. An embedding's head is the embedding."""
    backend = make_backend(stage, module=Words(), weight_decay=0.1)
    before = weights(backend)
    backend.backward(loss_of_words(backend, 0.0))
    assert backend.step(RATE, 1.0).applied
    after = weights(backend)
    assert {n for n in after if not torch.equal(after[n], before[n])} == {"linear.weight"}
    shrunk = before["linear.weight"] * (1 - RATE * 0.1)
    assert torch.allclose(after["linear.weight"], shrunk, rtol=PRODUCT, atol=0)


@pytest.mark.parametrize("stage", [None, *STAGES])
def test_what_decays_is_no_part_of_the_state(stage: int | None) -> None:
    """It goes on bit for bit, and in a run that decays nothing."""
    backends = [make_backend(stage, module=Words(), weight_decay=0.1) for _ in range(2)]
    backends.append(make_backend(None, module=Words()))
    first, again, without = backends
    first.backward(loss_of_words(first, 1.0))
    first.step(RATE, 1.0)
    state = first.state(keep=True)
    for other in (again, without):
        other.load(state, num_steps=1)
        assert difference(weights(other), weights(first)) == 0
    for backend in backends:
        backend.backward(loss_of_words(backend, -1.0))
        backend.step(RATE, 1.0)
    assert difference(weights(again), weights(first)) == 0
    apart = {
        n for n, w in weights(without).items() if (w - weights(first)[n]).abs().max() > STEPPED
    }
    assert apart == {"linear.weight"}


@pytest.mark.parametrize("tied", [False, True])
def test_of_a_real_model_linear_layers_decay(tied: bool) -> None:
    model = tiny_qwen.make_model(tiny_qwen.make_tokenizer(), tied=tied)
    named = dict(model.named_parameters())
    adamw = make_adamw(model, named, OptimizerConfig(weight_decay=0.1))
    decay = {id(p): group["weight_decay"] for group in adamw.param_groups for p in group["params"]}
    decaying = {name for name, parameter in named.items() if decay[id(parameter)]}
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv3d)}
    matrices = {f"{name}.weight" for name in layers} - ({"lm_head.weight"} if tied else set())
    assert decaying == matrices and {decay[id(named[n])] for n in named} == {0.0, 0.1}


# --- two ranks --------------------------------------------------------------------------------

DECAY = 0.5
IN_STEP = {None: False, 1: False, 2: True, 3: True}
BY_RANK = (((0, 1), (2,)), ((3,), (4,)), ((5, 6, 7), ()))
"""Seeds by step and rank; a rank out of step has fewer backwards, in the last step none."""


def count_bytes() -> Counter[str]:
    """Counts what passes through torch's collectives from now on, before DeepSpeed takes them."""
    moved: Counter[str] = Counter()

    def counted(collective: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = next(v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor))
            moved["bytes"] += tensor.numel() * tensor.element_size()
            return collective(*args, **kwargs)

        return call

    for name in ("all_reduce", "reduce", "broadcast", "all_gather_into_tensor"):
        setattr(torch.distributed, name, counted(getattr(torch.distributed, name)))
    return moved


def step_on_two_ranks() -> dict[Any, Any]:
    os.environ["DS_ACCELERATOR"] = "cpu"
    torch.set_num_threads(1)
    moved, dist, found = count_bytes(), Dist.from_env("cpu"), {}
    for stage in (None, *STAGES):
        backend = make_backend(stage, dist, weight_decay=DECAY)
        assert backend.in_step == IN_STEP[stage]
        norms = []
        for seeds_by_rank in BY_RANK:
            losses = [loss_of(backend, seed) for seed in seeds_by_rank[dist.rank]]
            most = max(map(len, seeds_by_rank))
            if backend.in_step:
                losses += [loss_of(backend, 99) * 0 for _ in range(most - len(losses))]
            for loss in reversed(losses):
                backend.backward(loss)
            moved.clear()
            norms.append(backend.step(RATE, SCALE).grad_norm)
        arrays = {name: tensor.numpy() for name, tensor in weights(backend).items()}
        num_bytes = moved["bytes"]
        # Every rank gathers the state, and a fresh backend goes on from it bit for bit.
        state, kept = backend.state(keep=True), backend.state(keep=dist.is_main)
        assert kept.keys() == (state.keys() if dist.is_main else set())
        again = make_backend(stage, dist, weight_decay=DECAY)
        again.load(state, num_steps=len(BY_RANK))
        for one in (backend, again):
            one.backward(loss_of(one, 8 + dist.rank))
            one.step(RATE, SCALE)
        assert difference(weights(again), weights(backend)) == 0
        state = {name: tensor.numpy() for name, tensor in state.items()}
        found[stage] = (arrays, norms, num_bytes, state)
    return found


@pytest.mark.slow
def test_two_ranks_out_of_step_and_in_step() -> None:
    """The same numbers as one process, of weights that decay and others, which continues from the
    state of two; where ranks need not be in step, one reduction a step."""
    ranks = run_ranks(step_on_two_ranks, 2)
    seeds_by_step = [[s for seeds in ranks for s in seeds] for ranks in BY_RANK]
    expected, expected_norms = plain(seeds_by_step, DECAY)
    trained_bytes = 4 * sum(tensor.numel() for tensor in expected.values())
    for stage, (arrays, norms, moved, state) in ranks[0].items():
        found, other = (
            {name: torch.from_numpy(array) for name, array in weights_of_rank.items()}
            for weights_of_rank in (arrays, ranks[1][stage][0])
        )
        assert difference(found, other) == 0
        assert difference(found, expected) <= STEPPED
        assert norms == pytest.approx(expected_norms, rel=PRODUCT)
        alone = make_backend(None, weight_decay=DECAY)
        alone.load({name: torch.from_numpy(array) for name, array in state.items()}, len(BY_RANK))
        assert difference(weights(alone), found) == 0
        if not IN_STEP[stage]:
            assert trained_bytes <= moved <= 2.1 * trained_bytes, stage
