"""Case `policy`: a step of the 7B policy on one group, packed, and TRL's passes over its tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import cycle
from typing import Any

import torch

from benchmarks.gpu_models import (
    make_group,
    make_policy,
    open_bench,
    random_policy_model,
    run_config,
)
from benchmarks.gpu_timing import Bench, Timing
from benchmarks.our_worker import SAMPLER_LOGPROB
from rl.api.types import Prompt, TrainSequence
from rl.learner.learner import NUM_MEASURED, Learner
from rl.meter import prefix_tree_pairs
from rl.policies.policy_base import adapt
from rl.policies.qwen_vl_prompts import Config as PolicyConfig
from rl.policies.trained_module import token_logprobs
from rl.tools.gpu_checks import Line, Setup, measured, skipped

NUM_ITERATIONS = 10**6
"""Length of the learning rate's schedule: so long that the rate stays constant."""
CHECKPOINTING: tuple[bool | str, ...] = (False, "mlp", True)
"""Values of `optimizer.gradient_checkpointing`."""
NUM_WITHOUT_GRADIENT = 2
"""Forwards of the setup `TRL tuned` of `side_by_side.py`: conditioning and reference."""
NUM_KERNELS = 6
"""Kernels that are named."""
SECONDS = 4.0
"""Time for the rounds of each variant, the model's creation and the first step not counted."""


def policy(setup: Setup) -> Iterator[Line]:
    """Times our step with each `gradient_checkpointing`, then TRL's passes over the same tokens,
    with as many rows at once as fit."""
    bench = open_bench(setup)
    best: Timing | None = None
    for checkpointing in CHECKPOINTING:
        runner = StepRunner(bench, checkpointing)
        timing = bench.time({"": runner.step}, SECONDS)[""]
        if best is None or timing.ms < best.ms:
            best = timing
        prompt, ids_G = runner.examples[0]
        size = f"P={len(prompt.token_ids)} G={len(ids_G)} T={len(ids_G[0])}"
        prompt_len, lens_G = len(prompt.token_ids), [len(ids) for ids in ids_G]
        sizes, pairs = runner.policy.module.sizes, prefix_tree_pairs(prompt_len, lens_G)
        min_flops = float(
            runner.policy.train_flops(prompt_len, lens_G)
            + sizes.forward_flops(prompt_len + sum(lens_G), pairs)  # the reference
            + sizes.head_flops(sum(lens_G))
        )
        yield bench.line(f"{size}, packed, checkpointing {checkpointing}", timing, min_flops)
        if checkpointing == "mlp":
            yield from _parts(bench, runner)
        del runner
        bench.free()
    assert best is not None
    rows = PaddedRows(bench, prompt, ids_G)
    at_once = len(ids_G)
    while at_once:
        what = f"{size}, {at_once} padded rows at once, TRL tuned's passes"
        try:
            timing = bench.time({"": partial(rows.passes, at_once)}, SECONDS)[""]
        except torch.OutOfMemoryError:
            yield skipped(what, "out of memory")
            at_once //= 2
            bench.free()
            continue
        yield bench.line(what, timing)
        ratio = timing.ms / best.ms
        yield measured("our step beside TRL tuned's", f"{ratio:.1f} times as fast", ratio=ratio)
        break


def _parts(bench: Bench, runner: StepRunner) -> Iterator[Line]:
    """Of one step: the time of the vision tower, the time in which the GPU computes, and the
    kernels that take most of it."""
    [tower] = (m for name, m in runner.policy.module.named_modules() if name.endswith(".visual"))
    times_s: list[float] = []

    def note(*_: object) -> None:
        bench.wait()
        times_s.append(time.perf_counter())

    hooks = [tower.register_forward_pre_hook(note), tower.register_forward_hook(note)]
    runner.step()
    for hook in hooks:
        hook.remove()
    tower_ms = 1e3 * (times_s[-1] - times_s[0])
    yield measured("vision tower, one picture", f"{tower_ms:.4g} ms", ms=tower_ms)
    with torch.profiler.profile() as profile:
        step_ms = 1e3 * bench.timed_s(runner.step)
    ms_of = {event.key: event.self_device_time_total / 1e3 for event in profile.key_averages()}
    busy_ms = sum(ms_of.values())
    text = f"the GPU computes for {busy_ms:.0f} of {step_ms:.0f} ms"
    longest = sorted(ms_of, key=lambda key: -ms_of[key])[:NUM_KERNELS]
    text += "".join(f"; {ms_of[key]:.0f} ms {key[:60]}" for key in longest if ms_of[key])
    yield measured("a step under the profiler", text, busy_ms=busy_ms, step_ms=step_ms)


class StepRunner:
    """Trains on two groups in turn. Only one picture is cached, so each step encodes its own."""

    def __init__(self, bench: Bench, checkpointing: bool | str) -> None:
        side_px = bench.size.policy_px
        config = run_config(bench, side_px, optimizer={"gradient_checkpointing": checkpointing})
        self.policy: Any = make_policy(bench, config)
        self.learner = Learner(self.policy, config, bench.dist, NUM_ITERATIONS)
        self.examples = [make_group(bench, self.policy, side_px, i) for i in range(2)]
        self._turns = cycle(self.examples)

    def step(self) -> None:
        """Trains on the next group, whose picture the vision tower encodes again."""
        self.policy.module._features._kept.clear()
        train_on(self.learner, self.policy, *next(self._turns))


def train_on(learner: Learner, policy: Any, prompt: Prompt, ids_G: list[tuple[int, ...]]) -> None:
    """A whole step on one group: all tokens are trained, every second completion is good."""
    train_step = learner.begin(NUM_MEASURED, [prompt], [ids_G], [len(ids_G)])
    for micro_batch in train_step.micro_batches:
        batch, outputs = train_step.forward(micro_batch)
        policy.decode_actions(micro_batch.rows, batch, outputs)
        del batch, outputs
    train_step.work_ahead(lambda: True)
    graded = [
        TrainSequence((True,) * len(ids), 1.0 if g % 2 else -1.0, (SAMPLER_LOGPROB,) * len(ids))
        for g, ids in enumerate(ids_G)
    ]
    train_step.accumulate(0, graded)
    train_step.step()


class PaddedRows:
    """A group as a batch, as in TRL: transformers and PEFT forward prompt and picture once per
    completion. Completions have equal lengths, so no row needs padding or a mask."""

    def __init__(self, bench: Bench, prompt: Prompt, ids_G: list[tuple[int, ...]]) -> None:
        section = PolicyConfig.model_validate(run_config(bench, bench.size.policy_px).policy)
        model = random_policy_model(bench, bench.dtype, "sdpa")
        self.model = adapt(model, section.lora, "", r".*language_model\..*").train()
        self._prompt = prompt
        self._ids_G = ids_G

    def passes(self, rows_at_once: int) -> None:
        """Forwards without a gradient (the second one without adapter), a forward, a backward."""
        size = len(self._ids_G)
        for first in range(0, size, rows_at_once):
            rows = self._ids_G[first : first + rows_at_once]
            for number in range(NUM_WITHOUT_GRADIENT):
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
