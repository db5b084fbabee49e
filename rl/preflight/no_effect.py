"""Which keys of a config are set, and read by nobody beside its other keys?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rl.api.plug import unread
from rl.api.policy import Policy
from rl.build import Plug, Resolved, ask_plug
from rl.config.schema import SHIPPED_LOSSES, Section
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
        found += [f"{plug.key}.{line}" for line in _told(plug)]
    return list({line.partition(":")[0]: line for line in reversed(found)}.values())[::-1]


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
            not config.checkpoint.keep_every_n_iterations,
            "checkpoint",
            "keep",
            "keep_every_n_iterations is 0, and none stays for ever",
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


def _told(plug: Plug[Any]) -> list[str]:
    """What the plug says itself; one that cannot be asked says nothing."""

    def told(config: Any) -> list[str]:
        return list(plug.cls.no_effect(config))

    return ask_plug(plug, told, _are_lines, "a list of sentences")[0] or []


def _are_lines(found: Iterable[Any]) -> bool:
    return all(isinstance(line, str) for line in found)
