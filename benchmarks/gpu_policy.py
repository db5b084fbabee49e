"""Measures a group's policy passes at real size, packed and as TRL makes them, and a weight export.

rl bench-gpu --items 4,6
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
from benchmarks.our_worker import SAMPLER_LOGPROB
from rl.algorithm.attention_kernels import VARLEN, choose_kernel
from rl.api.types import Prompt, TrainSequence
from rl.learner.learner import Learner
from rl.meter.flops import prefix_tree_pairs
from rl.policies.qwen2_5_vl import Config as PolicyConfig
from rl.policies.shared.logprobs import token_logprobs
from rl.policies.shared.model_loading import adapt

NUM_ITERATIONS = 10**6
"""Length of the learning rate's schedule: so long that the rate stays constant."""
VARIANTS: tuple[tuple[str, bool | str], ...] = (
    ("auto", False),
    ("auto", "mlp"),
    ("auto", True),
    ("sdpa", "mlp"),
)
"""(attention kernel, `optimizer.gradient_checkpointing`)."""
TRL_PASSES = {"TRL tuned's passes": (2, False), "TRL stock's passes": (3, True)}
"""Setup of `side_by_side.py` -> (forwards without a gradient, whether the backward recomputes). The
forwards are conditioning, reference and, for stock, old log-probs."""
SHARE = 0.08
"""Share of `--seconds-per-item` for each of about twelve timings."""
LIMIT_S = 0.55
SYNC_LIMIT_MS = 20.0


def one_group(bench: Bench) -> None:
    """Times a step on one group for each picture size: our variants, then TRL's passes over the
    same tokens. The first picture size has goals."""
    for number, side_px in enumerate(bench.size.policy_px):
        best: Ours | None = None
        for kernel, checkpointing in VARIANTS if number == 0 else VARIANTS[:2]:
            with cleared(bench.device):
                variant = _time_ours(bench, side_px, kernel, checkpointing)
            if best is None or variant.timing.ms < best.timing.ms:
                best = variant
        assert best is not None
        trl_timings = {}
        for name in TRL_PASSES:
            with cleared(bench.device):
                trl_timings[name] = _time_trl(bench, side_px, name, best)
        if number == 0:
            _goals(bench, best, trl_timings)


def _goals(bench: Bench, best: Ours, trl_timings: Mapping[str, Timing | None]) -> None:
    report = bench.report
    report.at_most("policy side of a group", LIMIT_S, best.timing.ms / 1e3, "s")
    share = bench.floor_ms(best.min_flops) / best.timing.ms
    report.at_least("policy side, share of the matmul rate", 0.45, share)
    for (name, trl_timing), limit in zip(trl_timings.items(), (5, 10), strict=True):
        if trl_timing is not None:
            report.at_least(f"{name} over ours", limit, trl_timing.ms / best.timing.ms, "x")


# Ours


@dataclass(frozen=True, eq=False)
class Ours:
    """A measured variant of this project's step."""

    timing: Timing
    min_flops: float
    """The fewest FLOPs for training and the reference pass, without the vision tower."""
    prompt: Prompt
    completions: list[tuple[int, ...]]
    """Token ids of each completion."""


class StepRunner:
    """Trains on two groups in turn. Only one picture is cached, so each step encodes its own."""

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
        """Trains on the next group. `phase(name)`: context around each part."""
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
        with phase("optimizer step"):
            train_step.step()


def _graded(ids: tuple[int, ...], g: int) -> TrainSequence:
    """Trains every token; every second completion has a positive advantage."""
    num_tokens = len(ids)
    advantage = 1.0 if g % 2 else -1.0
    return TrainSequence((True,) * num_tokens, advantage, (SAMPLER_LOGPROB,) * num_tokens)


def _time_ours(bench: Bench, side_px: int, kernel: Any, checkpointing: bool | str) -> Ours:
    """Times a variant; raises RuntimeError if it does not run."""
    kernel = bench.attention if kernel == "auto" else kernel
    dtype = getattr(torch, bench.dtype)
    varlen = choose_kernel(kernel, bench.device, dtype) is VARLEN
    runner = StepRunner(bench, side_px, kernel, checkpointing)
    prompt, ids_G = runner.examples[0]
    name = (
        f"{_size_of(prompt, ids_G)}, packed, attention {'varlen' if varlen else 'sdpa'}, "
        f"gradient_checkpointing {checkpointing}"
    )
    timings = bench.time({name: runner.step}, SHARE)
    if name not in timings:
        raise RuntimeError(f"{name} does not run here")
    min_flops = _min_flops(runner.policy, prompt, ids_G)
    bench.log_time(name, timings[name], min_flops)
    for part, ms in _parts_of(bench, runner):
        bench.log(f"- {part}", ms)
    return Ours(timings[name], min_flops, prompt, ids_G)


def _size_of(prompt: Prompt, ids_G: list[tuple[int, ...]]) -> str:
    return f"P={len(prompt.token_ids)} G={len(ids_G)} T={len(ids_G[0])}"


def _min_flops(policy: Any, prompt: Prompt, ids_G: list[tuple[int, ...]]) -> float:
    prompt_len, lens_G = len(prompt.token_ids), [len(ids) for ids in ids_G]
    sizes, pairs = policy.module.sizes, prefix_tree_pairs(prompt_len, lens_G)
    reference = sizes.forward_flops(prompt_len + sum(lens_G), pairs) + sizes.head_flops(sum(lens_G))
    return float(policy.train_flops(prompt_len, lens_G) + reference)


def _parts_of(bench: Bench, runner: StepRunner) -> list[tuple[str, float]]:
    """(part, ms) of one step. Between the parts the host waits until the GPU is idle."""
    parts = []

    @contextmanager
    def phase(part: str) -> Iterator[None]:
        synchronize(bench.device)
        start_s = time.perf_counter()
        yield
        synchronize(bench.device)
        parts.append((part, 1e3 * (time.perf_counter() - start_s)))

    runner.step(phase)
    return parts


# TRL's passes


class PaddedRows:
    """A group as a batch, as in TRL: transformers and PEFT forward prompt and picture once per
    completion. Completions have equal lengths, so no row needs padding or a mask."""

    def __init__(
        self, bench: Bench, side_px: int, prompt: Prompt, ids_G: list[tuple[int, ...]]
    ) -> None:
        section = PolicyConfig.model_validate(run_config(bench, side_px).policy)
        model = random_policy_model(bench, bench.dtype, "sdpa")
        self.model = adapt(model, section.lora, "", r".*language_model\..*").train()
        self._prompt = prompt
        self._ids_G = ids_G

    def passes(self, num_without_gradient: int, rows_at_once: int) -> None:
        """Forwards without a gradient (the second one without adapter), a forward, a backward."""
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
        """[rows * T]. Every row has the picture's pixels, so the tower encodes it once per row."""
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


def _time_trl(bench: Bench, side_px: int, name: str, ours: Ours) -> Timing | None:
    """Times TRL's passes on as many rows at once as fit; None if not even one fits."""
    num_without_gradient, checkpointing = TRL_PASSES[name]
    rows = PaddedRows(bench, side_px, ours.prompt, ours.completions)
    if checkpointing:
        rows.model.gradient_checkpointing_enable({"use_reentrant": False})
    at_once = len(ours.completions)
    while at_once:
        title = f"{_size_of(ours.prompt, ours.completions)}, {at_once} padded rows at once, {name}"
        timings = bench.time({title: partial(rows.passes, num_without_gradient, at_once)}, SHARE)
        if title in timings:
            timing = timings[title]
            note = f"{timing.ms / ours.timing.ms:.1f} times our best"
            bench.log_time(title, timing, note=note)
            return timing
        at_once //= 2
    return None


# Weight sync


def weight_sync(bench: Bench) -> None:
    """Times the trainer's part of a weight sync; `gpu_iteration.vllm_engine` times the engine's."""
    with cleared(bench.device):
        runner = StepRunner(bench, bench.size.policy_px[-1], bench.attention, "mlp")
        runner.step()
        timings = bench.time({"export": runner.learner.export_weights}, 0.5)
        bench.log_time("adapter exported, with fingerprint", timings["export"])
        export_ms = timings["export"].ms
        bench.report.at_most("weight sync, export", SYNC_LIMIT_MS, export_ms, "ms")
