"""Reports keys that nothing reads beside a config's other keys, and keys that hardly work as meant.

Rules about a plugin's own section are in the plugin (`PlugBase.no_effect`).
"""

from __future__ import annotations

from collections.abc import Iterator

from rl.api.find import misspelt
from rl.api.plug import unread
from rl.api.policy import Policy
from rl.build import ROOMS, Resolved, ask_plug
from rl.config.schema import SHIPPED_LOSSES, SamplingConfig
from rl.memory import footprint


def no_effect(resolved: Resolved) -> list[str]:
    """'key: why', each key once and only where its value is not the default."""
    config = resolved.config
    found = [*_of_rooms(resolved)]
    for keys, is_unread, why in _rules(resolved):
        section, _, names = keys.partition(".")
        if is_unread:
            found += unread(getattr(config, section), names or None, why, at=f"{section}.")
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


def _rules(resolved: Resolved) -> Iterator[tuple[str, bool, str]]:
    """('section.key key', or the whole 'section'; whether nothing reads them; why)."""
    config = resolved.config
    algorithm, optimizer, evaluation = config.algorithm, config.optimizer, config.evaluation
    tracking, lora = config.tracking, resolved.policy.config.lora
    on_policy = optimizer.updates_per_iteration == 1 and config.max_staleness == 0
    on_policy &= not (lora and lora.dropout) and algorithm.loss in SHIPPED_LOSSES
    kept, why_not_kept = footprint.kept_tokens(resolved)
    no_held_out = not evaluation.every_n_iterations

    yield "judge", not resolved.needs_judge, "no reward asks a judge"
    yield "judge.start_timeout_s", not config.judge.start_command, "start_command is empty"
    why = "one update an iteration and max_staleness 0: the ratio is 1"
    yield "algorithm.clip_low clip_high", on_policy, why
    is_cispo = algorithm.loss == "cispo" and not on_policy
    yield "algorithm.clip_low", is_cispo, "'cispo' has no lower bound"
    yield "algorithm.kl_estimator kl_placement", algorithm.kl_coeff == 0, "kl_coeff is 0"
    why = "advantage_scale 'none' divides by nothing"
    yield "algorithm.advantage_eps", algorithm.advantage_scale == "none", why
    uncorrected = algorithm.importance_correction == "none"
    yield "algorithm.importance_cap", uncorrected, "importance_correction is 'none'"
    yield "optimizer.zero_stage", optimizer.backend == "torch", "backend 'torch' shards nothing"
    nothing_kept = not kept and optimizer.max_kept_tokens != 0
    yield "optimizer.max_kept_tokens", nothing_kept, f"nothing can be kept ({why_not_kept})"
    yield "evaluation", no_held_out, "every_n_iterations is 0, and no held-out run is made"
    yield "evaluation.top_k", evaluation.temperature == 0, "temperature is 0"
    no_thought = resolved.policy.config.thought is None
    yield "evaluation.thought_gain", no_thought, "policy.thought is null, and there is none to cut"
    no_push = not config.checkpoint.push_to_hub_every_n_iterations
    why = "push_to_hub_every_n_iterations is 0, and nothing is pushed"
    yield "checkpoint.push_to_hub_repo_id", no_push, why
    yield "tracking.wandb_project", tracking.wandb == "off", "wandb is 'off'"
    yield "tracking.trackio_space", not tracking.trackio, "trackio is false"
    no_episodes = not tracking.log_episodes_every_n_iterations
    keys = "tracking.images_per_iteration keep_images_of_last_n_iterations"
    yield keys, no_episodes, "log_episodes_every_n_iterations is 0"


def _of_rooms(resolved: Resolved) -> Iterator[str]:
    config, policy, renderer = resolved.config, resolved.policy, resolved.renderer
    if not renderer.cls.makes_images:
        why = f"renderer {renderer.name} makes no pictures"
        yield from unread(config, "images_per_completion", why)
    if policy.cls.pass_through_completion is Policy.pass_through_completion:
        yield from unread(config, "bare_arm", f"policy {policy.name} has no bare arm")
    if config.data.validation and not config.evaluation.every_n_iterations:
        yield "data.validation: evaluation.every_n_iterations is 0, and no held-out run is made"
    if renderer.cls.accepts != "hidden_states":
        why = f"renderer {renderer.name} takes {renderer.cls.accepts}, not hidden states"
        yield from unread(policy.config, " ".join(sorted(policy.cls.own_states)), why, "policy.")
        if policy.config.thought is not None:
            yield from unread(policy.config.thought, "states", why, at="policy.thought.")
