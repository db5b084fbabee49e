"""Measures whole iterations at real size without sampling, and vLLM beside the trainer's models.

rl bench-gpu --items 5,7
"""

from __future__ import annotations

import contextlib
import importlib.util
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch

from benchmarks import toy
from benchmarks.flop_counter import flops_of
from benchmarks.gpu_bench import Bench, cleared, free
from benchmarks.gpu_models import (
    editor_parts,
    make_group,
    make_policy,
    run_config,
    shape_of,
    unchecked_files,
)
from benchmarks.judge_stub import judge_process
from benchmarks.our_worker import completions_of
from rl import build
from rl.api.engine import EngineSetup
from rl.api.plugin import PluginConfig
from rl.api.policy import Policy
from rl.api.types import Completion, Prompt, SamplingParams
from rl.engines.transformers import TransformersEngine
from rl.files.atomic import read_rows
from rl.learner.learner import Learner
from rl.learner.weight_sync import PROBE_COMPLETIONS, PROBE_TOKENS
from rl.renderers.qwen_image import qwen_image_components
from rl.renderers.qwen_image.qwen_image_components import EditorParts
from rl.run.set_up import open_run
from rl.train import train

NUM_WARM_UP, NUM_TIMED = 1, 1
"""Iterations of a run. One step off-policy, a last one is added but not timed: no rollout overlaps
with it."""
CACHE_MB = 4096
"""The engine's KV cache: room for four times two groups of 8 at 1543 + 256 tokens."""


@dataclass(frozen=True)
class Case:
    """The settings of one timed run."""

    side_px: int
    num_steps: int
    latency_s: float
    max_staleness: int

    @property
    def name(self) -> str:
        policy = "one step off-policy" if self.max_staleness else "on-policy"
        return f"{self.side_px}^2, {self.num_steps} steps, judge {self.latency_s:g} s, {policy}"

    @property
    def num_iterations(self) -> int:
        return NUM_WARM_UP + NUM_TIMED + self.max_staleness


def cases(bench: Bench) -> list[Case]:
    """All cases, those with goals first."""
    cases = [
        Case(side_px, num_steps, latency_s, max_staleness)
        for side_px, num_steps in bench.size.iterations
        for latency_s in bench.size.latencies_s
        for max_staleness in (0, 1)
    ]
    return sorted(cases, key=lambda case: bench.size.latencies_s.index(case.latency_s))


def iterations(bench: Bench) -> None:
    """Times `rl.train`'s loop with a judge of known latency and an engine that returns fixed
    completions, so that sampling is not included. Skips cases after `--seconds-per-item`."""
    with cleared(bench.device):
        parts = editor_parts(bench)
        policies: dict[int, Policy] = {}
        flops: dict[tuple[int, int], int] = {}
        spent_s = 0.0
        for case in cases(bench):
            if spent_s > bench.seconds:
                bench.log(case.name, note="not measured: --seconds-per-item is over")
                continue
            if case.side_px not in policies:
                policies.clear()
                free(bench.device)
                policies[case.side_px] = make_policy(bench, run_config(bench, case.side_px))
            start_s = time.perf_counter()
            run = partial(_run, bench, case, policies[case.side_px], parts)
            key = case.side_px, case.num_steps
            if key not in flops:
                flops[key] = flops_of(partial(run, f"counted_{case.side_px}", num_iterations=1))
            name = f"{case.side_px}_{case.latency_s:g}_{case.max_staleness}"
            timed = run(name, num_iterations=case.num_iterations)
            _report(bench, case, timed[NUM_WARM_UP:][:NUM_TIMED], flops[key])
            spent_s += time.perf_counter() - start_s


def _run(
    bench: Bench, case: Case, policy: Policy, parts: EditorParts, name: str, num_iterations: int
) -> list[dict[str, float]]:
    """Runs a case; returns the metrics of each iteration."""
    with judge_process(case.latency_s) as api_base:
        config = run_config(
            bench,
            case.side_px,
            num_steps=case.num_steps,
            api_base=api_base,
            run_name=f"{name}_{case.num_steps}",
            num_iterations=num_iterations,
            max_staleness=case.max_staleness,
        )
        with _preloaded(bench, case, policy, parts), contextlib.redirect_stdout(sys.stderr):
            with unchecked_files(), open_run(config, bench.dist) as run:
                train(run)
            timed, _ = read_rows(config.run_dir / "metrics.jsonl")
    return [row for row in timed if "loss/total" in row]


@contextlib.contextmanager
def _preloaded(bench: Bench, case: Case, policy: Policy, parts: EditorParts) -> Iterator[None]:
    """Runs that are opened in this context use these models instead of loading any."""
    engine = FixedEngine(policy, shape_of(bench, case.side_px))
    with (
        mock.patch.object(build, "build_policy", lambda resolved, dist: policy),
        mock.patch.object(build, "build_engine", lambda *_: engine),
        mock.patch.object(qwen_image_components, "load_parts", lambda config, device: parts),
    ):
        yield


class FixedEngine(TransformersEngine):
    """Returns the completions of `toy.py`; samples only for the check after a weight sync."""

    def __init__(self, policy: Any, shape: toy.Shape) -> None:
        super().__init__(PluginConfig(), EngineSetup(policy, policy.device))
        self._shape = shape

    def generate(
        self, prompts_P: Sequence[Prompt], params: SamplingParams, seeds_P: Sequence[int]
    ) -> list[list[Completion]]:
        """See `rl.api.engine.Engine.generate`."""
        if params.num_completions == PROBE_COMPLETIONS and params.max_tokens <= PROBE_TOKENS:
            return super().generate(prompts_P, params, seeds_P)
        return [completions_of(self._policy, prompt, self._shape) for prompt in prompts_P]


def _report(bench: Bench, case: Case, rows: Sequence[dict[str, float]], flops: int) -> None:
    def median(key: str) -> float:
        return statistics.median(row.get(key, 0.0) for row in rows)

    seconds, floor_ms = median("time/iteration_s"), bench.floor_ms(flops)
    wait_s, peak_gb = median("time/judge_wait_s"), median("memory/peak_gb")
    note = f"waits {wait_s:.2f} s for the judge"
    bench.log(case.name, 1e3 * seconds, floor_ms, peak_gb=peak_gb, note=note)
    facts = bench.report.facts
    facts["iteration_peak_gb"] = max(peak_gb, facts.get("iteration_peak_gb", 0.0))
    if case.latency_s != bench.size.latencies_s[0]:
        return
    few_steps = case.side_px < 1024
    wanted = 0.55 if few_steps else (0.70 if case.max_staleness else 0.65)
    bench.report.at_least(
        f"iteration without sampling, floor over time, {case.name}",
        wanted,
        floor_ms / (1e3 * seconds),
    )


# The inference engine


def vllm_engine(bench: Bench) -> None:
    """Times weight sync and sampling of vLLM with random weights beside the trainer's policy."""
    if importlib.util.find_spec("vllm") is None:
        bench.log("vLLM", note="not measured: it is not installed")
        return
    with cleared(bench.device):
        side_px = bench.size.policy_px[0]
        section = {"type": "vllm", "kv_cache_memory_mb": CACHE_MB}
        config = run_config(bench, side_px, engine=section)
        policy = make_policy(bench, config)
        learner = Learner(policy, config, bench.dist, num_iterations=1)
        free_gb = _free_gb(bench.device)
        start_s = time.perf_counter()
        with _dummy_weights(), unchecked_files():
            engine: Any = build.build_engine(build.resolve(config), policy, bench.dist)
        took_s, engine_gb = time.perf_counter() - start_s, free_gb - _free_gb(bench.device)
        try:
            note = f"start {took_s:.0f} s, {engine_gb:.1f} GB of its own"
            bench.log("vLLM beside the policy", note=note)
            _time_engine(bench, policy, learner, engine, config)
        finally:
            engine.close()
    peak_gb = bench.report.facts.get("iteration_peak_gb")
    if peak_gb is not None and bench.device.startswith("cuda"):
        bench.report.at_most("memory with all models resident", 62.0, peak_gb + engine_gb, "GB")


@contextlib.contextmanager
def _dummy_weights() -> Iterator[None]:
    """In this context vLLM draws random weights instead of reading a file."""
    from rl.engines.vllm.vllm import VllmEngine

    arguments_of = VllmEngine._arguments

    def arguments(engine: VllmEngine, policy: Any) -> dict[str, Any]:
        return arguments_of(engine, policy) | {"load_format": "dummy"}

    with mock.patch.object(VllmEngine, "_arguments", arguments):
        yield


def _time_engine(bench: Bench, policy: Policy, learner: Learner, engine: Any, config: Any) -> None:
    prompts_P = [make_group(bench, policy, bench.size.policy_px[0], i)[0] for i in range(2)]
    params = build.sampling_params(config)

    def sync() -> None:
        engine.load_weights(learner.export_weights())
        engine.held_fingerprint()

    def rollout() -> None:
        sync()  # clears the cached keys and values of the prompts
        engine.generate(prompts_P, params, [1, 1001])

    timings = bench.time({"sync": sync, "rollout": rollout})
    if "sync" in timings:
        bench.log_time("adapter synced and read back", timings["sync"])
        bench.report.at_most("weight sync, served", 20.0, timings["sync"].ms, "ms")
    if "rollout" in timings:
        size = bench.size
        what = f"2 prompts x {size.group} completions of at most {size.completion_tokens} tokens"
        bench.log_time(what, timings["rollout"])


def _free_gb(device: str) -> float:
    return torch.cuda.mem_get_info(device)[0] / 1e9 if device.startswith("cuda") else 0.0
