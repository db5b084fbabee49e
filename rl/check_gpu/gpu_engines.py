"""Step 4: vLLM on the small policies: weight sync, seeds, the image grammar, sleep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from rl import build
from rl.check_gpu.lines import Asked, Line, result, skipped
from rl.config.schema import load_config, vllm_build
from rl.learner.backends import trainable_parameters
from rl.learner.learner import Learner
from rl.learner.weight_sync import MAX_MEAN_DLOGP_NATS, SyncError, sync
from rl.ranks.dist import Dist

INSTEAD = {"engine.type": "transformers"}
AWAKE = {"engine.residency": "resident"}


def engine(asked: Asked, name: str, config_name: str) -> Iterator[Line]:
    """The engine of a shipped small config beside its learner, as a run has them."""
    path, *words = asked.words(config_name)
    sleeps = [] if asked.tiny else ["engine.residency=sleep"]
    config = load_config(path, [*words, "engine.kv_cache_memory_mb=256", *sleeps])
    resolved, dist = build.resolve(config), Dist.from_env(asked.device)
    if not vllm_build():
        fix = "install requirements.lock into a new .venv"
        yield result(f"vLLM, {name}", False, "vLLM is not installed", fix, INSTEAD)
        return
    with ExitStack() as stack:
        policy = build.build_policy(resolved, dist)
        stack.callback(policy.close)
        started: Any = build.build_engine(resolved, policy, dist)
        stack.callback(started.close)
        graphs = "eager" if asked.tiny else "with CUDA graphs"
        yield result(f"vLLM, {name}: start", True, f"{asked.dtype}, {graphs}")
        [source] = build.build_data(resolved, resolved.train)
        prompts = [policy.build_prompt(source[index]) for index in range(2)]
        learner = Learner(policy, config, dist, num_iterations=1)

        def sample() -> Any:
            started.load_weights(learner.export_weights())  # forgets the prompts, as a sync does
            return started.generate(prompts, build.sampling_params(config), [7, 7000])

        temperature = config.sampling.temperature
        syncs = partial(sync, started, learner, prompts[0], asked.dtype, temperature)
        yield weight_sync(f"vLLM, {name}: weight sync", syncs, policy.module, asked.dtype)
        groups = sample()
        before = [completion.token_ids for group in groups for completion in group]

        def as_before() -> tuple[bool, str]:
            after = [completion.token_ids for group in sample() for completion in group]
            same = sum(a == b for a, b in zip(before, after, strict=True))
            return same == len(before), f"{same} of {len(before)} completions repeat"

        fix = "no resume is exact on this machine with vLLM; set engine.type=transformers"
        yield result(f"vLLM, {name}: same seeds", *as_before(), fix, INSTEAD)
        if policy.image_vocabulary is not None:
            whole = sum(c.finish == "stop" and any(c.forced) for group in groups for c in group)
            note, fix = f"{whole} of {len(before)} are whole", "set engine.type=transformers"
            good = whole == len(before)
            yield result(f"vLLM, {name}: pictures", good, note, fix, INSTEAD)
        what = f"vLLM, {name}: sleep, twice"
        if asked.tiny:
            yield skipped(what)
            return
        try:
            for _ in range(2):
                started.sleep()
                started.wake()  # raises where a weight has changed
            yield result(what, *as_before(), "set engine.residency=resident", AWAKE)
        except RuntimeError as error:
            yield result(what, False, str(error), "set engine.residency=resident", AWAKE)


def move(module: torch.nn.Module, seed: int = 1) -> None:
    """Change the trainable weights as training does: noise of standard deviation 0.02."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainable_parameters(module).values():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.02 * noise.to(parameter))


def weight_sync(what: str, syncs: Any, module: torch.nn.Module, dtype: str) -> Line:
    """Two syncs, all trained weights moved before each; `sync` reads back and compares."""
    report: Any = None
    try:
        for seed in (1, 2):
            move(module, seed)
            report = syncs(report)
    except SyncError as error:
        return result(what, False, str(error), "set engine.type=transformers", INSTEAD)
    note = f"log-probs differ by {report.mean_dlogp_nats:.0e} of {MAX_MEAN_DLOGP_NATS[dtype]:g}"
    return result(what, True, f"{note} nats; read back: {'yes' if report.read_back else 'no'}")


adapter = partial(engine, name="adapter", config_name="quickstart")
"""A LoRA beside the base weights."""
deepstack = partial(engine, name="deepstack", config_name="tiny_qwen_image_21")
"""Picture features of several levels, two pictures."""
grammar = partial(engine, name="grammar", config_name="tiny_earl")
"""Pictures written as tokens, all weights trained."""
