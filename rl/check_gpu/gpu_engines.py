"""Steps `vllm_*`: vLLM on the small policies: weight sync, seeds, the image grammar, sleep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from rl import build
from rl.api.types import Completion
from rl.check_gpu.lines import Line, Setup, result
from rl.config.schema import load_config
from rl.learner.backends import trainable_parameters
from rl.learner.learner import MAX_MEAN_DLOGP_NATS, Learner, SyncError, sync
from rl.ranks.dist import Dist

INSTEAD = {"engine.type": "transformers"}
FIX = "set engine.type=transformers"
AWAKE = {"engine.residency": "resident"}


class Opened:
    """The engine of a shipped small config beside its learner, as a run has them."""

    def __init__(self, setup: Setup, config_name: str, residency: str, stack: ExitStack) -> None:
        more = [] if setup.tiny else [f"engine.residency={residency}"]
        path, *words = setup.words(config_name, "engine.kv_cache_memory_mb=256", *more)
        self.config = load_config(path, [*words, "engine.type=vllm"])
        resolved, dist = build.resolve(self.config), Dist.from_env(setup.device)
        self.policy = build.build_policy(resolved, dist)
        stack.callback(self.policy.close)
        self.engine: Any = build.build_engine(resolved, self.policy, dist)
        stack.callback(self.engine.close)
        [source] = build.build_data(resolved, resolved.train)
        self.prompts = [self.policy.build_prompt(source[index]) for index in range(2)]
        self.learner = Learner(self.policy, self.config, dist, num_iterations=1)

    def sample(self) -> list[Completion]:
        """Of both prompts, with the same seeds each time."""
        self.engine.load_weights(self.learner.export_weights())  # forgets the prompts, as a sync
        params = build.sampling_params(self.config)
        groups = self.engine.generate(self.prompts, params, [7, 7000])
        return [completion for group in groups for completion in group]


def repeats(before: Sequence[Completion], after: Sequence[Completion]) -> tuple[bool, str]:
    same = sum(a.token_ids == b.token_ids for a, b in zip(before, after, strict=True))
    return same == len(before), f"{same} of {len(before)} completions repeat"


def engine(setup: Setup, name: str, config_name: str) -> Iterator[Line]:
    """Start, weight sync, seeds; pictures if the policy writes them."""
    what = f"vLLM, {name}: "
    with ExitStack() as stack:
        opened = Opened(setup, config_name, "resident", stack)
        policy = opened.policy
        graphs = "eager" if setup.tiny else "with CUDA graphs"
        yield result(f"{what}start", True, f"{setup.dtype}, {graphs}")
        temperature = opened.config.sampling.temperature
        syncs = partial(
            sync, opened.engine, opened.learner, opened.prompts[0], setup.dtype, temperature
        )
        yield weight_sync(f"{what}weight sync", syncs, policy.module, setup.dtype)
        before = opened.sample()
        fix = f"no resume is exact on this machine with vLLM; {FIX}"
        yield result(f"{what}same seeds", *repeats(before, opened.sample()), fix, INSTEAD)
        if policy.image_vocabulary is not None:
            whole = sum(c.finish == "stop" and any(c.forced or ()) for c in before)
            good, note = whole == len(before), f"{whole} of {len(before)} are whole"
            yield result(f"{what}pictures", good, note, FIX, INSTEAD)


def sleep(setup: Setup, config_name: str) -> Iterator[Line]:
    """Two sleeps, after which the same seeds must give the same completions."""
    with ExitStack() as stack:
        opened = Opened(setup, config_name, "sleep", stack)
        before, fix = opened.sample(), "set engine.residency=resident"
        try:
            for _ in range(2):
                opened.engine.sleep()
                opened.engine.wake()  # raises where a weight has changed
            good, note = repeats(before, opened.sample())
        except RuntimeError as error:
            good, note = False, str(error)
        yield result("vLLM: sleep, twice", good, note, fix, AWAKE)


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
        return result(what, False, str(error), FIX, INSTEAD)
    note = f"log-probs differ by {report.mean_dlogp_nats:.0e} of {MAX_MEAN_DLOGP_NATS[dtype]:g}"
    return result(what, True, f"{note} nats; read back: {'yes' if report.read_back else 'no'}")
