"""Checks whether the chosen plugins can run together: rules that involve several of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rl.build import ask_plugin, claims
from rl.config.schema import MAX_EPISODES, RAY_MISSING, JudgeConfig, RunConfig, changed
from rl.judge.http import auth_header, resolve_api_bases
from rl.judge.server import start_problems
from rl.memory import footprint
from rl.ranks import dist

if TYPE_CHECKING:
    from rl.build import Plugin, Resolved

RANKS_OF_A_NODE = 8
"""The most ranks that one machine is assumed to have."""
READABLE = frozenset({"source", "image", "target", "text", "reference"})
"""Names that a reward may put in `needs`; any other name is a key of `Sample.hidden`."""


def compatibility_problems(resolved: Resolved) -> list[str]:
    """Everything that keeps these plugins from running together, each with its key and remedy."""
    return [*plugin_problems(resolved), *_data_problems(resolved)]


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
    if (num_gpus := resolved.config.pool.num_gpus) > 1 and num_gpus % 1:
        yield f"render_pool.num_gpus: {num_gpus:g}; Ray takes whole numbers above 1"
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
    sizes, width = footprint.sizes(resolved), renderer.cls.state_dim_of(renderer.config)
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
            f"policy: the hidden states of {footprint.policy_weights(resolved)!r} are "
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
    thought = policy.config.thought
    if thought is not None and not policy.cls.thinks:
        suffix = ": all that it writes before its picture is its thought"
        suffix *= "image_tokens" in emits
        yield f"policy.thought: policy {policy.name} does not read it{suffix}; drop the key"
    if thought is not None and not thought.marker.strip():
        yield "policy.thought.marker: only white space; give words or a tag, e.g. '</think>'"
    if thought is not None and (thought.max_tokens or 0) >= completion_len:
        yield (
            f"policy.thought.max_tokens: a thought of {thought.max_tokens} tokens leaves no room "
            f"for words within sampling.max_completion_tokens = {completion_len}; lower one or "
            "raise the other"
        )


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
                match = "".join(get_close_matches(need, sorted(READABLE - {need}), n=1))
                yield (
                    f"{plugin.key}: needs each sample's {need!r}, which {lacking} does not have; "
                    "map a column to it" + (f", or is {match!r} meant?" if match else "")
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
        if part.needs_judge:
            prefix = key.removesuffix("judge")
            yield from (f"{prefix}{text}" for text in _endpoint_problems(part.config.judge))


def _endpoint_problems(judge: JudgeConfig) -> Iterable[str]:
    try:
        if judge.start_command:
            yield from start_problems(judge)
        else:
            resolve_api_bases(judge.api_base)
    except ValueError as error:
        yield str(error)
    try:
        auth_header(judge.api_key_env)
    except ValueError as error:
        yield str(error)


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
    shards = optimizer.backend == "deepspeed" and optimizer.zero_stage == 3
    if shards and resolved.engine.cls.samples_with_trainer:
        yield (
            f"engine.type: {resolved.engine.name} samples with the trainer's own weights, which "
            "ZeRO-3 shards; use engine 'vllm', or optimizer.zero_stage <= 2"
        )
    if config.num_iterations is None and config.num_epochs is None:
        yield "num_iterations, num_epochs: neither given; set one"
    if config.num_iterations is not None and config.num_epochs is not None:
        yield "num_iterations, num_epochs: both given; keep one"
    prompts, ranks = config.prompts_per_iteration, config.world_size
    if prompts % ranks:
        below, above = prompts // ranks * ranks, -(-prompts // ranks) * ranks
        multiples = f"{below} or {above}" if below else f"{above}"
        yield (
            f"prompts_per_iteration: {prompts} prompts cannot be shared by {ranks} ranks "
            f"(world_size); use {multiples}"
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
    shows_picture = template is not None and template.needs_picture
    for plugin in [*resolved.train, *resolved.validation]:
        has_source = "source" in plugin.cls.provides(plugin.config)
        if (shows_picture or renderer.cls.needs_source) and not has_source:
            yield (
                f"{plugin.key}: renderer {renderer.name} edits pictures, and these samples have no "
                "source; map a column to it"
            )
