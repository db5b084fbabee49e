"""Torch and DeepSpeed backends on a toy module: scaling, kept graphs, weight decay, two ranks."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import tiny_qwen
import torch
from tiny_learner import run_ranks
from tiny_rounding import PRODUCT_TOL, WEIGHT_TOL
from torch import nn
from torch.utils.checkpoint import checkpoint

from rl.config.schema import OptimizerConfig
from rl.learner import backends as deepspeed
from rl.learner.backends import Backend, DeepSpeedBackend, TorchBackend, make_adamw
from rl.ranks.dist import Dist

STAGES = (1, 2, 3)
MARKED = (1, 2, pytest.param(3, marks=pytest.mark.slow))
SCALE = 0.37
"""The `gradient_scale` of every step; not a power of two, so that it rounds."""
RATE, CLIP = 1e-2, 5.0
"""The gradient norms of the three steps are on both sides of `CLIP`."""


@dataclass
class Outputs:
    logprobs: torch.Tensor


class Block(nn.Module):
    """A frozen layer before a trained one, as with LoRA."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.frozen, self.trained = nn.Linear(width, width), nn.Linear(width, width)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.trained(torch.tanh(self.frozen(x)))


class Toy(nn.Module):
    """Maps a batch [B, 8] to log-probs; `recomputes`: blocks are recomputed in the backward."""

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


class TiedModel(nn.Module):
    """Maps token ids [B] (int64) to log-probs; head and embedding share their weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm = nn.Embedding(8, 6), nn.LayerNorm(6)
        self.linear, self.head = nn.Linear(6, 6), nn.Linear(6, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, batch: torch.Tensor) -> Outputs:
        x = self.linear(self.norm(self.embedding(batch)))
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
def threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores the threshold that `make_backend` lowers so that ZeRO-3 shards the toy model."""
    monkeypatch.setattr(deepspeed, "PERSISTENCE_THRESHOLD_NUMEL", 0)


def batch_of(seed: int) -> Any:
    return torch.randn(3 + seed % 3, 8, generator=torch.Generator().manual_seed(seed))


def loss_of(backend: Backend, seed: int) -> torch.Tensor:
    return -backend.forward(batch_of(seed)).logprobs[:, seed % 5].sum()


def weights(backend: Backend) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.masters().items()}


def difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)


def reference_run(
    seeds_by_step: Sequence[Sequence[int]], weight_decay: float = 0.0
) -> tuple[dict[str, Any], list[float]]:
    """(weights, norms) of one process that scales each loss instead of the gradient."""
    backend, norms = make_backend(None, weight_decay=weight_decay), []
    for seeds in seeds_by_step:
        for seed in seeds:
            backend.backward(loss_of(backend, seed) * SCALE)
        norms.append(backend.step(RATE, 1.0).grad_norm)
    return weights(backend), norms


STEPS = ((0, 1, 2), (3, 4), (5, 6, 7))


def test_plain_torch_equals_a_hand_written_step() -> None:
    """The reference for the other tests: scale the sum, clip, then AdamW."""
    module = Toy(full=False, recomputes=False)
    trained = [p for p in module.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.0)
    backend = make_backend(None)
    norms = []
    for seeds in STEPS:
        losses = []
        for seed in seeds:
            losses.append(-module(batch_of(seed)).logprobs[:, seed % 5].sum())
            backend.backward(loss_of(backend, seed))
        (SCALE * torch.stack(losses).sum()).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, CLIP)))
        adamw.step()
        adamw.zero_grad()
        assert backend.step(RATE, SCALE).grad_norm == pytest.approx(norms[-1], rel=PRODUCT_TOL)
    assert min(norms) < CLIP < max(norms), norms
    by_hand = {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}
    assert difference(weights(backend), by_hand) <= WEIGHT_TOL


@pytest.mark.parametrize("stage", MARKED)
@pytest.mark.parametrize("recomputes", [False, True])
def test_graphs_are_kept_and_the_gradient_is_scaled(stage: int, recomputes: bool) -> None:
    """All forwards come first, one of them without a graph; then the backwards in reverse order."""
    backend = make_backend(stage, recomputes=recomputes)
    assert backend.keeps_graphs == (stage < 3) and not backend.lockstep
    expected, expected_norms = reference_run(STEPS)
    norms = []
    for seeds in STEPS:
        losses = [loss_of(backend, seed) for seed in seeds]
        with torch.no_grad():
            loss_of(backend, 99)
        for loss in reversed(losses):
            backend.backward(loss)
        norms.append(backend.step(RATE, SCALE).grad_norm)
    assert norms == pytest.approx(expected_norms, rel=PRODUCT_TOL)
    assert difference(weights(backend), expected) <= WEIGHT_TOL


@pytest.mark.parametrize("stage", [None, 2, 3])
def test_the_gradient_of_a_full_fine_tune_is_scaled(stage: int | None) -> None:
    """Weights are bfloat16, masters float32: the scale is applied to the float32 sum, exactly.
    Scaling the loss by a power of two instead is exact, too."""
    backend, reference = make_backend(stage, full=True), make_backend(None, full=True)
    for seeds in STEPS:
        for seed in seeds:
            backend.backward(loss_of(backend, seed))
            reference.backward(loss_of(reference, seed) * 0.25)
        ours, theirs = backend.step(RATE, 0.25), reference.step(RATE, 1.0)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-2)
    assert {tensor.dtype for tensor in backend.masters().values()} == {torch.float32}
    assert difference(weights(backend), weights(reference)) <= WEIGHT_TOL


@pytest.mark.parametrize("stage", [None, *MARKED])
def test_a_step_skipped_for_an_infinite_gradient_leaves_no_trace(stage: int | None) -> None:
    backend = make_backend(stage)
    before = weights(backend)
    backend.backward(loss_of(backend, 0) * float("inf"))
    assert not backend.step(RATE, SCALE).applied
    assert difference(weights(backend), before) == 0
    for seed in STEPS[0]:
        backend.backward(loss_of(backend, seed) * SCALE)
    assert backend.step(RATE, 1.0).applied
    assert difference(weights(backend), reference_run(STEPS[:1])[0]) <= WEIGHT_TOL


def tied_loss(backend: Backend, scale: float) -> torch.Tensor:
    ids: Any = torch.tensor([1, 2, 5])
    return -scale * backend.forward(ids).logprobs[:, 3].sum()


@pytest.mark.parametrize("stage", [None, *MARKED])
def test_weight_decay_applies_to_matrices_of_linear_layers_only(stage: int | None) -> None:
    """With zero gradients, the linear layer's matrix shrinks by rate x decay; everything else stays
    equal bit for bit, also the head that shares the embedding's weight."""
    backend = make_backend(stage, module=TiedModel(), weight_decay=0.1)
    before = weights(backend)
    backend.backward(tied_loss(backend, 0.0))
    assert backend.step(RATE, 1.0).applied
    after = weights(backend)
    assert {n for n in after if not torch.equal(after[n], before[n])} == {"linear.weight"}
    shrunk = before["linear.weight"] * (1 - RATE * 0.1)
    assert torch.allclose(after["linear.weight"], shrunk, rtol=PRODUCT_TOL, atol=0)


@pytest.mark.parametrize("stage", [None, *MARKED])
def test_weight_decay_is_not_part_of_the_state(stage: int | None) -> None:
    """A loaded state continues bit for bit, and can be loaded with or without weight decay."""
    backends = [make_backend(stage, module=TiedModel(), weight_decay=0.1) for _ in range(2)]
    backends.append(make_backend(None, module=TiedModel()))
    first, again, without = backends
    first.backward(tied_loss(first, 1.0))
    first.step(RATE, 1.0)
    state = first.state(keep=True)
    for other in (again, without):
        other.load(state, num_steps=1)
        assert difference(weights(other), weights(first)) == 0
    for backend in backends:
        backend.backward(tied_loss(backend, -1.0))
        backend.step(RATE, 1.0)
    assert difference(weights(again), weights(first)) == 0
    differing = {
        n for n, w in weights(without).items() if (w - weights(first)[n]).abs().max() > WEIGHT_TOL
    }
    assert differing == {"linear.weight"}


@pytest.mark.parametrize("tied", [False, True])
def test_weight_decay_applies_to_the_linear_layers_of_a_real_model(tied: bool) -> None:
    model = tiny_qwen.make_model(tiny_qwen.make_tokenizer(), tied=tied)
    parameters = dict(model.named_parameters())
    adamw = make_adamw(model, parameters, OptimizerConfig(weight_decay=0.1))
    decay = {id(p): group["weight_decay"] for group in adamw.param_groups for p in group["params"]}
    decaying = {name for name, parameter in parameters.items() if decay[id(parameter)]}
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv3d)}
    matrices = {f"{name}.weight" for name in layers} - ({"lm_head.weight"} if tied else set())
    assert decaying == matrices and {decay[id(parameters[n])] for n in parameters} == {0.0, 0.1}


# --- two ranks --------------------------------------------------------------------------------

DECAY = 0.5
LOCKSTEP = {None: False, 1: False, 2: True, 3: True}
BY_RANK = (((0, 1), (2,)), ((3,), (4,)), ((5, 6, 7), ()))
"""Seeds by step and rank; ranks have different numbers of backwards, in the last step 3 and 0."""


def count_bytes() -> Counter[str]:
    """Counts the bytes of torch's collectives; to be called before DeepSpeed binds them."""
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


def step_on_two_ranks(dist: Dist) -> dict[Any, Any]:
    moved, results = count_bytes(), {}
    for stage in (None, *STAGES):
        backend = make_backend(stage, dist, weight_decay=DECAY)
        assert backend.lockstep == LOCKSTEP[stage]
        norms = []
        for seeds_by_rank in BY_RANK:
            losses = [loss_of(backend, seed) for seed in seeds_by_rank[dist.rank]]
            max_backwards = max(map(len, seeds_by_rank))
            if backend.lockstep:
                losses += [loss_of(backend, 99) * 0 for _ in range(max_backwards - len(losses))]
            for loss in reversed(losses):
                backend.backward(loss)
            moved.clear()
            norms.append(backend.step(RATE, SCALE).grad_norm)
        trained, num_bytes = weights(backend), moved["bytes"]
        # Every rank gathers the state, and a fresh backend continues from it bit for bit.
        state, kept = backend.state(keep=True), backend.state(keep=dist.is_main)
        assert kept.keys() == (state.keys() if dist.is_main else set())
        again = make_backend(stage, dist, weight_decay=DECAY)
        again.load(state, num_steps=len(BY_RANK))
        for one in (backend, again):
            one.backward(loss_of(one, 8 + dist.rank))
            one.step(RATE, SCALE)
        assert difference(weights(again), weights(backend)) == 0
        results[stage] = (trained, norms, num_bytes, state)
    return results


@pytest.mark.slow
def test_two_ranks_equal_one_process_in_step_or_not(tmp_path: Path) -> None:
    """Two ranks give the numbers of one process, with weight decay, and one process can load their
    state; a backend whose ranks may be out of step needs one reduction per step."""
    ranks = run_ranks(step_on_two_ranks, 2, tmp_path)
    seeds_by_step = [[s for seeds in ranks for s in seeds] for ranks in BY_RANK]
    expected, expected_norms = reference_run(seeds_by_step, DECAY)
    trained_bytes = 4 * sum(tensor.numel() for tensor in expected.values())
    for stage, (ours, norms, moved, state) in ranks[0].items():
        assert difference(ours, ranks[1][stage][0]) == 0
        assert difference(ours, expected) <= WEIGHT_TOL
        assert norms == pytest.approx(expected_norms, rel=PRODUCT_TOL)
        alone = make_backend(None, weight_decay=DECAY)
        alone.load(state, len(BY_RANK))
        assert difference(weights(alone), ours) == 0
        if not LOCKSTEP[stage]:
            assert trained_bytes <= moved <= 2.1 * trained_bytes, stage


def test_deepspeed_uses_the_gpu_of_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that CUDA_VISIBLE_DEVICES names by its UUID. Faked: the driver."""
    from deepspeed.accelerator import cuda_accelerator, real_accelerator

    deepspeed._import_deepspeed(Dist())  # joins a group
    accelerator = cuda_accelerator.CUDA_Accelerator()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-0,GPU-1")
    monkeypatch.setattr(cuda_accelerator, "pynvml", Mock())
    monkeypatch.setattr(real_accelerator, "ds_accelerator", accelerator)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (7, 80))
    deepspeed._import_deepspeed(Dist(device="cuda:1"))
    assert (os.environ["LOCAL_RANK"], accelerator.available_memory()) == ("1", 7)
