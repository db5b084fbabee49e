"""From a config to the plugs it names: find them, check that they fit, make them.

What: `resolve` (import the plug files and read their sections), `fit_problems` (the rules across
rooms: what the policy emits and the renderer takes, what rewards need, batch arithmetic) and one
`build_*` per room. What not: the rules within a section (`validation.py`) and within a plug (its
own `Config`); the report (`check.py`). Nothing heavy is imported before a `build_*` is called.
Called by `check.py` before any process starts and by `train.py` on every rank.
"""

from __future__ import annotations

import difflib
import importlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rl.config import ConfigError, PlugSection, RunConfig
from rl.system.judge_endpoint import resolve_api_base
from rl.types import DataSource, Engine, Policy, Renderer, Reward, SamplingParams
from rl.validation import validate

if TYPE_CHECKING:
    from rl.system.dist import Dist
    from rl.system.judge_client import JudgeClient

ROOMS: Mapping[str, tuple[str, ...]] = {
    "policies": ("Config", "EMITS", "NEEDS", "validate", "build"),
    "engines": ("Config", "build"),
    "renderers": (
        "Config",
        "ACCEPTS",
        "MAKES_IMAGES",
        "prompt_template",
        "negative_prompt",
        "validate",
        "parameter_counts",
        "activation_counts",
        "build",
    ),
    "rewards": ("Config", "NEEDS", "NEEDS_JUDGE", "build"),
    "data": ("Config", "provides", "check", "count", "build"),
}
"""What a plug file of each room exports."""


@dataclass(frozen=True)
class Plug:
    """One file of a room with its section of the config, read."""

    key: str
    """Where the section stands in the config, e.g. 'rewards.viescore'."""
    module: ModuleType
    config: Any
    """The plug's own `Config`."""

    @property
    def name(self) -> str:
        """As the config's `type` names it."""
        return str(self.config.type)


@dataclass(frozen=True)
class Resolved:
    """A config whose every plug has been found."""

    config: RunConfig
    policy: Plug
    engine: Plug
    renderer: Plug
    rewards: Mapping[str, Plug]
    train: Sequence[Plug]
    train_weights: Sequence[float]
    """Mixture weights of `train`, as given (not normalised)."""
    validation: Sequence[Plug]

    @property
    def needs_judge(self) -> bool:
        """Whether any reward asks the judge."""
        return any(plug.module.NEEDS_JUDGE for plug in self.rewards.values())


def resolve(config: RunConfig) -> Resolved:
    """Find and read every plug. Raises ConfigError with all problems of all plugs."""
    problems: list[str] = []

    def find(room: str, key: str, section: PlugSection) -> Any:
        plug, wrong = _find_plug(room, key, section)
        problems.extend(wrong)
        return plug

    def find_data(name: str, sections: Sequence[PlugSection]) -> list[Any]:
        bare = [{k: v for k, v in section.items() if k != "weight"} for section in sections]
        return [find("data", f"data.{name}.{i}", section) for i, section in enumerate(bare)]

    weights = [section.get("weight", 1) for section in config.data.train]
    for i, weight in enumerate(weights):
        if type(weight) not in (int, float) or not (0 < weight < math.inf):
            problems.append(f"data.train.{i}.weight: {weight!r} given, must be a number > 0")
    for i, section in enumerate(config.data.validation):
        if "weight" in section:
            problems.append(f"data.validation.{i}.weight: validation is read in order; drop weight")
    resolved = Resolved(
        config=config,
        policy=find("policies", "policy", config.policy),
        engine=find("engines", "engine", config.engine),
        renderer=find("renderers", "renderer", config.renderer),
        rewards={
            name: find("rewards", f"rewards.{name}", section)
            for name, section in config.rewards.items()
        },
        train=find_data("train", config.data.train),
        train_weights=weights,
        validation=find_data("validation", config.data.validation),
    )
    if problems:
        raise ConfigError(problems)
    return resolved


def _find_plug(room: str, key: str, section: PlugSection) -> tuple[Plug | None, list[str]]:
    """The plug that `section` names, or None and what is wrong."""
    name = section.get("type")
    known = plugs_of(room)
    if not isinstance(name, str) or not name:
        return None, [f"{key}.type: missing; name a file of rl/{room}: {', '.join(known)}"]
    dotted = name if "." in name else f"rl.{room}.{name}"
    try:
        module = importlib.import_module(dotted)
    except ModuleNotFoundError as error:
        if not (error.name and (dotted == error.name or dotted.startswith(f"{error.name}."))):
            return None, [f"{key}.type: {name!r} imports {error.name!r}, which is not installed"]
        if "." in name:
            return None, [
                f"{key}.type: no module {error.name!r} among the installed ones or in {Path.cwd()}"
            ]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        return None, [
            f"{key}.type: no plug {name!r} in rl/{room}; {hint} "
            "(a module of your own: its dotted path, 'my_package.my_plug')"
        ]
    missing = [export for export in ROOMS[room] if not hasattr(module, export)]
    if missing:
        return None, [f"{key}.type: {dotted} is no plug of rl/{room}: lacks {', '.join(missing)}"]
    config, problems = validate(module.Config, section, at=key)
    return (Plug(key, module, config) if config else None), problems


def plugs_of(room: str) -> list[str]:
    """Names of the plug files that lie in a room."""
    folder = Path(__file__).parent / room
    return sorted(file.stem for file in folder.glob("*.py") if not file.stem.startswith("_"))


def fit_problems(resolved: Resolved) -> list[str]:
    """Everything that keeps these plugs from running together, each with its key and remedy."""
    return [
        *_room_problems(resolved),
        *_reward_problems(resolved),
        *_judge_problems(resolved),
        *_learning_problems(resolved),
        *_batch_problems(resolved.config),
        *_data_problems(resolved),
    ]


def _room_problems(resolved: Resolved) -> Iterable[str]:
    policy, renderer = resolved.policy, resolved.renderer
    accepts, emits = renderer.module.ACCEPTS, policy.module.EMITS
    if accepts not in emits:
        yield (
            f"renderer.type: {renderer.name} takes {accepts}, but policy {policy.name} emits "
            f"{' or '.join(sorted(emits))}; choose a renderer that takes one of these"
        )
    for plug in (policy, renderer):
        yield from (f"{plug.key}.{problem}" for problem in plug.module.validate(plug.config))
    length = getattr(resolved.engine.config, "max_model_len", None)
    longest = resolved.config.sampling.max_completion_tokens
    prompt = getattr(policy.config, "max_prompt_tokens", 0)
    if length is not None and length < prompt + longest:
        yield (
            f"engine.max_model_len: {length} tokens hold no prompt of {prompt} "
            f"(policy.max_prompt_tokens) with a completion of {longest} "
            f"(sampling.max_completion_tokens); needs {prompt + longest}"
        )


def _reward_problems(resolved: Resolved) -> Iterable[str]:
    if not resolved.rewards:
        yield "rewards: empty; give at least one, e.g. { viescore: { type: 'viescore' } }"
    sources = [*resolved.train, *resolved.validation]
    for plug in resolved.rewards.values():
        for need in sorted(plug.module.NEEDS):
            if need == "text":
                continue
            if need == "image":
                if not resolved.renderer.module.MAKES_IMAGES:
                    makes_none = f"renderer {resolved.renderer.name} makes none"
                    yield f"{plug.key}: needs pictures, and {makes_none}; drop it or render"
                continue
            named = need if need in ("source", "target", "reference") else f"hidden:{need}"
            lacking = [s.key for s in sources if named not in s.module.provides(s.config)]
            if lacking:
                yield (
                    f"{plug.key}: needs each sample's {need!r}, which {', '.join(lacking)} does "
                    "not provide; map a column to it"
                )
    known = set(resolved.rewards)
    for name, plug in resolved.rewards.items():
        known |= {f"{name}/{part}" for part in getattr(plug.module, "UNIT_PARTS", ())}
    for name, weight in resolved.config.final_reward.weights.items():
        if name not in known:
            yield f"final_reward.weights.{name}: no such reward; known: {', '.join(sorted(known))}"
        if not 0 <= weight < math.inf:
            yield f"final_reward.weights.{name}: {weight} given, must be >= 0"
    weights = resolved.config.final_reward.weights
    if weights and not any(weights.values()):
        yield "final_reward.weights: all zero; give at least one reward a weight > 0"


def _judge_problems(resolved: Resolved) -> Iterable[str]:
    judge = resolved.config.judge
    if not resolved.needs_judge:
        return
    if judge.api_base != "embedded":
        try:
            resolve_api_base(judge.api_base)
        except ValueError as error:
            yield str(error)
    if judge.api_key_env and judge.api_key_env not in os.environ:
        yield (
            f"judge.api_key_env: the environment variable {judge.api_key_env} is not set; export "
            "the judge's key under that name"
        )


def _learning_problems(resolved: Resolved) -> Iterable[str]:
    algorithm, optimizer = resolved.config.algorithm, resolved.config.optimizer
    in_loss = algorithm.kl_coeff > 0 and algorithm.kl_placement == "loss"
    if in_loss and algorithm.kl_estimator == "k1":
        yield (
            "algorithm.kl_estimator: 'k1' in the loss pulls nowhere (on-policy its expected "
            "gradient is zero); use 'k2' or 'k3', or kl_placement 'reward'"
        )
    if algorithm.loss == "dapo" and algorithm.clip_high <= algorithm.clip_low:
        yield (
            f"algorithm.clip_high: {algorithm.clip_high} is not above clip_low, so that 'dapo' is "
            "'grpo'; use 0.28, or loss 'grpo'"
        )
    shards = optimizer.backend == "deepspeed" and optimizer.zero_stage == 3
    if shards and getattr(resolved.engine.module, "SAMPLES_WITH_TRAINER", False):
        yield (
            f"engine.type: {resolved.engine.name} samples with the trainer's own weights, which "
            "ZeRO-3 shards; use engine 'vllm', or optimizer.zero_stage <= 2"
        )


def _batch_problems(config: RunConfig) -> Iterable[str]:
    if (config.num_iterations is None) == (config.num_epochs is None):
        both = config.num_iterations is not None
        yield (
            "num_iterations, num_epochs: both given; keep one"
            if both
            else "num_iterations, num_epochs: neither given; set one"
        )
    prompts, ranks = config.prompts_per_iteration, config.world_size
    if prompts % ranks:
        below, above = prompts // ranks * ranks, -(-prompts // ranks) * ranks
        near = f"{below} or {above}" if below else f"{above}"
        yield (
            f"prompts_per_iteration: {prompts} prompts cannot be shared by {ranks} ranks "
            f"(world_size); use {near}"
        )
    elif config.optimizer.updates_per_iteration > prompts // ranks:
        yield (
            f"optimizer.updates_per_iteration: {config.optimizer.updates_per_iteration} updates, "
            f"but each rank has only {prompts // ranks} groups an iteration to split among them"
        )
    if config.generations_per_prompt == 1:
        yield (
            "generations_per_prompt: 1 completion is always its own mean, so nothing is ever "
            "learnt; use 2 or more (8 is usual)"
        )
    if config.optimizer.warmup_iterations >= (config.num_iterations or math.inf):
        yield (
            f"optimizer.warmup_iterations: {config.optimizer.warmup_iterations} covers all "
            f"{config.num_iterations} iterations of the run; make it smaller"
        )
    if (
        config.checkpoint.push_to_hub_every_n_iterations
        and not config.checkpoint.push_to_hub_repo_id
    ):
        yield "checkpoint.push_to_hub_repo_id: empty; name the hub repository to push to"


def _data_problems(resolved: Resolved) -> Iterable[str]:
    data = resolved.config.data
    if not resolved.train:
        yield "data.train: empty; give at least one source"
    if resolved.config.evaluation.every_n_iterations and not resolved.validation:
        yield (
            "data.validation: empty, and evaluation.every_n_iterations asks for a held-out run; "
            "give a source or set that key to 0"
        )
    template = resolved.renderer.module.prompt_template(resolved.renderer.config)
    needs_picture = template is not None and "{image}" in template.text
    for plug in [*resolved.train, *resolved.validation]:
        found = plug.module.check(plug.config, data.on_bad_row, data.max_image_side_px)
        yield from (f"{plug.key}: {problem}" for problem in found)
        if needs_picture and "source" not in plug.module.provides(plug.config):
            yield (
                f"{plug.key}: renderer {resolved.renderer.name} edits a picture, and these samples "
                "have no source; map a column to it"
            )


def num_iterations(config: RunConfig, num_samples: int) -> int:
    """Iterations of the whole run; `num_samples` is the training mixture's length."""
    if config.num_iterations is not None:
        return config.num_iterations
    assert config.num_epochs is not None, "fit_problems refuses a config with neither"
    return max(1, round(config.num_epochs * num_samples / config.prompts_per_iteration))


def sampling_params(config: RunConfig) -> SamplingParams:
    """How training completions are drawn."""
    return SamplingParams(
        temperature=config.sampling.temperature,
        top_p=config.sampling.top_p,
        top_k=config.sampling.top_k,
        max_tokens=config.sampling.max_completion_tokens,
        num_completions=config.generations_per_prompt,
    )


def build_policy(resolved: Resolved, dist: Dist) -> Policy:
    """Load the policy under the renderer's own prompt template."""
    config, renderer = resolved.config, resolved.renderer
    with _readable(resolved.policy):
        policy: Policy = resolved.policy.module.build(
            resolved.policy.config,
            template=renderer.module.prompt_template(renderer.config),
            kind=renderer.module.ACCEPTS,
            negative_prompt=renderer.module.negative_prompt(renderer.config),
            temperature=config.sampling.temperature,
            max_completion_tokens=config.sampling.max_completion_tokens,
            gradient_checkpointing=config.optimizer.gradient_checkpointing,
            device=dist.device,
        )
    return policy


def build_engine(resolved: Resolved, policy: Policy, dist: Dist) -> Engine:
    """Start the sampler on the policy's base weights."""
    engine: Engine = resolved.engine.module.build(resolved.engine.config, policy, dist)
    return engine


def build_renderer(resolved: Resolved, dist: Dist) -> Renderer:
    """Load the frozen generator."""
    plug = resolved.renderer
    with _readable(plug):
        renderer: Renderer = plug.module.build(plug.config, dist.device)
    return renderer


@contextmanager
def _readable(plug: Plug) -> Iterator[None]:
    """A hub id that does not exist, or a folder that lacks a file, is the user's to mend."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{plug.key}: {plug.name} could not read its files: {error}\nGive a folder that holds "
            "them all, or a hub id that exists and can be reached (a gated one needs HF_TOKEN)."
        ) from error


def build_rewards(
    resolved: Resolved, judge: JudgeClient | None, dist: Dist
) -> dict[str, Reward]:
    """Every reward, over one judge client (None when no reward asks one)."""
    rewards: dict[str, Reward] = {}
    for name, plug in resolved.rewards.items():
        with _readable(plug):
            rewards[name] = plug.module.build(plug.config, judge, dist.device)
    return rewards


def build_data(resolved: Resolved, plugs: Sequence[Plug]) -> list[DataSource]:
    """The sources of one mixture (`resolved.train` or `resolved.validation`)."""
    data = resolved.config.data
    return [p.module.build(p.config, data.on_bad_row, data.max_image_side_px) for p in plugs]
