"""Checks whether the chosen plugins run together: rules across rooms."""

from __future__ import annotations

import math
from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from rl.api.data import RowRules
from rl.build import ask_plug, claims, row_rules
from rl.config.schema import RunConfig, changed
from rl.judge.endpoint import auth_header, resolve_api_bases
from rl.judge.server import start_problems
from rl.memory import footprint
from rl.ranks import placement

if TYPE_CHECKING:
    from rl.build import Plug, Resolved

RANKS_OF_A_NODE = 8
"""More ranks than this are taken to be on several machines."""
READABLE = frozenset({"source", "image", "target", "text", "reference"})
"""What a reward may need beside hidden keys of the data."""


def compatibility_problems(resolved: Resolved) -> list[str]:
    """Everything that keeps these plugins from running together, each with its key and remedy."""
    return [*plug_problems(resolved), *_data_problems(resolved)]


def plug_problems(resolved: Resolved) -> list[str]:
    """The same without a look into the data."""
    return [
        *_room_problems(resolved),
        *_reward_problems(resolved),
        *_judge_problems(resolved),
        *_learning_problems(resolved),
        *_batch_problems(resolved.config),
        *_placement_problems(resolved),
    ]


def _own_problems(plug: Plug[Any], given: object) -> Iterable[str]:
    """What a plugin says of its own section beside the rest."""
    problems, wrong = ask_plug(plug, "problems", given)
    mark = ": " if isinstance(given, RowRules) else "."
    yield from (f"{plug.key}{mark}{problem}" for problem in problems or ())
    yield from wrong


def _sources_without(resolved: Resolved, need: str) -> str:
    """Keys of the data sources that do not provide it."""
    sources = [*resolved.train, *resolved.validation]
    return ", ".join(s.key for s in sources if need not in s.cls.provides(s.config))


def _room_problems(resolved: Resolved) -> Iterable[str]:
    policy, engine, renderer = resolved.policy, resolved.engine, resolved.renderer
    accepts, emits = renderer.cls.accepts, policy.cls.emits
    sizes, reads = footprint.sizes(resolved), renderer.cls.state_dim_of(renderer.config)
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
    elif sizes is not None and reads is not None and sizes.model.width != reads:
        yield (
            f"policy: the hidden states of {footprint.policy_weights(resolved)!r} are "
            f"{sizes.model.width} wide, and {renderer.key} ({renderer.name}) "
            f"reads {reads}; start from the text encoder that it was trained with "
            "(policy.model_path, policy.init_text_encoder_from)"
        )
    for need in sorted(policy.cls.needs):
        if lacking := _sources_without(resolved, need):
            yield (
                f"policy.type: {policy.name} reads each sample's {need!r}, which {lacking} does "
                "not provide; tokenise the data with rl prepare"
            )
    if renderer.cls.prompt_template(renderer.config) is not None:
        yield from (
            f"policy.{key}: set, but renderer {renderer.name} brings the words that its text "
            "encoder was trained under, and the policy writes under those; drop the key"
            for key in changed(policy.config, sorted(policy.cls.own_words))
        )
    yield from _thought_problems(resolved)
    for plug in (policy, engine, renderer):
        yield from _own_problems(plug, resolved.config)
    stated = engine.cls.memory(engine.config)
    length = stated and stated.max_model_len
    longest = resolved.config.sampling.max_completion_tokens
    prompt = policy.config.max_prompt_tokens
    if length is not None and length < prompt + longest:
        yield (
            f"engine.max_model_len: {length} tokens hold no prompt of {prompt} "
            f"(policy.max_prompt_tokens) with a completion of {longest} "
            f"(sampling.max_completion_tokens); needs {prompt + longest}"
        )


def _thought_problems(resolved: Resolved) -> Iterable[str]:
    policy, section = resolved.policy, resolved.policy.config.thought
    if section is None:
        return
    if not policy.cls.thinks:
        own = ": what it writes before its picture is its thought already"
        own *= "image_tokens" in policy.cls.emits
        yield f"policy.thought: policy {policy.name} reads none{own}; drop the key"
    if not section.marker.strip():
        yield (
            "policy.thought.marker: white space alone would end a thought anywhere; give words or "
            "a tag, e.g. '</think>'"
        )
    total = resolved.config.sampling.max_completion_tokens
    if section.max_tokens is not None and section.max_tokens >= total:
        yield (
            f"policy.thought.max_tokens: a thought of {section.max_tokens} tokens leaves no room "
            f"for words within sampling.max_completion_tokens = {total}; lower the one or raise "
            "the other"
        )


def _reward_problems(resolved: Resolved) -> Iterable[str]:
    if not resolved.rewards:
        yield "rewards: empty; give at least one, e.g. { viescore: { type: 'viescore' } }"
    known = set(resolved.rewards)
    for name, plug in resolved.rewards.items():
        known |= {f"{name}/{part}" for part in plug.cls.unit_parts}
        if "image" in plug.cls.needs and not resolved.renderer.cls.makes_images:
            makes_none = f"renderer {resolved.renderer.name} makes none"
            yield f"{plug.key}: needs pictures, and {makes_none}; drop it or render"
        for need in sorted(plug.cls.needs - {"text", "image"}):
            column = need if need in READABLE else f"hidden:{need}"
            if lacking := _sources_without(resolved, column):
                near = "".join(get_close_matches(need, sorted(READABLE - {need}), n=1))
                yield (
                    f"{plug.key}: needs each sample's {need!r}, which {lacking} does not provide; "
                    "map a column to it" + (f", or is {near!r} meant?" if near else "")
                )
        yield from _own_problems(plug, resolved.config)
    weights = resolved.config.final_reward.weights
    for name, weight in weights.items():
        if name not in known:
            yield f"final_reward.weights.{name}: no such reward; known: {', '.join(sorted(known))}"
        if not 0 <= weight < math.inf:
            yield f"final_reward.weights.{name}: {weight} given, must be >= 0"
    if weights and not any(weights.values()):
        yield "final_reward.weights: all zero; give at least one reward a weight > 0"
    diagnostic = all(plug.cls.diagnostic for plug in resolved.rewards.values())
    if resolved.rewards and diagnostic and not weights:
        yield (
            "rewards: only diagnostics, which do not count by themselves; name one in "
            "final_reward.weights"
        )


def _judge_problems(resolved: Resolved) -> Iterable[str]:
    judge = resolved.config.judge
    if not resolved.needs_judge:
        return
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


def _learning_problems(resolved: Resolved) -> Iterable[str]:
    algorithm, optimizer = resolved.config.algorithm, resolved.config.optimizer
    in_loss = algorithm.kl_coeff > 0 and algorithm.kl_placement == "loss"
    if in_loss and algorithm.kl_estimator == "k1":
        yield (
            "algorithm.kl_estimator: 'k1' in the loss pulls nowhere (on-policy its expected "
            "gradient is zero); use 'k2' or 'k3', or kl_placement 'reward'"
        )
    if algorithm.loss == "gspo" and algorithm.importance_correction == "token":
        yield (
            "algorithm.importance_correction: 'token' weighs each token apart, and 'gspo' has one "
            "ratio for a whole completion; use 'sequence', or 'none'"
        )
    if resolved.config.max_staleness and optimizer.updates_per_iteration > 1:
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


def _placement_problems(resolved: Resolved) -> Iterable[str]:
    """As far as words go: what the machine has is seen when a run starts on it."""
    num_ranks = min(resolved.config.world_size, RANKS_OF_A_NODE)
    stated = resolved.policy.config.device
    if "+" in stated:
        return [
            f"policy.device: {stated!r} counts from the rank's own device, which is the policy's; "
            "give 'auto', or the device itself"
        ]
    owns = [f"cuda:{rank}" if stated == "auto" else stated for rank in range(num_ranks)]
    return placement.problems(claims(resolved), owns, machine=None)


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
    if not resolved.train:
        yield "data.train: empty; give at least one source (EARL's fields: train_paths_file)"
    if resolved.config.evaluation.every_n_iterations and not resolved.validation:
        yield (
            "data.validation: empty, and evaluation.every_n_iterations asks for a held-out run; "
            "give a source or set that key to 0"
        )
    renderer, rules = resolved.renderer, row_rules(resolved)
    template = renderer.cls.prompt_template(renderer.config)
    shows_picture = template is not None and template.needs_picture
    for plug in [*resolved.train, *resolved.validation]:
        yield from _own_problems(plug, rules)
        has_source = "source" in plug.cls.provides(plug.config)
        if (shows_picture or renderer.cls.needs_source) and not has_source:
            yield (
                f"{plug.key}: renderer {renderer.name} edits a picture, and these samples have no "
                "source; map a column to it"
            )
        yield from _prompt_problems(resolved, plug)


def _prompt_problems(resolved: Resolved, plug: Plug[Any]) -> Iterable[str]:
    """Rows whose pictures alone fill a prompt, as far as their number is known; under 'skip' they
    are left out and counted."""
    policy, renderer, data = resolved.policy, resolved.renderer, resolved.config.data
    template = renderer.cls.prompt_template(renderer.config)
    if template is None or not template.image_area_px or data.on_bad_row == "skip":
        return
    known = plug.cls.most_pictures(plug.config)
    number = int("source" in plug.cls.provides(plug.config)) if known is None else known
    number = min(number, template.max_pictures)
    each, wrong = ask_plug(policy, "picture_tokens", template.image_area_px)
    yield from wrong
    room = policy.config.max_prompt_tokens
    if each and number * each >= room:
        yield (
            f"{plug.key}: rows have up to {number} source pictures, about {each} tokens each as "
            f"the policy reads them, and policy.max_prompt_tokens is {room}; raise it to "
            f"{number * each} and as many as the words take, give fewer, or lower "
            "renderer.policy_image_area_px"
        )
