"""Finds, validates and builds the plugins that a config names; only `build_*` imports torch."""

from __future__ import annotations

import math
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rl.api import find
from rl.api.data import MAX_IMAGE_SIDE_PX, DataSource, RowRules, read_row
from rl.api.engine import Engine, EngineClaim, EngineSetup
from rl.api.plugin import ModelRunner, PlacedConfig, PluginBase, Resources, RunPlugin
from rl.api.policy import Policy, PolicySetup
from rl.api.renderer import Renderer
from rl.api.reward import Reward
from rl.api.types import PromptTemplate, UnusableSampleError
from rl.config.loading import is_dotted_path, nearest, validate
from rl.config.schema import (
    SHIPPED_LOSSES,
    ConfigError,
    JudgeConfig,
    PluginSection,
    RewardKeys,
    RunConfig,
    SourceKeys,
)
from rl.files import read_object
from rl.model_files import NotFiniteError, model_problems
from rl.ranks import signals
from rl.ranks.dist import Claim
from rl.seeds import derive_seed

if TYPE_CHECKING:
    from rl.judge.client import JudgeClient
    from rl.ranks.dist import Dist

PLUGIN_BASES: Mapping[str, type[PluginBase[Any]]] = {
    "policies": Policy,
    "engines": Engine,
    "renderers": Renderer,
    "rewards": Reward,
    "data": DataSource,
}
"""Folder of rl/ -> base class of the plugins in it."""
SHIPPED: Mapping[str, Mapping[str, str]] = {
    "policies": {
        "emu3": "emu3.Emu3",
        "qwen2_5_vl": "qwen_vl.Qwen25VL",
        "qwen3_vl": "qwen_vl.Qwen3VL",
    },
    "engines": {"transformers": "transformers.TransformersEngine", "vllm": "vllm.VllmEngine"},
    "renderers": {
        "diffusers": "stock_pipeline.StockPipeline",
        "emu3_vq": "emu3_vq.Emu3Vq",
        "images_api": "images_api.ImagesApi",
        "none": "none.NoRenderer",
        "qwen_image_21": "qwen_image_21.QwenImage21",
        "qwen_image_edit": "qwen_image_edit.QwenImageEdit",
        "qwen_image_edit_plus": "qwen_image_edit.QwenImageEditPlus",
        "sd3": "sd3.SD3",
    },
    "rewards": {
        "accuracy": "accuracy.Accuracy",
        "clip": "clip.Clip",
        "edit_quality": "judged.EditQuality",
        "expected_score": "judged.ExpectedScore",
        "format": "accuracy.Format",
        "ground_score": "judged.GroundScore",
        "ocr": "ocr.Ocr",
        "prompt_quality": "judged.PromptQuality",
        "rubric": "judged.Rubric",
        "spatial_reward": "judged.SpatialReward",
        "viescore": "judged.VieScore",
        "viescore_t2i": "judged.VieScoreT2I",
    },
    "data": {
        "edit_jsonl": "sources.EditJsonl",
        "emu3_tokens": "emu3_tokens.TokenisedEdits",
        "hf_dataset": "sources.HfDataset",
        "prompts": "sources.Prompts",
    },
}
"""Folder of rl/ -> name of a plugin -> its module and class there."""

LOOP = ("rl.rollout.", "rl.learner.", "rl.run.")
"""Modules that call plugins; the plugins' own folders never call them."""
CHECKED_ROWS = "RL_CHECKED_ROWS"
"""The environment variable with the file that hands `RowRules.checked` to the ranks of a start."""
PluginT = TypeVar("PluginT", bound=PluginBase[Any], covariant=True)
KeysT = TypeVar("KeysT", RewardKeys, SourceKeys)


@dataclass(frozen=True)
class Plugin(Generic[PluginT]):
    """A plugin with its section of the config."""

    key: str
    """The section's key in the config, e.g. 'rewards.viescore'."""
    config: Any
    """The plugin's own `Config`."""
    cls: type[PluginT]

    @property
    def name(self) -> str:
        """The section's `type`."""
        return str(self.config.type)

    @property
    def paths(self) -> Sequence[str]:
        """Where its models are, those with weights first: each path, then its subfolder. Without
        models the key `path`, '' if there is none."""
        models = self.cls.models(self.config) if issubclass(self.cls, RunPlugin) else []
        with_weights = sorted(models, key=lambda model: not model.weights)
        paths = [path for m in with_weights for path in (m.path, f"{m.path}/{m.subfolder}")]
        return paths or [getattr(self.config, "path", "")]


@dataclass(frozen=True)
class RewardPlugin(Plugin[Reward]):
    """A reward with the keys that its section may have beside its plugin's."""

    keys: RewardKeys

    @property
    def trains(self) -> bool:
        """Whether it counts in the final reward unless `final_reward.weights` says otherwise."""
        return not (self.cls.diagnostic or self.keys.held_out_only)


@dataclass(frozen=True)
class Resolved:
    """A config with all of its plugins."""

    config: RunConfig
    policy: Plugin[Policy]
    engine: Plugin[Engine]
    renderer: Plugin[Renderer]
    rewards: Mapping[str, RewardPlugin]
    train: Sequence[Plugin[DataSource]]
    train_keys: Sequence[SourceKeys]
    validation: Sequence[Plugin[DataSource]]

    @property
    def plugins(self) -> Sequence[Plugin[Any]]:
        """All plugins, in the order of the config."""
        parts = (self.policy, self.engine, self.renderer)
        return [*parts, *self.rewards.values(), *self.train, *self.validation]

    @property
    def model_runners(self) -> Sequence[Plugin[ModelRunner]]:
        """The plugins that may run a frozen model on the ranks."""
        renderers = [self.renderer] if self.config.pool is None else []
        return [*renderers, *self.rewards.values()]

    @property
    def needs_judge(self) -> bool:
        """Whether any reward asks a judge."""
        return any(plugin.cls.needs_judge for plugin in self.rewards.values())

    @property
    def by_judge(self) -> dict[str, Resolved]:
        """Config key of each judge -> its part of the run: the rewards that ask it, with it as
        `config.judge`. The part 'judge' also has the rewards that ask no judge. Rewards with equal
        judges share one, under the first one's key ('rewards.<name>.judge')."""
        judges = {"judge": self.config.judge}
        for plugin in self.rewards.values():
            own = plugin.keys.judge
            if own is not None and plugin.cls.needs_judge and own not in judges.values():
                judges[f"{plugin.key}.judge"] = own
        return {key: self._part(judge) for key, judge in judges.items()}

    def _part(self, judge: JudgeConfig) -> Resolved:
        rewards = {}
        for name, plugin in self.rewards.items():
            own = plugin.keys.judge if plugin.cls.needs_judge else None
            if (own or self.config.judge) == judge:
                without_own = plugin.keys.model_copy(update={"judge": None})
                rewards[name] = replace(plugin, keys=without_own)
        return replace(
            self, config=self.config.model_copy(update={"judge": judge}), rewards=rewards
        )


def resolve(config: RunConfig) -> Resolved:
    """Find and read every plugin. Raises ConfigError with all problems of all plugins."""
    problems: list[str] = []

    def plugin_of(kind: str, key: str, section: PluginSection) -> Any:
        plugin, wrong = find_plugin(kind, key, section)
        problems.extend(wrong)
        return plugin

    def keys_of(
        model: type[KeysT], key: str, section: PluginSection
    ) -> tuple[KeysT | None, PluginSection]:
        """(the keys that the run reads, those that the plugin reads)."""
        own = {name: section[name] for name in model.model_fields if name in section}
        keys, wrong = validate(model, own, at=key)
        problems.extend(wrong)
        return keys, {name: value for name, value in section.items() if name not in own}

    def reward_of(key: str, section: PluginSection) -> Any:
        keys, rest = keys_of(RewardKeys, key, section)
        plugin = plugin_of("rewards", key, rest)
        return (
            RewardPlugin(plugin.key, plugin.config, plugin.cls, keys) if plugin and keys else None
        )

    train, train_keys = [], []
    for i, section in enumerate(config.data.train):
        source_keys, rest = keys_of(SourceKeys, f"data.train.{i}", section)
        train_keys.append(source_keys or SourceKeys())
        train.append(plugin_of("data", f"data.train.{i}", rest))
    with_weight = [keys for keys in train_keys if keys.coefficient is None or keys.weight != 1]
    if with_weight and any(keys.coefficient is not None for keys in train_keys):
        problems.append(
            "data.train: a source has a weight or a coefficient (its weight is then coefficient x "
            "rows), not both; and give every source a coefficient, or none"
        )
    if config.algorithm.loss not in SHIPPED_LOSSES:
        loss, wrong = find.import_plugin(config.algorithm.loss)
        wrong = wrong or find.loss_problems(loss)
        problems.extend(f"algorithm.loss: {problem}" for problem in wrong)
    resolved = Resolved(
        config=config,
        policy=plugin_of("policies", "policy", config.policy),
        engine=plugin_of("engines", "engine", config.engine),
        renderer=plugin_of("renderers", "renderer", config.renderer),
        rewards={
            name: reward_of(f"rewards.{name}", section) for name, section in config.rewards.items()
        },
        train=train,
        train_keys=train_keys,
        validation=[
            plugin_of("data", f"data.validation.{i}", section)
            for i, section in enumerate(config.data.validation)
        ],
    )
    if problems:
        raise ConfigError(problems)
    counted = [name for name, plugin in resolved.rewards.items() if plugin.trains]
    if config.final_reward.weights or len(counted) == len(resolved.rewards):
        return resolved
    # Without stated weights, every reward that trains gets weight 1.
    final = config.final_reward.model_copy(update={"weights": dict.fromkeys(counted, 1.0)})
    return replace(resolved, config=config.model_copy(update={"final_reward": final}))


def find_plugin(
    kind: str, key: str, section: PluginSection
) -> tuple[Plugin[Any] | None, list[str]]:
    """(the plugin that `section` names, or None; problems). Imports it."""
    name, known = section.get("type"), list(SHIPPED[kind])
    if name not in known and not (isinstance(name, str) and is_dotted_path(name)):
        hint = nearest(str(name or ""), known)
        own = "(one of your own: its dotted path, 'my_package.my_plugin')"
        stated = "missing" if name is None else f"no plugin {name!r} in rl/{kind}"
        return None, [f"{key}.type: {stated}; {hint} {own}"]
    cls, wrong = find.import_plugin(class_path(kind, name) if name in known else name)
    if not wrong:
        cls, wrong = find.plugin_class(cls, PLUGIN_BASES[kind])
    if wrong:
        return None, [f"{key}.type: {problem}" for problem in wrong]
    config, problems = validate(cls.Config, section, at=key)
    if config is None:
        return None, problems
    plugin = Plugin(key, config, cls)
    if issubclass(cls, RunPlugin):  # first: other class methods read these files
        models, wrong = ask_plugin(plugin, "models")
        wrong = wrong or [f"{key}.{problem}" for problem in model_problems(models)]
    if not wrong:
        wrong = [
            f"{key}: {problem}"
            for problem in find.section_problems(cls, PLUGIN_BASES[kind], config)
        ]
    return plugin, wrong


def ask_plugin(plugin: Plugin[Any], member: str, *arguments: Any) -> tuple[Any, list[str]]:
    """Call a class method of the plugin with its section: (result, []), or (None, problems)."""
    result, wrong = find.ask(plugin.cls, member, plugin.config, *arguments)
    return result, [f"{plugin.key}: {problem}" for problem in wrong]


def class_path(kind: str, name: str) -> str:
    """Dotted path of a shipped plugin's class."""
    return f"rl.{kind}.{SHIPPED[kind][name]}"


def claims(resolved: Resolved) -> list[Claim]:
    """The device and memory that each plugin with a model claims in its section."""
    plugins: list[Plugin[Any]] = [resolved.policy, *resolved.model_runners]
    return [
        Claim(plugin.key, plugin.config.device, plugin.config.max_memory_gb)
        for plugin in plugins
        if isinstance(plugin.config, PlacedConfig)
    ]


def num_iterations(config: RunConfig, num_samples: int) -> int:
    """Iterations of the whole run. From `num_epochs`: rounded up, so that no row of the last epoch
    is left out; `num_samples` is the training mixture's length."""
    if config.num_iterations is not None:
        return config.num_iterations
    assert config.num_epochs is not None, "compatibility_problems refuses a config with neither"
    # `round` removes what binary fractions add: 0.28 x 100 is a little above 28.
    return math.ceil(round(config.num_epochs * num_samples / config.prompts_per_iteration, 9))


def prompt_template(config: Mapping[str, Any]) -> PromptTemplate | None:
    """`Policy.prompt_template` of a stored config; None also for plugins that are not shipped,
    whose code would run, and for an incomplete config."""
    parts = []
    for kind, key in (("renderers", "renderer"), ("policies", "policy")):
        section: Any = config.get(key)
        name = str(section.get("type")) if isinstance(section, Mapping) else ""
        if name not in SHIPPED[kind]:
            return None
        cls, _ = find.import_plugin(class_path(kind, name))
        parts.append((cls, validate(cls.Config, section, at=key)[0]))
    (renderer, renderer_config), (policy, policy_config) = parts
    if renderer_config is None or policy_config is None:
        return None
    return policy.prompt_template(policy_config, renderer.prompt_template(renderer_config))


def build_policy(resolved: Resolved, dist: Dist, keeps_start: bool = False) -> Policy:
    """Load the policy with the renderer's prompt template. `keeps_start`: as in `PolicySetup`."""
    config, renderer = resolved.config, resolved.renderer
    setup = PolicySetup(
        kind=renderer.cls.accepts,
        state_kind=renderer.cls.state_kind,
        template=renderer.cls.prompt_template(renderer.config),
        negative_prompt=renderer.cls.negative_prompt(renderer.config),
        temperature=config.sampling.temperature,
        max_completion_tokens=config.sampling.max_completion_tokens,
        gradient_checkpointing=config.optimizer.gradient_checkpointing,
        device=dist.device,
        seed=derive_seed(config.seed, "policy"),
        keeps_start=keeps_start,
    )
    return _made(resolved.policy, setup)


def build_engine(
    resolved: Resolved,
    policy: Policy,
    dist: Dist,
    has_room: bool = True,
    claim: EngineClaim | None = None,
) -> Engine:
    """Start the engine on the policy's base weights. `has_room`: it fits on the GPU
    together with all other models; `claim`: the GPU memory that it gets."""
    optimizer = resolved.config.optimizer
    sharded = optimizer.backend == "deepspeed" and optimizer.zero_stage == 3
    setup = EngineSetup(policy, dist.device, dist.world_size, has_room, claim, sharded)
    return resolved.engine.cls(resolved.engine.config, setup)


def build_renderer(resolved: Resolved, dist: Dist, is_first: bool = False) -> Renderer:
    """Load the frozen generator on this rank. `is_first`: as in `Resources`."""
    return _made(resolved.renderer, Resources(None, dist.device, is_first=is_first))


def _made(plugin: Plugin[PluginT], *arguments: Any) -> PluginT:
    """The plugin. Errors about unreadable files and non-finite weights get its key."""
    make: Callable[..., PluginT] = plugin.cls
    try:
        return make(plugin.config, *arguments)
    except NotFiniteError as error:
        raise ValueError(f"{plugin.key}: {error}") from error
    except OSError as error:
        raise ValueError(
            f"{plugin.key}: {plugin.name} cannot read its files: {error}\nGive a folder with "
            "them all, or a hub id that exists and can be reached (a gated one needs HF_TOKEN)."
        ) from error


def build_rewards(
    resolved: Resolved, judges: Mapping[str, JudgeClient], dist: Dist
) -> dict[str, Reward]:
    """Every reward, with the client of the judge that it asks. `judges`: by the keys of
    `Resolved.by_judge`."""
    judge_of = {name: key for key, part in resolved.by_judge.items() for name in part.rewards}
    return {
        name: _made(plugin, Resources(judges.get(judge_of[name]), dist.device))
        for name, plugin in resolved.rewards.items()
    }


def mixture_weights(resolved: Resolved, sources: Sequence[DataSource]) -> list[float]:
    """Weight of each training source, not normalised."""
    return [
        keys.weight if keys.coefficient is None else keys.coefficient * len(source)
        for keys, source in zip(resolved.train_keys, sources, strict=True)
    ]


def row_rules(resolved: Resolved, opens: int | None = None) -> RowRules:
    """The run's requirements for the rows of every source. `opens`: as in `RowRules`."""
    data, renderer, policy = resolved.config.data, resolved.renderer, resolved.policy
    template = renderer.cls.prompt_template(renderer.config)
    max_pictures = template.max_pictures if template else policy.cls.max_sources
    row_check = policy.cls.row_check(
        policy.config, template, resolved.config.sampling.max_completion_tokens
    )

    def check(*sample: Any) -> bool:
        renderer.cls.check_sources(renderer.config, sample[2])
        return row_check is None or row_check(*sample)

    checked = {}
    with suppress(OSError):
        # The variable may be inherited from an older start, whose file is gone; then the ranks
        # check the rows.
        checked = read_object(Path(os.environ.get(CHECKED_ROWS, os.devnull))) or {}
    weights = resolved.config.final_reward.weights or dict.fromkeys(resolved.rewards, 1.0)
    counted = {name.partition("/")[0] for name, weight in weights.items() if weight}
    return RowRules(
        data.on_bad_row,
        MAX_IMAGE_SIDE_PX,
        max_pictures,
        renderer.cls.reads_transparency,
        check,
        [
            partial(plugin.cls.check_sample, plugin.config)
            for name, plugin in resolved.rewards.items()
            if name in counted
        ],
        opens,
        checked,
    )


def build_data(resolved: Resolved, plugins: Sequence[Plugin[DataSource]]) -> list[DataSource]:
    """The sources of one mixture (`resolved.train` or `resolved.validation`).

    Raises ValueError for a source that cannot be opened, is empty or has a bad row that
    `data.on_bad_row` does not leave out.
    """
    rules = row_rules(resolved)
    return [open_source(plugin, rules) for plugin in plugins]


def open_source(plugin: Plugin[DataSource], rules: RowRules) -> DataSource:
    """The source. Raises ValueError if it cannot be opened, is empty or has a bad row that
    `data.on_bad_row` does not leave out."""
    at = f"{plugin.key}: {plugin.name}"
    try:
        source = plugin.cls(plugin.config, rules)
        num_rows = len(source)
        if num_rows == 0:
            left_out = f" ({source.num_skipped} bad ones left out)" if source.num_skipped else ""
            raise ValueError(f"{at} holds no row{left_out}")
        _check_rows(at, source, num_rows)
    except Exception as error:
        is_shipped = plugin.cls.__module__.startswith("rl.")
        if isinstance(error, ValueError) and (is_shipped or str(error).startswith(at)):
            raise
        raise ValueError(f"{at} raises {find.described(error)}") from error
    return source


def _check_rows(at: str, source: DataSource, num_rows: int) -> None:
    """Check the first, middle and last row. Rows that raise UnusableSampleError when they are read
    are skipped here: `PromptOrder` replaces or refuses them."""
    ids = {}
    for index in (0, num_rows // 2, num_rows - 1):
        with suppress(UnusableSampleError):
            ids[index] = read_row(source, index, at).id
    if len(ids) > 1 and len(set(ids.values())) == 1:
        raise ValueError(
            f"{at}: rows {', '.join(map(str, ids))} all have the id {min(ids.values())!r}; give "
            "each row an id of its own: held-out noise and file names are derived from it"
        )


@contextmanager
def naming_plugins(resolved: Resolved) -> Iterator[None]:
    """Whatever the user's own plugins raise within the block becomes a RuntimeError that names the
    plugin, the exception and the line, after its traceback has been printed. Errors of this package
    stay what they are."""
    try:
        yield
    except BaseException as error:
        is_ours = signals.is_raised_here(error) and not isinstance(error, SystemExit)
        name = "" if is_ours else _raising_plugin(resolved, error)
        if not name:
            raise
        traceback.print_exception(error)
        text = f"{name} raises {find.described(error)}"
        if advice := signals.sentence(error):  # a full disk or memory
            text += f"; {advice.partition(':')[2].strip()}"  # without 'this run cannot go on:'
        raise RuntimeError(text) from None


def _raising_plugin(resolved: Resolved, error: BaseException) -> str:
    """Key and name of the user's plugin whose class or function raised the error, or ''. Frames of
    the loop (`LOOP`) end the search: what it does inside a renderer's job is not the renderer's
    error."""
    loss = resolved.config.algorithm.loss
    module, _, name = loss.rpartition(".")
    codes_of = {f"algorithm.loss: {loss}": {(module, name)}}
    for plugin in resolved.plugins:
        codes_of[f"{plugin.key}: {plugin.name}"] = {
            (cls.__module__, cls.__name__) for cls in plugin.cls.__mro__
        }
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        module = str(frame.f_globals.get("__name__"))
        if module.startswith(LOOP):
            break
        code = (module, frame.f_code.co_qualname.partition(".")[0])
        names = [name for name, own in codes_of.items() if code in own]
        if names and not module.startswith("rl."):
            return " or ".join(names)
    return ""
