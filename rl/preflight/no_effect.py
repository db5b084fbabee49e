"""Keys of a config that nothing reads beside its other keys, and keys that hardly do what is meant.

Rules across the schema and across rooms; within a plug's section they are the plug's own
(`PlugBase.no_effect`). Keys that contradict each other are refused (`compatibility.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rl.api.find import misspelt
from rl.api.plug import unread
from rl.api.policy import Policy
from rl.build import ROOMS, Resolved, ask_plug
from rl.config.schema import SHIPPED_LOSSES, SamplingConfig, Section
from rl.preflight import footprint, thought

Rule = tuple[bool, str, str | None, str]
"""Whether they are unread, the section, its keys (None: all), why."""


def no_effect(resolved: Resolved) -> list[str]:
    """'key: why', each key once and only where its value is not the default."""
    config = resolved.config
    found = [*_of_run(resolved), *_of_policy(resolved)]
    for unread_here, name, keys, why in _rules(resolved):
        section: Section = getattr(config, name)
        if unread_here:
            found += unread(section, keys, why, at=f"{name}.")
    for plug in resolved.plugs:
        lines = ask_plug(plug, "no_effect")[0] or []
        base = next(base for base in ROOMS.values() if issubclass(plug.cls, base))
        found += [f"{plug.key}.{line}" for line in (*lines, *misspelt(plug.cls, base))]
    return list({line.partition(":")[0]: line for line in reversed(found)}.values())[::-1]


def doubtful(resolved: Resolved) -> list[str]:
    """'key: why' of each key that runs and hardly does what is meant."""
    sampling, algorithm = resolved.config.sampling, resolved.config.algorithm
    cutting = {"top_p": sampling.top_p < 1, "top_k": sampling.top_k > 0}
    found = [
        f"sampling.{key}: {getattr(sampling, key):g} cuts off tokens, so the sampler's log-probs "
        "are of the cut distribution and the trainer's of the whole one: every importance weight "
        "is below 1, mismatch/* measures the cut, and an engine that holds other weights goes "
        f"unreported. Use {SamplingConfig.model_fields[key].default} (off)"
        for key, cuts in cutting.items()
        if cuts
    ]
    if algorithm.loss == "dr_grpo" and algorithm.advantage_scale != "none":
        found.append(
            f"algorithm.advantage_scale: {algorithm.advantage_scale!r} divides by a deviation, and "
            "loss 'dr_grpo' was derived to leave it out (Liu et al. 2025). Use 'none', or loss "
            "'grpo' or 'dapo'"
        )
    if algorithm.truncated_completions == "mask" and resolved.policy.config.thought is not None:
        found.append(
            "algorithm.truncated_completions: 'mask' gives an unfinished thought the reward 0 and "
            "no loss, so the policy is never taught to end one. Use 'floor' or 'score'"
        )
    return found


def _rules(resolved: Resolved) -> Sequence[Rule]:
    config = resolved.config
    algorithm, optimizer, evaluation = config.algorithm, config.optimizer, config.evaluation
    lora = resolved.policy.config.lora
    is_on_policy = (
        optimizer.updates_per_iteration == 1
        and config.max_staleness == 0
        and not (lora and lora.dropout)
        and algorithm.loss in SHIPPED_LOSSES
    )
    kept, why_not_kept = footprint.kept_tokens(resolved)
    return [
        (not resolved.needs_judge, "judge", None, "no reward asks a judge"),
        (
            not config.judge.start_command,
            "judge",
            "start_timeout_s",
            "start_command is empty",
        ),
        (
            is_on_policy,
            "algorithm",
            "clip_low clip_high",
            "one update an iteration and max_staleness 0: the ratio is 1",
        ),
        (
            algorithm.loss == "cispo" and not is_on_policy,
            "algorithm",
            "clip_low",
            "'cispo' has no lower bound",
        ),
        (algorithm.kl_coeff == 0, "algorithm", "kl_estimator kl_placement", "kl_coeff is 0"),
        (
            algorithm.advantage_scale == "none",
            "algorithm",
            "advantage_eps",
            "advantage_scale 'none' divides by nothing",
        ),
        (
            algorithm.importance_correction == "none",
            "algorithm",
            "importance_cap",
            "importance_correction is 'none'",
        ),
        (optimizer.backend == "torch", "optimizer", "zero_stage", "backend 'torch' shards nothing"),
        (
            not kept and optimizer.max_kept_tokens != 0,
            "optimizer",
            "max_kept_tokens",
            f"nothing can be kept ({why_not_kept})",
        ),
        (
            not evaluation.every_n_iterations,
            "evaluation",
            None,
            "every_n_iterations is 0, and no held-out run is made",
        ),
        (evaluation.temperature == 0, "evaluation", "top_k", "temperature is 0"),
        (
            resolved.policy.config.thought is None,
            "evaluation",
            "thought_gain",
            "policy.thought is null, and there is none to cut",
        ),
        (
            not config.checkpoint.push_to_hub_every_n_iterations,
            "checkpoint",
            "push_to_hub_repo_id",
            "push_to_hub_every_n_iterations is 0, and nothing is pushed",
        ),
        (config.tracking.wandb == "off", "tracking", "wandb_project", "wandb is 'off'"),
        (not config.tracking.trackio, "tracking", "trackio_space", "trackio is false"),
        (
            not config.tracking.log_episodes_every_n_iterations,
            "tracking",
            "images_per_iteration",
            "log_episodes_every_n_iterations is 0",
        ),
        (
            not config.tracking.log_episodes_every_n_iterations,
            "tracking",
            "keep_images_of_last_n_iterations",
            "log_episodes_every_n_iterations is 0",
        ),
    ]


def _of_run(resolved: Resolved) -> Iterator[str]:
    config, renderer = resolved.config, resolved.renderer
    if not renderer.cls.makes_images:
        why = f"renderer {renderer.name} makes no pictures"
        yield from unread(config, "images_per_completion", why)
    policy = resolved.policy
    if policy.cls.pass_through_completion is Policy.pass_through_completion:
        yield from unread(config, "bare_arm", f"policy {policy.name} has no bare arm")
    if config.data.validation and not config.evaluation.every_n_iterations:
        yield "data.validation: evaluation.every_n_iterations is 0, and no held-out run is made"


def _of_policy(resolved: Resolved) -> Iterator[str]:
    policy, renderer = resolved.policy, resolved.renderer
    if renderer.cls.accepts != "hidden_states":
        why = f"renderer {renderer.name} takes {renderer.cls.accepts}, not hidden states"
        yield from unread(policy.config, " ".join(sorted(policy.cls.own_states)), why, "policy.")
    yield from thought.no_effect(resolved)
