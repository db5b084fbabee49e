"""Steps `memory_*` of `rl check-gpu`: peak memory of released model sizes, with random weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_models import (
    create_on,
    fill,
    make_policy,
    make_sample,
    modulation_to_host,
    open_bench,
    random_klein,
)
from benchmarks.gpu_policy import train_on
from rl import build
from rl.check import memory_plan
from rl.config.schema import load_config
from rl.learner.learner import Learner
from rl.tools.gpu_checks import Line, Setup, measured, result
from rl.tools.gpu_steps import Forward, edit_step, small_parts, step_21
from rl.tools.rehearsal import model_folder

MAX_RATIO = 1.1
"""Limit on the peak divided by the plan, which leaves a tenth of the GPU free."""
ENV = {"APP__RUN_NAME": "check", "APP__BASE_EXP_DIR": ".", "APP__REWARD_FUNCTION_API_BASE": "none"}
SMALL: Mapping[str, tuple[str, Callable[..., Forward]]] = {
    "qwen_image_edit": ("quickstart", edit_step),
    "qwen_image_21": ("tiny_qwen_image_21", partial(step_21, num_shown=(1, 1))),
}
"""Released config -> (small config of the same classes, one denoising step with as many source
pictures as a batch may have)."""


def peak_gb(device: str) -> float:
    return torch.cuda.max_memory_allocated(device) / 1e9


def _reset_peak(device: str) -> None:
    """Starts a new peak of memory, from what is allocated now."""
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _against_plan(what: str, setup: Setup, plan_gb: float, keys: Mapping[str, str]) -> Line:
    measured_gb = peak_gb(setup.device)
    [(key, value)] = keys.items()
    fix = f"set {key}={value}; report it with an issue"
    note = f"peak {measured_gb:.1f} GB, planned {plan_gb:.1f}"
    line = result(what, measured_gb <= MAX_RATIO * plan_gb, note, fix, keys)
    return replace(line, data={"peak_gb": measured_gb, "plan_gb": plan_gb})


@torch.no_grad()
def transformer(setup: Setup, released: str) -> Iterator[Line]:
    """A denoising step on the rows of the released config's batch, two per picture if guided, at
    1024 x 1024 px."""
    renderer = build.resolve(load_config(f"configs/{released}.jsonnet", (), ENV)).renderer
    small, step = SMALL[released]
    model = small_parts(setup, small).transformer
    if not setup.tiny:
        with create_on(setup.device, setup.dtype):
            model = fill(type(model)())  # the class's defaults are the released sizes
    if released == "qwen_image_edit":  # as in a run: modulation, a third, stays in host memory
        modulation_to_host(model)
    _reset_peak(setup.device)
    batch = renderer.config.batch_size
    num_rows = batch * (2 if renderer.config.true_cfg_scale > 1 else 1)
    forward = step(model, 4 if setup.tiny else 64, [300 + 13 * row for row in range(num_rows)])
    finite = bool(forward().isfinite().all())
    what = f"real size, {renderer.name}"
    yield result(f"{what}, {num_rows} rows", finite, "finite velocities", "use another GPU")
    cost = renderer.cls.cost(renderer.config)
    values = cost.weights["transformer"] + cost.activations["transformer"]
    plan_gb = values * memory_plan.BYTES[setup.dtype] / 1e9
    keys = {"renderer.batch_size": str(max(1, batch // 2))}
    yield _against_plan(f"{what}, memory", setup, plan_gb, keys)


def policy(setup: Setup) -> Iterator[Line]:
    """Forward, backward and optimizer step on one group of the released config."""
    bench = open_bench(setup)
    words = ["world_size=1", "prompts_per_iteration=1", f"policy.dtype={setup.dtype}"]
    words += ["optimizer.backend=torch"]
    path = "configs/qwen_image_edit.jsonnet"
    released = build.resolve(load_config(path, words, ENV))
    words += [f"policy.model_path={bench.folder}/policy", "policy.init_text_encoder_from="]
    config = load_config(path, words, ENV)
    built: Any = make_policy(bench, config)
    side_px = round(released.renderer.config.policy_image_area_px**0.5)
    prompt = built.build_prompt(make_sample(bench, side_px, 0))
    num_tokens, group = config.sampling.max_completion_tokens, config.generations_per_prompt
    ids_G = [tuple((5 + g + t) % 200 for t in range(num_tokens)) for g in range(group)]
    _reset_peak(setup.device)
    train_on(Learner(built, config, bench.dist, num_iterations=10), built, prompt, ids_G)
    what = "real size, policy"
    finite = all(bool(p.isfinite().all()) for p in built.module.parameters())
    note = f"prompt of {len(prompt.token_ids)} tokens, {group} x {num_tokens} written"
    yield result(what, finite, note, "use another GPU")
    sizes = memory_plan.sizes(released)
    assert sizes is not None
    tokens = len(prompt.token_ids) + group * num_tokens
    sizes = replace(sizes, forward_tokens=tokens, kept_tokens=tokens, engine=None, frozen=[])
    plan_gb = memory_plan.plan(sizes, setup.gpu_gb).peak_gb - memory_plan.CONTEXT_GB
    keys = {"optimizer.gradient_checkpointing": "true"}
    yield _against_plan(f"{what}, memory", setup, plan_gb, keys)


@torch.no_grad()
def stock(setup: Setup) -> Iterator[Line]:
    """A batch of `one_card_edit`, pictures and sources of 1024 x 1024 px, for each value of
    `renderer.residency`."""
    from rl.renderers.stock_pipeline_loop import StockLoop, distance, made_up_jobs, placed

    name = "tiny_stock_editor" if setup.tiny else "one_card_edit"
    renderer = build.resolve(load_config(f"configs/{name}.jsonnet", (), ENV)).renderer
    folder = model_folder(renderer.config.model_path, None, Path(setup.folder))
    pipeline = random_klein(folder, setup.device, setup.dtype)
    for residency in ("host", "device"):
        sides = {} if setup.tiny else {"height_px": 1024, "width_px": 1024}
        config = renderer.config.model_copy(update={"residency": residency, **sides})
        pipeline.remove_all_hooks()
        loop = StockLoop(config, placed(pipeline, config, setup.device))
        jobs = made_up_jobs(config)
        batch = [jobs["base"], jobs["prompt"], jobs["noise"], jobs["base"]]
        base, words, noise = (loop.render_tensor([job])[0] for job in batch[:3])
        _reset_peak(setup.device)
        start_s = time.perf_counter()
        drawn = loop.render_tensor(batch)
        seconds = time.perf_counter() - start_s
        what = f"real size, diffusers, residency {residency}"
        finite = bool(drawn.isfinite().all())
        note = f"{seconds:.2f} s"
        yield result(f"{what}, {len(batch)} pictures", finite, note, "use another GPU")
        # Two pictures of one batch have the same job.
        apart = {
            "batch": max(map(distance, drawn, (base, words, noise, base))),
            "again": distance(drawn[0], drawn[3]),
            "words": distance(base, words),
            "noise": distance(base, noise),
        }
        note = ", ".join(f"{key} {value:.1e}" for key, value in apart.items())
        yield measured(f"{what}, pictures differ by", note, seconds=seconds, **apart)
        cost = renderer.cls.cost(config)
        values = sum(cost.weights.values()) + cost.largest_part + max(cost.activations.values())
        plan_gb = values * memory_plan.BYTES[setup.dtype] / 1e9
        yield _against_plan(f"{what}, memory", setup, plan_gb, {"renderer.batch_size": "1"})
