"""From a config to the plugs it names: find them, read their sections, make them.

What: `resolve` (import the plug files and read their sections) and one `build_*` per room. What
not: the rules across rooms (`preflight/compatibility.py`), within a section (`config/messages.py`)
and within a plug (its own `Config`); the report (`preflight/report.py`). Nothing heavy is imported
before a `build_*` is called. Called by `preflight/report.py` before any process starts and by
`train.py` on every rank.
"""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rl.api.contracts import DataSource, Engine, Policy, Renderer, Reward
from rl.api.types import SamplingParams
from rl.config.messages import validate
from rl.config.schema import ConfigError, PlugSection, RunConfig
from rl.ranks.placement import Claim, claims_of

if TYPE_CHECKING:
    from rl.judge.client import JudgeClient
    from rl.ranks.dist import Dist

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

WEIGHTS = ("weight", "coefficient")
"""Keys of a training source's section that are the mixture's, not the plug's."""


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
    weights_per_row: bool
    """They were given as coefficients: each times its source's rows is the weight."""
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
        bare = [{k: v for k, v in section.items() if k not in WEIGHTS} for section in sections]
        return [find("data", f"data.{name}.{i}", section) for i, section in enumerate(bare)]

    weights, per_row, wrong = _weights(config)
    problems.extend(wrong)
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
        weights_per_row=per_row,
        validation=find_data("validation", config.data.validation),
    )
    if problems:
        raise ConfigError(problems)
    return replace(resolved, config=_without_diagnostics(resolved))


def _weights(config: RunConfig) -> tuple[list[float], bool, list[str]]:
    """(`weight` or `coefficient` of each training source, whether they are coefficients, what is
    wrong with them)."""
    sources = config.data.train
    given = [{key: section[key] for key in WEIGHTS if key in section} for section in sources]
    problems = [
        f"data.train.{i}.{key}: {value!r} given, must be a number > 0"
        for i, entry in enumerate(given)
        for key, value in entry.items()
        if type(value) not in (int, float) or not (0 < value < math.inf)
    ]
    for i, section in enumerate(config.data.validation):
        problems += [
            f"data.validation.{i}.{key}: validation is read in order; drop {key}"
            for key in WEIGHTS
            if key in section
        ]
    per_row = any("coefficient" in entry for entry in given)
    if per_row and any("coefficient" not in entry or "weight" in entry for entry in given):
        problems.append(
            "data.train: give every source a coefficient (its weight is coefficient x rows), or "
            "none of them"
        )
    key = "coefficient" if per_row else "weight"
    return [entry.get(key, 1) for entry in given], per_row, problems


def _without_diagnostics(resolved: Resolved) -> RunConfig:
    """With no weights given, every reward that is not a mere diagnostic counts once."""
    config = resolved.config
    counted = [n for n, plug in resolved.rewards.items() if not _is_diagnostic(plug)]
    if config.final_reward.weights or len(counted) == len(resolved.rewards):
        return config
    final = config.final_reward.model_copy(update={"weights": dict.fromkeys(counted, 1.0)})
    return config.model_copy(update={"final_reward": final})


def _is_diagnostic(plug: Plug) -> bool:
    return getattr(plug.module, "DIAGNOSTIC", False)


def _find_plug(room: str, key: str, section: PlugSection) -> tuple[Plug | None, list[str]]:
    """The plug that `section` names, or None and what is wrong."""
    name = section.get("type")
    known = plugs_of(room)
    if not isinstance(name, str) or not name:
        return None, [f"{key}.type: missing; name a file of rl/{room}: {', '.join(known)}"]
    dotted = name if "." in name else module_of(room, name)
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
    """Names of the plugs that lie in a room: its files, and its folders that hold a `plug.py`."""
    folder = Path(__file__).parent / room
    files = [file.stem for file in folder.glob("*.py") if file.stem != "__init__"]
    return sorted([*files, *(file.parent.name for file in folder.glob("*/plug.py"))])


def module_of(room: str, name: str) -> str:
    """Dotted path of a shipped plug."""
    is_folder = (Path(__file__).parent / room / name / "plug.py").is_file()
    return f"rl.{room}.{name}.plug" if is_folder else f"rl.{room}.{name}"


def claims(resolved: Resolved) -> list[Claim]:
    """What each plug that runs a model says of its device and memory."""
    plugs = [resolved.policy, resolved.renderer, *resolved.rewards.values()]
    return claims_of((plug.key, plug.config) for plug in plugs)


def num_iterations(config: RunConfig, num_samples: int) -> int:
    """Iterations of the whole run; `num_samples` is the training mixture's length."""
    if config.num_iterations is not None:
        return config.num_iterations
    assert config.num_epochs is not None, "compatibility_problems refuses a config with neither"
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


def build_engine(resolved: Resolved, policy: Policy, dist: Dist, has_room: bool = True) -> Engine:
    """Start the sampler on the policy's base weights. `has_room`: beside all others on the GPU."""
    optimizer = resolved.config.optimizer
    engine: Engine = resolved.engine.module.build(
        resolved.engine.config,
        policy,
        dist,
        has_room=has_room,
        sharded=optimizer.backend == "deepspeed" and optimizer.zero_stage == 3,
    )
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


def build_rewards(resolved: Resolved, judge: JudgeClient | None, dist: Dist) -> dict[str, Reward]:
    """Every reward, over one judge client (None when no reward asks one)."""
    rewards: dict[str, Reward] = {}
    for name, plug in resolved.rewards.items():
        with _readable(plug):
            rewards[name] = plug.module.build(plug.config, judge, dist.device)
    return rewards


def mixture_weights(resolved: Resolved, sources: Sequence[DataSource]) -> list[float]:
    """Weight of each training source, not normalised."""
    if not resolved.weights_per_row:
        return list(resolved.train_weights)
    return [w * len(s) for w, s in zip(resolved.train_weights, sources, strict=True)]


def build_data(resolved: Resolved, plugs: Sequence[Plug]) -> list[DataSource]:
    """The sources of one mixture (`resolved.train` or `resolved.validation`)."""
    data = resolved.config.data
    return [p.module.build(p.config, data.on_bad_row, data.max_image_side_px) for p in plugs]
