"""Step 4: vLLM on the small policies: sampling, weight sync, seeds, the image grammar, sleep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rl import build
from rl.api.types import Completion, Prompt, SamplingParams
from rl.check_gpu.lines import NEEDS_CUDA, Asked, Line, closing, failed, ok, skipped
from rl.config.schema import RunConfig, vllm_build
from rl.learner.learner import Learner
from rl.learner.weight_sync import MAX_MEAN_DLOGP_NATS, SyncError, sync
from rl.ranks.dist import Dist

NUM_PROMPTS = 2
NO_SYNC = "set engine.type=transformers, which samples with the trainer's own weights"


def adapter(asked: Asked) -> Iterator[Line]:
    """quickstart's policy: a LoRA beside the base weights, one picture."""
    return _engine(asked, "quickstart", "adapter")


def deepstack(asked: Asked) -> Iterator[Line]:
    """tiny_qwen_image_21's policy: features of several levels, two pictures."""
    return _engine(asked, "tiny_qwen_image_21", "deepstack")


def grammar(asked: Asked) -> Iterator[Line]:
    """tiny_earl's policy: pictures as tokens, all weights trained."""
    return _engine(asked, "tiny_earl", "grammar")


@dataclass(frozen=True, eq=False)
class Started:
    """An engine beside its trainer."""

    name: str
    config: RunConfig
    policy: Any
    engine: Any
    learner: Learner
    prompts: Sequence[Prompt]
    params: SamplingParams

    def sample(self) -> list[list[Completion]]:
        return self.engine.generate(self.prompts, self.params, [7, 7000][: len(self.prompts)])


def _engine(asked: Asked, config_name: str, name: str) -> Iterator[Line]:
    what = f"vLLM, {name}: "
    if not vllm_build():
        yield failed(
            f"{what}start", "vLLM is not installed", "install requirements.lock into a new .venv"
        )
        return
    sleeps = [] if asked.tiny else ["engine.residency=sleep"]
    config = asked.config_of(config_name, "engine.kv_cache_memory_mb=256", *sleeps)
    resolved, dist = build.resolve(config), Dist.from_env(asked.device)
    with closing() as stack:
        policy = build.build_policy(resolved, dist)
        stack.callback(policy.close)
        engine: Any = build.build_engine(resolved, policy, dist)
        stack.callback(engine.close)
        graphs = "eager" if asked.tiny else "CUDA graphs"
        yield ok(f"{what}start", f"{resolved.engine.name}, {policy.config.dtype}, {graphs}")
        [source] = build.build_data(resolved, resolved.train)
        started = Started(
            name,
            config,
            policy,
            engine,
            Learner(policy, config, dist, num_iterations=1),
            [policy.build_prompt(source[index]) for index in range(NUM_PROMPTS)],
            build.sampling_params(config),
        )
        yield weight_sync(what, started)
        yield repeats(what, started)
        if policy.image_vocabulary is not None:
            yield pictures(what, started)
        if asked.tiny:
            yield skipped(f"{what}sleep", NEEDS_CUDA)
        else:
            yield sleep(what, started)


def move(learner_policy: Any, scale: float, seed: int) -> None:
    """Changes every trained weight, as an optimizer step would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in learner_policy.module.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(scale * noise.to(parameter))


def weight_sync(what: str, started: Started) -> Line:
    """Two syncs of moved weights, read back, and compared by their log-probs."""
    dtype, temperature = str(started.policy.config.dtype), started.config.sampling.temperature
    report = None
    try:
        for seed in (1, 2):
            move(started.policy, 0.02, seed)
            report = sync(
                started.engine, started.learner, started.prompts[0], dtype, temperature, report
            )
    except SyncError as error:
        return failed(f"{what}weight sync", str(error), NO_SYNC, engine__type="transformers")
    assert report is not None
    read_back = "read back, " if report.read_back else ""
    limit = MAX_MEAN_DLOGP_NATS[dtype]
    note = f"{read_back}log-probs differ by {report.mean_dlogp_nats:.1e} nats of {limit:g}"
    return ok(f"{what}weight sync", note)


def repeats(what: str, started: Started) -> Line:
    """The same seeds give the same tokens."""
    first, second = ([c.token_ids for group in started.sample() for c in group] for _ in range(2))
    equal = sum(a == b for a, b in zip(first, second, strict=True))
    note = f"{equal} of {len(first)} completions repeat under the same seeds"
    if equal == len(first):
        return ok(f"{what}sampling", note)
    fix = "a resumed run will not be exact; set engine.type=transformers if you need that"
    return failed(f"{what}sampling", note, fix)


def pictures(what: str, started: Started) -> Line:
    """Every completion has its whole picture: the grammar allows no other."""
    params = replace(started.params, max_tokens=started.config.sampling.max_completion_tokens)
    groups = started.engine.generate(started.prompts, params, [7, 7000])
    whole = sum(len([c for c in group if c.finish == "stop" and any(c.forced)]) for group in groups)
    total = sum(map(len, groups))
    note = f"{whole} of {total} completions follow the grammar to its end"
    if whole == total:
        return ok(f"{what}pictures", note)
    return failed(f"{what}pictures", note, NO_SYNC, engine__type="transformers")


def sleep(what: str, started: Started) -> Line:
    """Two sleeps; the engine compares the sums of its weights when it wakes."""
    before = [c.token_ids for group in started.sample() for c in group]
    freed_gb = 0.0
    try:
        for _ in range(2):
            free = torch.cuda.mem_get_info()[0]
            started.engine.sleep()
            freed_gb = (torch.cuda.mem_get_info()[0] - free) / 1e9
            started.engine.wake()
        after = [c.token_ids for group in started.sample() for c in group]
    except RuntimeError as error:
        return failed(
            f"{what}sleep",
            str(error),
            "set engine.residency=resident",
            engine__residency="resident",
        )
    equal = sum(a == b for a, b in zip(before, after, strict=True))
    note = f"twice, freed {freed_gb:.2f} GB, {equal} of {len(before)} completions as before"
    if equal == len(before):
        return ok(f"{what}sleep", note)
    fix = "set engine.residency=resident"
    return failed(f"{what}sleep", note, fix, engine__residency="resident")
