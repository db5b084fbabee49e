"""Items 4 and 6: the policy side of one group at real size, ours packed, the peers' padded.

The peers run transformers' model with PEFT, a group's picture and prompt once per completion, in as
many passes as TRL and a reward function make. All completions have the same length, so their rows
need no padding and no mask.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch

from benchmarks.gpu_bench import Bench, Timing, cleared, synchronize
from benchmarks.gpu_models import make_group, make_policy, random_policy_model, run_config
from benchmarks.our_side import SAMPLER_LOGPROB
from rl.algorithm.attention_kernels import VARLEN, choose_kernel
from rl.api.types import Prompt, TrainSequence
from rl.learner.learner import Learner
from rl.meter.flops import prefix_tree_pairs
from rl.policies.qwen2_5_vl import Config as PolicyConfig
from rl.policies.shared.logprobs import token_logprobs
from rl.policies.shared.model_loading import adapt

NUM_ITERATIONS = 10**6
"""Of the run, which is never finished: the learning rate stays constant."""
VARIANTS: tuple[tuple[str, bool | str], ...] = (
    ("auto", False),
    ("auto", "mlp"),
    ("auto", True),
    ("sdpa", "mlp"),
)
"""(attention kernel, `optimizer.gradient_checkpointing`)."""
PEERS = {"TRL tuned's passes": (2, False), "TRL stock's passes": (3, True)}
"""(forwards without a gradient, whether the backward recomputes). The forwards are conditioning,
reference, and for stock the old log-probs."""
SHARE = 0.08
"""Share of the item's seconds for each of about twelve calls."""
LIMIT_S = 0.55
SYNC_LIMIT_MS = 20.0


def one_group(bench: Bench) -> None:
    """Item 4."""
    for number, side_px in enumerate(bench.size.policy_px):
        best: Ours | None = None
        for kernel, checkpointing in VARIANTS if number == 0 else VARIANTS[:2]:
            with cleared(bench.device):
                variant = _ours(bench, side_px, kernel, checkpointing)
            if best is None or variant.timing.ms < best.timing.ms:
                best = variant
        assert best is not None
        peers = {}
        for name in PEERS:
            with cleared(bench.device):
                peers[name] = _peer(bench, side_px, name, best)
        if number == 0:
            _goals(bench, best, peers)


def _goals(bench: Bench, best: Ours, peers: Mapping[str, Timing | None]) -> None:
    report = bench.report
    report.at_most("D5 policy side of a group", LIMIT_S, best.timing.ms / 1e3, "s")
    share = bench.floor_ms(best.floor) / best.timing.ms
    report.at_least("D5 policy side, share of the ceiling", 0.45, share)
    for (name, peer), limit in zip(peers.items(), (5, 10), strict=True):
        if peer is not None:
            report.at_least(f"D5 {name} over ours", limit, peer.ms / best.timing.ms, "x")


# Ours


@dataclass(frozen=True, eq=False)
class Ours:
    """A measured variant."""

    timing: Timing
    floor: float
    """Minimum of operations: training and the reference pass, without the vision tower."""
    prompt: Prompt
    completions: list[tuple[int, ...]]
    """_G, token ids."""


class Group:
    """One group per step, two pictures in turn; only one is cached, so each step encodes one."""

    def __init__(self, bench: Bench, side_px: int, kernel: str, checkpointing: bool | str) -> None:
        config = run_config(
            bench,
            side_px,
            policy={"attn_implementation": kernel, "max_kept_pictures": 1},
            optimizer={"gradient_checkpointing": checkpointing},
        )
        self.policy: Any = make_policy(bench, config)
        self.learner = Learner(self.policy, config, bench.dist, NUM_ITERATIONS)
        self.examples = [make_group(bench, self.policy, side_px, i) for i in range(2)]
        self._turns = cycle(self.examples)

    def step(
        self, phase: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()
    ) -> None:
        """Learns from a graded group. `phase(name)`: context around each part."""
        prompt, ids_G = next(self._turns)
        train_step = self.learner.begin(0, [prompt], [ids_G], [len(ids_G)])
        with phase("tower, forward, states"):
            for micro_batch in train_step.micro_batches:
                batch, outputs = train_step.forward(micro_batch)
                self.policy.decode_actions(micro_batch.rows, batch, outputs)
                del batch, outputs
        with phase("reference pass"):
            train_step.prefetch_reference(lambda: True)
        with phase("backward"):
            train_step.accumulate(0, [_graded(ids, g) for g, ids in enumerate(ids_G)])
        with phase("optimiser step"):
            train_step.step()


def _graded(ids: tuple[int, ...], g: int) -> TrainSequence:
    """Every token is trained; half of the group has a positive advantage."""
    num_tokens = len(ids)
    advantage = 1.0 if g % 2 else -1.0
    return TrainSequence((True,) * num_tokens, advantage, (SAMPLER_LOGPROB,) * num_tokens)


def _ours(bench: Bench, side_px: int, kernel: Any, checkpointing: bool | str) -> Ours:
    """Measures a variant; raises RuntimeError if it does not run."""
    kernel = bench.attention if kernel == "auto" else kernel
    dtype = getattr(torch, bench.dtype)
    varlen = choose_kernel(kernel, bench.device, dtype) is VARLEN
    group = Group(bench, side_px, kernel, checkpointing)
    prompt, ids_G = group.examples[0]
    name = (
        f"{_size_of(prompt, ids_G)}, packed, attention {'varlen' if varlen else 'sdpa'}, "
        f"gradient_checkpointing {checkpointing}"
    )
    timings = bench.race({name: group.step}, SHARE)
    if name not in timings:
        raise RuntimeError(f"{name} does not run here")
    floor = _least_flops(group.policy, prompt, ids_G)
    bench.tell_time(name, timings[name], floor)
    for part, ms in _parts_of(bench, group):
        bench.tell(f"- {part}", ms)
    return Ours(timings[name], floor, prompt, ids_G)


def _size_of(prompt: Prompt, ids_G: list[tuple[int, ...]]) -> str:
    return f"P={len(prompt.token_ids)} G={len(ids_G)} T={len(ids_G[0])}"


def _least_flops(policy: Any, prompt: Prompt, ids_G: list[tuple[int, ...]]) -> float:
    prompt_len, lens_G = len(prompt.token_ids), [len(ids) for ids in ids_G]
    sizes, pairs = policy.module.sizes, prefix_tree_pairs(prompt_len, lens_G)
    reference = sizes.forward_flops(prompt_len + sum(lens_G), pairs) + sizes.head_flops(sum(lens_G))
    return float(policy.train_flops(prompt_len, lens_G) + reference)


def _parts_of(bench: Bench, group: Group) -> list[tuple[str, float]]:
    """(part, ms) of one step, with the device idle between the parts."""
    parts = []

    @contextmanager
    def phase(part: str) -> Iterator[None]:
        synchronize(bench.device)
        start_s = time.perf_counter()
        yield
        synchronize(bench.device)
        parts.append((part, 1e3 * (time.perf_counter() - start_s)))

    group.step(phase)
    return parts


# The peers


class PaddedRows:
    """A group as a batch of rows, with plain transformers and PEFT."""

    def __init__(
        self, bench: Bench, side_px: int, prompt: Prompt, ids_G: list[tuple[int, ...]]
    ) -> None:
        section = PolicyConfig.model_validate(run_config(bench, side_px).policy)
        model = random_policy_model(bench, bench.dtype, "sdpa")
        self.model = adapt(model, section.lora, "", r".*language_model\..*").train()
        self._prompt = prompt
        self._ids_G = ids_G

    def passes(self, num_without_gradient: int, rows_at_once: int) -> None:
        """Forwards without a gradient (the second without adapter), then a forward and backward."""
        size = len(self._ids_G)
        for first in range(0, size, rows_at_once):
            rows = self._ids_G[first : first + rows_at_once]
            for number in range(num_without_gradient):
                off = self.model.disable_adapter() if number == 1 else nullcontext()
                with torch.no_grad(), off:
                    self._logprobs(rows)
            (-self._logprobs(rows).sum() / size).backward()
        self.model.zero_grad()

    def _logprobs(self, rows: list[tuple[int, ...]]) -> torch.Tensor:
        """[rows * T]; every row has the picture's pixels, and the tower encodes each."""
        inner = self.model.get_base_model()
        ids = torch.tensor([[*self._prompt.token_ids, *row] for row in rows], device=inner.device)
        pixels, grid = (
            self._prompt.model_inputs[name].to(inner.device).repeat(len(rows), 1)
            for name in ("pixel_values", "image_grid_thw")
        )
        hidden = inner.model(
            input_ids=ids,
            mm_token_type_ids=(ids == inner.config.image_token_id).long(),
            pixel_values=pixels,
            image_grid_thw=grid,
            use_cache=False,
        ).last_hidden_state
        start = len(self._prompt.token_ids)
        predicting, written = hidden[:, start - 1 : -1].flatten(0, 1), ids[:, start:].flatten()
        banned = ids.new_empty(0)
        return token_logprobs(predicting, inner.lm_head, written, 1.0, banned)[0]


def _peer(bench: Bench, side_px: int, name: str, ours: Ours) -> Timing | None:
    """Measures as many rows at once as fit; None if not even one fits."""
    num_without_gradient, checkpointing = PEERS[name]
    rows = PaddedRows(bench, side_px, ours.prompt, ours.completions)
    if checkpointing:
        rows.model.gradient_checkpointing_enable({"use_reentrant": False})
    at_once = len(ours.completions)
    while at_once:
        title = f"{_size_of(ours.prompt, ours.completions)}, {at_once} padded rows at once, {name}"
        timings = bench.race({title: partial(rows.passes, num_without_gradient, at_once)}, SHARE)
        if title in timings:
            timing = timings[title]
            note = f"{timing.ms / ours.timing.ms:.1f} times our best"
            bench.tell_time(title, timing, note=note)
            return timing
        at_once //= 2
    return None


# Weight sync


def weight_sync(bench: Bench) -> None:
    """Item 6: the trainer's part of a weight sync. Item 7 has the engine's part."""
    with cleared(bench.device):
        group = Group(bench, bench.size.policy_px[-1], bench.attention, "mlp")
        group.step()
        timings = bench.race({"export": group.learner.export_weights}, 0.5)
        bench.tell_time("adapter exported, with fingerprint", timings["export"])
        export_ms = timings["export"].ms
        bench.report.at_most("D6 weight sync, export", SYNC_LIMIT_MS, export_ms, "ms")
