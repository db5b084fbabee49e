"""Which plugins fit together, licences, what fits into memory, and what a resume may change."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from rl.api.plugin import SavesMemory
from rl.build import Plugin, Resolved, ask_plugin, claims
from rl.check import memory_plan
from rl.check.memory_plan import Plan
from rl.config.schema import MAX_EPISODES, RAY_MISSING, RunConfig, changed
from rl.judge.http import auth_header, resolve_api_bases
from rl.judge.server import start_problems
from rl.model_files import licence_of
from rl.ranks import dist

# ---- compatibility -------------------------------------------------------------------------------
# Checks whether the chosen plugins can run together: rules that involve several of them.

RANKS_OF_A_NODE = 8
"""The most ranks that one machine is assumed to have."""
READABLE = frozenset({"source", "image", "target", "text", "reference"})
"""Names that a reward may put in `needs`; any other name is a key of `Sample.hidden`."""


def compatibility_problems(resolved: Resolved) -> list[str]:
    """Everything that keeps these plugins from running together, each with its key and remedy."""
    return [*plugin_problems(resolved), *_data_problems(resolved), *licence_problems(resolved)]


def plugin_problems(resolved: Resolved) -> list[str]:
    """`compatibility_problems` without those of the data sources."""
    return [
        *_model_problems(resolved),
        *_reward_problems(resolved),
        *_judge_problems(resolved),
        *_learning_problems(resolved),
        *_placement_problems(resolved),
        *_pool_problems(resolved),
    ]


def _pool_problems(resolved: Resolved) -> Iterable[str]:
    if resolved.config.pool is None:
        return
    if find_spec("ray") is None:
        yield RAY_MISSING
    if not resolved.renderer.cls.makes_images:
        yield f"render_pool: renderer {resolved.renderer.name} draws nothing; drop render_pool"


def _own_problems(plugin: Plugin[Any], config: RunConfig) -> Iterable[str]:
    """Problems that a plugin reports."""
    problems, wrong = ask_plugin(plugin, "problems", config)
    yield from (f"{plugin.key}.{problem}" for problem in problems or ())
    yield from wrong


def _sources_without(resolved: Resolved, need: str) -> str:
    """Config keys of the data sources that do not provide `need`."""
    sources = [*resolved.train, *resolved.validation]
    return ", ".join(s.key for s in sources if need not in s.cls.provides(s.config))


def _model_problems(resolved: Resolved) -> Iterable[str]:
    policy, engine, renderer = resolved.policy, resolved.engine, resolved.renderer
    accepts, emits = renderer.cls.accepts, policy.cls.emits
    sizes, width = memory_plan.sizes(resolved), renderer.cls.state_dim_of(renderer.config)
    if accepts not in emits:
        yield (
            f"renderer.type: {renderer.name} takes {accepts}, but policy {policy.name} emits "
            f"{' or '.join(sorted(emits))}; choose a renderer that takes one of these"
        )
    elif accepts == "hidden_states" and renderer.cls.state_kind not in policy.cls.state_kinds:
        yield (
            f"renderer.type: {renderer.name} takes {renderer.cls.state_kind} hidden states, but "
            f"policy {policy.name} gives {' or '.join(sorted(policy.cls.state_kinds))} ones; "
            "choose another policy or renderer"
        )
    elif sizes is not None and width is not None and sizes.model.width != width:
        yield (
            f"policy: the hidden states of {memory_plan.policy_weights(resolved)!r} are "
            f"{sizes.model.width} wide, and {renderer.key} ({renderer.name}) reads {width}; start "
            "from its text encoder (policy.model_path, policy.init_text_encoder_from)"
        )
    for need in sorted(policy.cls.needs):
        if lacking := _sources_without(resolved, need):
            yield (
                f"policy.type: {policy.name} reads each sample's {need!r}, which {lacking} does "
                "not provide; tokenise the data with rl prepare"
            )
    if renderer.cls.prompt_template(renderer.config) is not None:
        yield from (
            f"policy.{key}: set, but renderer {renderer.name} brings the prompt of its text "
            "encoder, and the policy uses that one; drop the key"
            for key in changed(policy.config, sorted(policy.cls.refused_with_template))
        )
    for plugin in (policy, engine, renderer):
        yield from _own_problems(plugin, resolved.config)
    memory = engine.cls.memory(engine.config)
    context_len = memory and memory.max_model_len
    completion_len = resolved.config.sampling.max_completion_tokens
    prompt_len = policy.config.max_prompt_tokens
    if context_len is not None and context_len < prompt_len + completion_len:
        yield (
            f"engine.max_model_len: {context_len} tokens hold no prompt of {prompt_len} "
            f"(policy.max_prompt_tokens) with a completion of {completion_len} "
            f"(sampling.max_completion_tokens); needs {prompt_len + completion_len}"
        )
    if policy.config.thought is not None and not policy.cls.thinks:
        yield f"policy.thought: policy {policy.name} does not read it; drop the key"


def _reward_problems(resolved: Resolved) -> Iterable[str]:
    if not resolved.rewards:
        yield "rewards: empty; give at least one, e.g. { viescore: { type: 'viescore' } }"
    known = set(resolved.rewards)
    for name, plugin in resolved.rewards.items():
        known |= {f"{name}/{part}" for part in plugin.cls.unit_parts}
        needs = plugin.cls.needs_with(plugin.config)
        if "image" in needs and not resolved.renderer.cls.makes_images:
            no_pictures = f"renderer {resolved.renderer.name} makes none"
            yield f"{plugin.key}: needs pictures, and {no_pictures}; drop it or render"
        for need in sorted(needs - {"text", "image"}):
            provided = need if need in READABLE else f"hidden:{need}"
            if lacking := _sources_without(resolved, provided):
                yield (
                    f"{plugin.key}: needs each sample's {need!r}, which {lacking} does not have; "
                    "map a column to it"
                )
    for part in resolved.by_judge.values():
        for plugin in part.rewards.values():
            yield from _own_problems(plugin, part.config)
    weights = resolved.config.final_reward.weights
    held_out_only = {name for name, plugin in resolved.rewards.items() if plugin.keys.held_out_only}
    for name, weight in weights.items():
        if weight and name.partition("/")[0] in held_out_only:
            yield (
                f"final_reward.weights.{name}: with rewards.{name.partition('/')[0]}.held_out_only "
                "it grades no picture of training; drop one of the two"
            )
        if name not in known:
            yield f"final_reward.weights.{name}: no such reward; known: {', '.join(sorted(known))}"
        if not 0 <= weight < math.inf:
            yield f"final_reward.weights.{name}: {weight} given, must be >= 0"
    if weights and not any(weights.values()):
        yield "final_reward.weights: all zero; give at least one reward a weight > 0"
    trains = any(plugin.trains for plugin in resolved.rewards.values())
    if resolved.rewards and not trains and not weights:
        yield "rewards: only diagnostics, which do not count; name one in final_reward.weights"
    for name in held_out_only:
        plugin = resolved.rewards[name]
        if plugin.cls.scores_groups():
            yield (
                f"{plugin.key}.held_out_only: the reward compares the pictures of a group, and a "
                "held-out sample has one; use a reward that grades single pictures"
            )


def _judge_problems(resolved: Resolved) -> Iterable[str]:
    for key, part in resolved.by_judge.items():
        judge, prefix = part.config.judge, key.removesuffix("judge")
        if part.needs_judge:
            try:
                if judge.start_command:
                    yield from (f"{prefix}{text}" for text in start_problems(judge))
                else:
                    resolve_api_bases(judge.api_base)
                auth_header(judge.api_key_env)
            except ValueError as error:
                yield f"{prefix}{error}"


def _placement_problems(resolved: Resolved) -> Iterable[str]:
    """Problems of the configured devices. (A start also checks that this machine has them.)"""
    device = resolved.policy.config.device
    if "+" in device:
        return [
            f"policy.device: {device!r} is relative to the rank's own device, which is the "
            "policy's; give 'auto', or the device itself"
        ]
    num_ranks = min(resolved.config.world_size, RANKS_OF_A_NODE)
    rank_devices = [f"cuda:{rank}" if device == "auto" else device for rank in range(num_ranks)]
    return dist.problems(claims(resolved), rank_devices, machine=None)


def why_not_zero3(resolved: Resolved) -> Iterator[str]:
    """What needs the complete weights, which ZeRO-3 shards."""
    policy = resolved.policy.config
    if resolved.engine.cls.samples_with_trainer:
        yield (
            f"engine.type: {resolved.engine.name} samples with the trainer's own weights, which "
            "ZeRO-3 shards; use engine 'vllm', or optimizer.zero_stage <= 2"
        )
    reads_base = getattr(policy, "conditioning", "policy") == "base"
    if policy.lora is None and (resolved.config.algorithm.kl_coeff or reads_base):
        yield (
            "optimizer.zero_stage: full fine-tuning under ZeRO-3 keeps no starting weights, which "
            "the KL term and policy.conditioning 'base' read; use 2, or set algorithm.kl_coeff=0 "
            "and policy.conditioning=policy"
        )


def _learning_problems(resolved: Resolved) -> Iterable[str]:
    config, algorithm = resolved.config, resolved.config.algorithm
    optimizer, checkpoint = config.optimizer, config.checkpoint
    if (num := config.prompts_per_iteration * config.generations_per_prompt) > MAX_EPISODES:
        yield f"generations_per_prompt: {num:,} completions an iteration; at most {MAX_EPISODES:,}"
    in_loss = algorithm.kl_coeff > 0 and algorithm.kl_placement == "loss"
    if in_loss and algorithm.kl_estimator == "k1":
        yield (
            "algorithm.kl_estimator: 'k1' in the loss has no effect (on-policy its expected "
            "gradient is zero); use 'k2' or 'k3', or kl_placement 'reward'"
        )
    if algorithm.loss == "gspo" and algorithm.importance_correction == "token":
        yield (
            "algorithm.importance_correction: 'token' weighs each token apart, and 'gspo' has one "
            "ratio for a whole completion; use 'sequence', or 'none'"
        )
    if config.max_staleness and optimizer.updates_per_iteration > 1:
        yield (
            "max_staleness: 1 is one update behind, and optimizer.updates_per_iteration "
            f"{optimizer.updates_per_iteration} makes it more; use 1 update, or max_staleness 0"
        )
    if optimizer.backend == "deepspeed" and optimizer.zero_stage == 3:
        yield from why_not_zero3(resolved)
    if (config.num_iterations is None) == (config.num_epochs is None):
        given = "neither" if config.num_iterations is None else "both"
        yield f"num_iterations, num_epochs: {given} given; set one of them"
    prompts, ranks = config.prompts_per_iteration, config.world_size
    if prompts % ranks:
        yield (
            f"prompts_per_iteration: {prompts} prompts cannot be shared by {ranks} ranks "
            f"(world_size); use a multiple of {ranks}"
        )
    elif optimizer.updates_per_iteration > prompts // ranks:
        yield (
            f"optimizer.updates_per_iteration: {optimizer.updates_per_iteration} updates, but each "
            f"rank has only {prompts // ranks} groups an iteration to split among them"
        )
    if config.generations_per_prompt == 1:
        yield (
            "generations_per_prompt: 1 completion is always its own mean, so nothing is ever "
            "learnt; use 2 or more (8 is usual)"
        )
    if optimizer.warmup_iterations >= (config.num_iterations or math.inf):
        yield (
            f"optimizer.warmup_iterations: {optimizer.warmup_iterations} covers all "
            f"{config.num_iterations} iterations of the run; make it smaller, or try it with "
            "rl train --smoke"
        )
    if checkpoint.push_to_hub_every_n_iterations and not checkpoint.push_to_hub_repo_id:
        yield "checkpoint.push_to_hub_repo_id: empty; name the hub repository to push to"


def _data_problems(resolved: Resolved) -> Iterable[str]:
    renderer = resolved.renderer
    if not resolved.train:
        yield "data.train: empty; give at least one source (EARL's fields: train_paths_file)"
    if resolved.config.evaluation.every_n_iterations and not resolved.validation:
        yield (
            "data.validation: empty, and evaluation.every_n_iterations asks for an evaluation; "
            "give a source or set that key to 0"
        )
    template = renderer.cls.prompt_template(renderer.config)
    edits = template is not None and template.needs_picture
    edits = edits or renderer.cls.needs_source_with(renderer.config)
    for plugin in [*resolved.train, *resolved.validation]:
        if edits and "source" not in plugin.cls.provides(plugin.config):
            yield (
                f"{plugin.key}: renderer {renderer.name} edits pictures, and these samples have no "
                "source; map a column to it"
            )


# ---- licences ------------------------------------------------------------------------------------
# The licence of every model of a run, and which of them do not allow commercial use.

SEE_CARD = "see its card"
"""Stands for an unknown licence, or for unknown terms of commercial use."""
COMMERCIAL = {"apache-2.0", "mit", "bsd-2-clause", "bsd-3-clause", "cc0-1.0"}
"""Licences on a model's card that allow commercial use."""
ADAPTERS = ("adapter_path", "lora_path")
"""Keys of plugins' sections that name an adapter."""


def known_models() -> list[dict[str, str]]:
    """The rows of `known_models.tsv` as column -> value; docs/models.md shows the same table."""
    file = Path(__file__).with_name("known_models.tsv")
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))


@dataclass(frozen=True)
class Licence:
    """The licence of one model of a run."""

    key: str
    """The config key that names the model, e.g. 'renderer.model_path'."""
    model: str
    """Hub id or folder, or the name that is sent to a judge."""
    name: str
    """The licence's name, or `SEE_CARD`."""
    use: str
    """Whether the licence allows commercial use: 'yes', 'no' or `SEE_CARD`."""

    @property
    def text(self) -> str:
        """What a user reads, e.g. 'Qwen Research License, not for commercial use'."""
        uses = {"yes": "", "no": ", not for commercial use"}
        return self.name + ("" if self.name == SEE_CARD else uses.get(self.use, f", {SEE_CARD}"))


def licences(resolved: Resolved) -> list[Licence]:
    """The licences of the run's models, in the order of the config: from `known_models.tsv`, else
    from the README.md in the model's folder or in the hub's cache."""
    known = {row["id"]: row for row in known_models()}
    return [_licence(key, model, known) for key, model in dict.fromkeys(_models(resolved))]


def licence_problems(resolved: Resolved) -> Iterator[str]:
    """'key: why, remedy' for each model that the config's `license` does not allow."""
    config = resolved.config
    for part in licences(resolved) if config.license == "commercial" else []:
        if part.use != "yes" and part.model not in config.licensed_models:
            yield (
                f"{part.key}: {part.model!r} (licence: {part.text}), but license is 'commercial'; "
                "take a model of docs/models.md that allows it or, if this one's owner allows you "
                "this use, name it in licensed_models"
            )


def _models(resolved: Resolved) -> Iterator[tuple[str, str]]:
    """(config key, model) of each model. A plugin that runs a model without naming it, or calls a
    service, counts as the model itself."""
    plugins: list[Plugin[Any]] = [resolved.policy, resolved.renderer, *resolved.rewards.values()]
    for plugin in plugins:
        paths = {model.key: model.path for model in plugin.cls.models(plugin.config)}
        paths |= {key: getattr(plugin.config, key, "") for key in ADAPTERS}
        for key, path in paths.items():
            if path:
                yield f"{plugin.key}.{key}", path
        is_opaque = getattr(plugin.cls, "makes_images", getattr(plugin.cls, "runs_model", True))
        if is_opaque and not any(paths.values()):
            key = "model" if hasattr(plugin.config, "model") else "type"
            yield f"{plugin.key}.{key}", getattr(plugin.config, key)
    for key, part in resolved.by_judge.items():
        if part.needs_judge:
            yield f"{key}.model", part.config.judge.model


def _licence(key: str, model: str, known: Mapping[str, Mapping[str, str]]) -> Licence:
    if row := known.get(model):
        return Licence(key, model, row["licence"], row["commercial use"])
    licence, name = licence_of(model)
    if name == "unknown":
        return Licence(key, model, SEE_CARD, SEE_CARD)
    use = "yes" if licence.lower() in COMMERCIAL else SEE_CARD
    return Licence(key, model, name or licence, use)


# ---- resume --------------------------------------------------------------------------------------
# Decides which keys of a run's config may change when it resumes: those listed here.

Effect = Literal["harmless", "noted", "breaks"]
"""harmless: training computes the same (the same bits where a resume does); noted: allowed and
logged, but the run's results change; breaks: refused."""

HARMLESS = (
    "format",  # another format is refused on loading
    "run_name", "base_exp_dir",  # the folder was moved
    "gpu_gb",  # read only by the memory plan
    "license*",  # what a start refuses
    "checkpoint.*", "tracking.*",
    # These change the meaning of the held-out curve; nothing is trained on it.
    "evaluation.*", "data.validation.*",
    # These say where the judge is and how long to wait for it, not how it grades.
    "judge.api_base*", "judge.start_command*", "judge.start_timeout_s", "judge.api_key_env",
    "judge.max_concurrency", "judge.timeout_s", "judge.max_outage_s", "judge.max_failure_rate",
    "judge.revision", "judge.audit*",
    "max_render_failure_rate", "hang_limit_s",
    "render_pool*",  # workers and ranks draw the same bits
    "optimizer.gradient_checkpointing",  # runs the same kernels on the same numbers twice
    "policy.lora.init_seed",  # read before the first iteration
    "engine.residency",  # after waking, its weights are checked to be unchanged
)  # fmt: skip

SCHEDULE = (
    "num_iterations", "num_epochs",  # the length sets the speed of the learning rate's decay
    "checkpoint.save_every_n_iterations", "checkpoint.push_to_hub_every_n_iterations",
    "evaluation.every_n_iterations", "data.validation",  # the whole key: the list is empty
)  # fmt: skip
"""Noted; looked up before `HARMLESS`. With `max_staleness: 1`, a rollout starts only when a
checkpoint or evaluation is done, so these keys decide which iterations train on stale completions;
without it most of them change nothing."""

NOTED = (
    # The same mathematics, other rounding. (Under updates_per_iteration > 1 each rank splits its
    # prompts into steps, so with another world_size a step has other groups.)
    "world_size", "optimizer.backend", "optimizer.zero_stage", "*batch_size", "*.max_memory_gb",
    "optimizer.max_tokens_per_micro_batch", "optimizer.max_kept_tokens", "bare_arm",
    "policy.attn_implementation", "engine.*", "*.device",
    # Changed to get past what stopped the run: a sample, row or question that was too long, or a
    # reply that could not be read.
    "policy.max_prompt_tokens", "data.on_bad_row",
    "renderer.max_pictures",
    "data.train.*.picture_check",
    "judge.guided_json", "judge.max_attempts", "judge.max_tokens", "judge.image_side_px",
    # Tuned by hand.
    "optimizer.learning_rate", "optimizer.final_lr_fraction", "optimizer.warmup_iterations",
)  # fmt: skip

VALUES_OF_OLD_RUNS = {
    "max_staleness": 0,
    "policy.thought": None,
    "judge.unreadable": "ungraded",
    "algorithm.kl_reference": "start",  # where it started from an adapter: see `run/set_up`
}
"""Key that older checkpoints lack -> the value that describes how those runs trained."""

_ABSENT = "(absent)"


def check_resume(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Compare the checkpoint's resolved config with the current one; returns the noted changes.

    Raises ValueError with every changed key that breaks the run, its two values, and the remedy.
    """
    in_both = old.get("rewards", {}).keys() & new.get("rewards", {}).keys()
    changed = (_held_out_only(old) | _held_out_only(new)) - in_both  # nothing is trained on them
    old_flat, new_flat = _flat(old, changed), _flat(new, changed)
    changes: dict[Effect, list[str]] = {"harmless": [], "noted": [], "breaks": []}
    for key in old_flat | new_flat:
        before = old_flat.get(key, VALUES_OF_OLD_RUNS.get(key, _ABSENT))
        after = new_flat.get(key, _ABSENT)
        consequence = effect(key, new)
        if key == "algorithm.zero_spread_groups" and "keep" not in (before, after):
            # 'drop' and 'kl_only' differ only in a KL term.
            consequence = consequence if new_flat.get("algorithm.kl_coeff") else "harmless"
        if before != after:
            changes[consequence].append(f"{key}: {before!r} -> {after!r}")
    if changes["breaks"]:
        listed = "\n  ".join(changes["breaks"])
        raise ValueError(
            f"run {new.get('run_name')!r} has checkpoints made with another config, and these keys "
            f"break it (checkpoint -> now):\n  {listed}\n"
            "Set them back to resume, or choose another run_name to start afresh."
        )
    return changes["noted"]


def _held_out_only(config: Mapping[str, Any]) -> set[str]:
    rewards = config.get("rewards", {})
    return {name for name, section in rewards.items() if section.get("held_out_only")}


def effect(key: str, config: Mapping[str, Any]) -> Effect:
    """The effect of resuming with another value of `key` (dotted, list items by number). `config`:
    the resolved new one."""
    judge = config.get("judge", {})
    if key.startswith("judge.") and not (judge.get("api_base") or judge.get("start_command")):
        return "harmless"  # no judge is asked
    key = re.sub(r"^rewards\.[^.]+\.judge\.", "judge.", key)  # a reward's own judge
    effects: Sequence[tuple[Effect, Sequence[str]]] = (
        ("noted", SCHEDULE),
        ("harmless", HARMLESS),
        ("noted", NOTED),
    )
    for its_effect, patterns in effects:
        if any(fnmatchcase(key, pattern) for pattern in patterns):
            return its_effect
    return "breaks"


def leaves(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of all that is no section; sections in a list are numbered."""
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        value = dict(enumerate(value))
    if value and isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{at}.{key}" if at else str(key))
    else:
        yield at, value


def _flat(config: Mapping[str, Any], left_out: Set[str]) -> dict[str, Any]:
    """Dotted key -> value, without the rewards `left_out`."""
    rewards = {name: r for name, r in config.get("rewards", {}).items() if name not in left_out}
    return dict(leaves({**config, "rewards": rewards}))


# ---- memory remedies -----------------------------------------------------------------------------
# Reports what does not fit on the GPUs, and the keys that shrink it. GB is 1e9 bytes.

REMEDIES: Sequence[tuple[str, str, Any, tuple[Any, ...], str]] = (
    ("engine ", "engine.gpu_memory_utilization", "auto", ("auto",), ""),
    ("engine ", "engine.residency", "sleep", ("auto", "sleep"), "wakes in seconds"),
    ("activations", "optimizer.gradient_checkpointing", "mlp", ("mlp", True), "a sixth slower"),
    ("activations", "optimizer.gradient_checkpointing", "true", (True,), "a third slower"),
    ("activations, kept", "optimizer.max_kept_tokens", 0, (0,), "a second forward"),
    ("optimizer", "optimizer.zero_stage", 2, (1, 2, 3), "on several ranks"),
    ("backward", "optimizer.max_tokens_per_micro_batch", 1, (1,), "slower rows"),
    ("gradients", "optimizer.zero_stage", 2, (2, 3), "on several ranks"),
    ("policy weights", "optimizer.zero_stage", 3, (3,), "on several ranks"),
)
"""(beginning of the plan's item that it shrinks, key, value, values with which it does not, cost).
The cheapest is the first."""
LAST_REMEDIES: Sequence[tuple[str, str]] = (
    ("engine ", "engine={type:'transformers'} (no weights of its own, sampling takes minutes)"),
    ("renderer", "renderer.device=cuda:+N (a GPU of its own for each of N ranks)"),
    ("judge", "another GPU for judge.start_command (CUDA_VISIBLE_DEVICES)"),
)
MIN_SHARE = 0.02
"""Share of the GPU below which an item is not named."""


def memory_problems(resolved: Resolved, gpu_gb: float) -> list[str]:
    """Why the run does not fit the policy's GPU; [] also if the sizes are unknown."""
    planned = memory_plan.plan_of(resolved, gpu_gb)
    if planned is None:
        return []
    engine = planned.engine
    if engine is not None and engine.at_once <= 1:
        least_gb = engine.weights_gb + engine.workspace_gb + engine.cache_of_gb(1)
        return [
            f"engine.gpu_memory_utilization: the engine takes {engine.claimed_gb:.1f} GB of "
            f"{gpu_gb:g}, and it needs {least_gb:.1f} GB: weights ({engine.weights_gb:.1f} GB), "
            f"workspace ({engine.workspace_gb:.1f} GB) and a cache for one completion of "
            f"{engine.longest_tokens} tokens, prompt included; set gpu_memory_utilization=auto, "
            "or use a larger GPU or a smaller policy.model_path"
        ]
    return [_plan_problem(resolved, planned, gpu_gb)] if planned.peak_gb > gpu_gb else []


def engine_dtype(resolved: Resolved) -> str:
    """Dtype of the inference engine's weights."""
    memory_config = resolved.engine.cls.memory(resolved.engine.config)
    return str((memory_config and memory_config.dtype) or resolved.policy.config.dtype)


def _plan_problem(resolved: Resolved, planned: Plan, gpu_gb: float) -> str:
    """The fullest phase of a plan that does not fit, its largest items, and what shrinks them."""
    phase = max(memory_plan.PHASES, key=planned.total_gb)
    items = [i for i in planned.items if phase in i.phases and i.gb > MIN_SHARE * gpu_gb]
    items.sort(key=lambda item: -item.gb)

    def is_full_of(part: str) -> bool:
        return any(f"{item.part} ".startswith(part) for item in items)

    optimizer = resolved.config.optimizer
    sections = {"engine": resolved.engine.config, "optimizer": optimizer}
    remedies = []
    for part, key, value, useless, cost in REMEDIES:
        section, _, name = key.partition(".")
        if name == "zero_stage" and optimizer.backend == "torch":
            continue  # which shards nothing
        if value == 3 and any(why_not_zero3(resolved)):
            continue
        if is_full_of(part) and getattr(sections[section], name, value) not in (value, *useless):
            remedies.append(f"{key}={value}" + (f" ({cost})" if cost else ""))
    for plugin in filter(lambda plugin: is_full_of(plugin.key), resolved.model_runners):
        for key, field in type(plugin.config).model_fields.items():
            for note in field.metadata:
                if isinstance(note, SavesMemory) and getattr(plugin.config, key) != note.value:
                    cost = "" if note.exact else " (changes the pictures)"
                    remedies.append(f"{plugin.key}.{key}={json.dumps(note.value)}{cost}")
    remedies += [text for part, text in LAST_REMEDIES if is_full_of(part)]
    return (
        f"memory: DOES NOT FIT by {planned.peak_gb - gpu_gb:.1f} GB: {planned.peak_gb:.1f} GB of "
        f"{gpu_gb:g} in phase {phase!r} ({', '.join(map(str, items))}); what shrinks these, the "
        f"cheapest first: {', '.join(dict.fromkeys(remedies)) or 'no key'}; else larger GPUs, or "
        "a smaller model"
    )
