"""Cases `iteration` and `sync_*`: whole iterations at real size, and engines at 7B.

The weights are random: speed and memory do not depend on their values, rounding hardly.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

from benchmarks import toy
from benchmarks.gpu_models import (
    editor_parts,
    make_group,
    make_policy,
    open_bench,
    run_config,
    shape_of,
    unchecked_files,
)
from benchmarks.gpu_timing import Bench
from benchmarks.judge_stub import judge_process
from benchmarks.our_worker import completions_of
from rl import build
from rl.api.engine import EngineSetup
from rl.api.plugin import PluginConfig
from rl.api.policy import Policy
from rl.api.types import Completion, Prompt, SamplingParams
from rl.engines import vllm_process
from rl.engines.transformers import TransformersEngine
from rl.files import read_rows
from rl.learner.learner import (
    MAX_MEAN_DLOGP_NATS,
    PROBE_COMPLETIONS,
    PROBE_TOKENS,
    Learner,
    mean_difference,
    sync,
)
from rl.renderers import qwen_image_loop
from rl.renderers.qwen_image_loop import EditorParts
from rl.run.set_up import open_run
from rl.tools.commands.check_gpu import SHOWN
from rl.tools.gpu_checks import Line, Setup, measured, result, skipped
from rl.tools.gpu_steps import move
from rl.train import sampling_params, train

NUM_ITERATIONS = 2
"""The first one warms up."""
SHARE = 0.5
"""Of the GPU's memory, for the engine."""


def iteration(setup: Setup) -> Iterator[Line]:
    """Iterations of `rl.train`'s loop with a judge without latency and fixed completions, so that
    sampling is not included; all metrics of each."""
    bench = open_bench(setup)
    side_px, num_steps = bench.size.iteration
    start_s = time.perf_counter()
    parts = editor_parts(bench)
    policy = make_policy(bench, run_config(bench, side_px))
    yield measured("models built", f"{time.perf_counter() - start_s:.0f} s")
    with judge_process() as api_base:
        config = run_config(
            bench,
            side_px,
            num_steps=num_steps,
            api_base=api_base,
            run_name="iteration",
            num_iterations=NUM_ITERATIONS,
        )
        with (
            _preloaded(bench, side_px, policy, parts),
            contextlib.redirect_stdout(sys.stderr),
            unchecked_files(),
            open_run(config, bench.dist) as run,
        ):
            train(run)
    rows, _ = read_rows(config.run_dir / "metrics.jsonl")
    rows = [row for row in rows if "loss/total" in row]
    for row in rows:
        data = {key: x for key, x in row.items() if isinstance(x, (int, float))}
        note = ", ".join(f"{key} {data[key]:.3g}" for key in (*SHOWN, "work/mfu") if key in data)
        yield measured(
            f"iteration {row['iteration']}, {side_px}^2, {num_steps} steps", note, **data
        )
    good, note = len(rows) == NUM_ITERATIONS, f"{len(rows)} of {NUM_ITERATIONS}"
    yield result("iterations at this size", good, note, "the log has the error")


@contextlib.contextmanager
def _preloaded(bench: Bench, side_px: int, policy: Policy, parts: EditorParts) -> Iterator[None]:
    """Runs that are opened in this context use these models instead of loading any."""
    engine = FixedEngine(policy, shape_of(bench, side_px))
    with (
        mock.patch.object(build, "build_policy", lambda *_: policy),
        mock.patch.object(build, "build_engine", lambda *_: engine),
        mock.patch.object(qwen_image_loop, "load_parts", lambda *_: parts),
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


# The inference engines


def sync_vllm(setup: Setup, eager: str) -> Iterator[Line]:
    """vLLM with the policy's weights: by how much do log-probs differ after a weight sync, how fast
    does it sample, how long do sleep and waking take? `eager`: 'eager' or 'graphs'."""
    bench = open_bench(setup)
    residency = "resident" if setup.tiny else "sleep"
    section = {"type": "vllm", "enforce_eager": eager == "eager", "residency": residency}
    section |= {"gpu_memory_utilization": SHARE}
    config = run_config(bench, bench.size.policy_px, engine=section)
    policy = make_policy(bench, config)
    start_s = time.perf_counter()
    with _dummy_weights(), unchecked_files():
        engine: Any = build.build_engine(build.resolve(config), policy, bench.dist)
    with contextlib.closing(engine):
        yield measured("vLLM's start", f"{time.perf_counter() - start_s:.0f} s, {eager}")
        yield from _differences(bench, policy, engine, config)
        prompts = [make_group(bench, policy, bench.size.policy_px, i)[0] for i in range(2)]
        params = sampling_params(config)
        engine.generate(prompts, params, [1, 1001])
        start_s = time.perf_counter()
        groups = engine.generate(prompts, params, [2, 2001])
        seconds = time.perf_counter() - start_s
        num_tokens = sum(len(c.token_ids) for group in groups for c in group)
        note = f"{num_tokens} tokens in {seconds:.2f} s"
        yield measured("sampling", note, tokens=num_tokens, seconds=seconds)
        if not setup.tiny:
            sleep_s, wake_s = bench.timed_s(engine.sleep), bench.timed_s(engine.wake)
            yield measured("sleep", f"{sleep_s:.1f} s, wake {wake_s:.1f} s", s=sleep_s, wake=wake_s)


def sync_transformers(setup: Setup) -> Iterator[Line]:
    """The same differences for the engine `transformers`: packed forward, cached decoding."""
    bench = open_bench(setup)
    config = run_config(bench, bench.size.policy_px)
    policy: Any = make_policy(bench, config)
    engine = TransformersEngine(PluginConfig(), EngineSetup(policy, policy.device))
    yield from _differences(bench, policy, engine, config)


def _differences(bench: Bench, policy: Any, engine: Any, config: Any) -> Iterator[Line]:
    """A sync after each of two moves of the adapter. A difference above the limit that would stop a
    run is a FAIL. The head stays as it was drawn: with logits as spread as a trained model's, a
    random network amplifies rounding to several nats (benchmarks/results/gpu.md)."""
    learner = Learner(policy, config, bench.dist, num_iterations=1)
    prompts = [make_group(bench, policy, bench.size.policy_px, i)[0] for i in range(2)]
    limit = MAX_MEAN_DLOGP_NATS[bench.dtype]
    report: Any = None
    if hasattr(engine, "_llm"):
        what, problem = "base weights given to vLLM", _copy_base(engine, policy)
        if problem and bench.setup.tiny:
            yield skipped(what, problem)
            return
        yield result(what, not problem, problem, "report it with an issue")
    for seed, prompt in enumerate(prompts, start=1):
        move(policy.module, seed)
        start_s = time.perf_counter()
        with mock.patch.dict(MAX_MEAN_DLOGP_NATS, {bench.dtype: float("inf")}):
            report = sync(engine, learner, prompt, bench.dtype, 1.0, report)
        seconds, least = time.perf_counter() - start_s, report.mean_dlogp_nats
        answers = [completion.logprobs for completion in report.answers]
        every = mean_difference(answers, report.trainer_logprobs)
        note = f"{least:.2g} nats on the least certain tokens, limit {limit:g}; {every:.2g} on "
        note += f"all; {seconds:.2f} s; read back: {'yes' if report.read_back else 'no'}"
        fix = "MAX_MEAN_DLOGP_NATS is too low for rounding"
        line = result(f"log-probs after a sync, move {seed}", least <= limit, note, fix)
        yield replace(line, data={"least": least, "all": every, "seconds": seconds})


def _copy_base(engine: Any, policy: Any) -> str:
    """Give vLLM the policy's frozen weights, which it has drawn at random; why not, or ''."""
    frozen = {
        name.replace(".base_layer.", "."): parameter
        for name, parameter in policy.module.base_model.named_parameters()
        if not parameter.requires_grad and "visual" not in name.split(".")
    }
    [problem] = engine._llm.collective_rpc(_copy_in_worker, args=(frozen,))
    return str(problem)


def _copy_in_worker(worker: Any, weights: Any) -> str:
    model = worker.model_runner.get_model()
    for name, parameter in weights.items():
        location = vllm_process._locate(model, name)
        if location is None:
            return f"vLLM's model has no {name}"
        layer, kind, first_row = location
        target = getattr(layer, kind).data
        if target.numel() == 0:
            return f"vLLM has repacked {name}, as it does on a CPU"
        target[first_row : first_row + len(parameter)].copy_(parameter.detach())
    return ""


@contextlib.contextmanager
def _dummy_weights() -> Iterator[None]:
    """In this context vLLM draws random weights instead of reading a file."""
    from rl.engines.vllm import VllmEngine

    arguments_of = VllmEngine._arguments

    def arguments(engine: VllmEngine, policy: Any) -> dict[str, Any]:
        return arguments_of(engine, policy) | {"load_format": "dummy"}

    with mock.patch.object(VllmEngine, "_arguments", arguments):
        yield
