"""Reports keys that are set without effect, or probably without the effect that the user means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rl.api.find import misspelt
from rl.api.plugin import unread
from rl.api.policy import Policy
from rl.build import PLUGIN_BASES, Resolved, RewardPlugin, ask_plugin
from rl.config.schema import SHIPPED_LOSSES, JudgeConfig, SamplingConfig
from rl.memory import footprint

UNREAD: Mapping[str, tuple[str, Any]] = {
    "algorithm.kl_estimator kl_placement": ("kl_coeff", 0),
    "algorithm.advantage_eps": ("advantage_scale", "none"),
    "algorithm.importance_cap": ("importance_correction", "none"),
    "optimizer.zero_stage": ("backend", "torch"),
    "evaluation.": ("every_n_iterations", 0),
    "evaluation.top_k": ("temperature", 0),
    "checkpoint.push_to_hub_repo_id": ("push_to_hub_every_n_iterations", 0),
    "tracking.wandb_project": ("wandb", "off"),
    "tracking.trackio_space": ("trackio", False),
    "tracking.images_per_iteration keep_images_of_last_n_iterations thumbnails_mb": (
        "log_episodes_every_n_iterations",
        0,
    ),
    "judge.start_timeout_s": ("start_command", []),
}
"""'section.key key ...' (no key: the whole section) -> (another key of the section, the value of
that key with which the first ones have no effect)."""


def no_effect(resolved: Resolved) -> list[str]:
    """'key: why' for each key that has no effect and is set to another value than its default."""
    problems = [*_rules(resolved)]
    for plugin in resolved.plugins:
        lines = ask_plugin(plugin, "no_effect")[0] or []
        base = next(base for base in PLUGIN_BASES.values() if issubclass(plugin.cls, base))
        problems += [f"{plugin.key}.{line}" for line in (*lines, *misspelt(plugin.cls, base))]
    return list({line.partition(":")[0]: line for line in reversed(problems)}.values())[::-1]


def _rules(resolved: Resolved) -> Iterator[str]:
    config, policy, renderer = resolved.config, resolved.policy, resolved.renderer
    algorithm, optimizer = config.algorithm, config.optimizer
    thought, lora = policy.config.thought, policy.config.lora
    if not resolved.by_judge["judge"].needs_judge:
        yield from unread(config.judge, None, "no reward asks this judge", "judge.")
    is_evaluated = config.data.validation and config.evaluation.every_n_iterations
    for plugin in resolved.rewards.values():
        if plugin.keys.held_out_only and not is_evaluated:
            yield f"{plugin.key}.held_out_only: nothing is evaluated, so the reward grades nothing"
        if plugin.keys.judge is not None:
            yield from _own_judge(plugin, plugin.keys.judge)
    for keys_path, (gate_key, value) in UNREAD.items():
        name, _, keys = keys_path.partition(".")
        section = getattr(config, name)
        if getattr(section, gate_key) == value:
            yield from unread(section, keys or None, f"{gate_key} is {value!r}", f"{name}.")
    if config.data.validation and not config.evaluation.every_n_iterations:
        yield "data.validation: evaluation.every_n_iterations is 0, so nothing is evaluated"
    one_update = optimizer.updates_per_iteration == 1 and config.max_staleness == 0
    if one_update and not (lora and lora.dropout) and algorithm.loss in SHIPPED_LOSSES:
        why = "one update an iteration and max_staleness 0: the ratio is 1"
        yield from unread(algorithm, "clip_low clip_high", why, "algorithm.")
    elif algorithm.loss == "cispo":
        yield from unread(algorithm, "clip_low", "'cispo' has no lower bound", "algorithm.")
    kept, why_not_kept = footprint.kept_tokens(resolved)
    if not kept and optimizer.max_kept_tokens != 0:
        why = f"nothing can be kept ({why_not_kept})"
        yield from unread(optimizer, "max_kept_tokens", why, "optimizer.")
    if thought is None:
        why = "policy.thought is null, so there is no thought to leave out"
        yield from unread(config.evaluation, "thought_gain", why, "evaluation.")
    if not renderer.cls.makes_images:
        why = f"renderer {renderer.name} makes no pictures"
        yield from unread(config, "images_per_completion", why)
    if policy.cls.pass_through_completion is Policy.pass_through_completion:
        yield from unread(config, "bare_arm", f"policy {policy.name} has no bare arm")
    if renderer.cls.accepts != "hidden_states":
        why = f"renderer {renderer.name} takes {renderer.cls.accepts}, not hidden states"
        yield from unread(
            policy.config, " ".join(sorted(policy.cls.keys_for_states)), why, "policy."
        )
        if thought is not None:
            yield from unread(thought, "states", why, "policy.thought.")


def _own_judge(plugin: RewardPlugin, judge: JudgeConfig) -> Iterator[str]:
    """The keys of a reward's own judge that nothing reads."""
    at = f"{plugin.key}.judge."
    if not plugin.cls.needs_judge:
        yield from unread(judge, None, f"reward {plugin.name} asks no judge", at)
    yield from unread(judge, "max_failure_rate unreadable", "the run's judge has the limits", at)
    if plugin.keys.held_out_only:
        audit = [key for key in type(judge).model_fields if key.startswith(("audit", "attack"))]
        yield from unread(judge, " ".join(audit), "a start audits judges that train", at)


def doubtful(resolved: Resolved) -> list[str]:
    """'key: why' for each key that is valid but probably does not do what the user means."""
    sampling, algorithm = resolved.config.sampling, resolved.config.algorithm
    cuts_tokens = {"top_p": sampling.top_p < 1, "top_k": sampling.top_k > 0}
    problems = [
        f"sampling.{key}: {getattr(sampling, key):g} removes tokens, so the engine's log-probs are "
        "of the truncated distribution, the trainer's of the full one: every importance weight is "
        "below 1, mismatch/* measures the truncation, and an engine with wrong weights is not "
        f"noticed. Use {SamplingConfig.model_fields[key].default} (off)"
        for key, cuts in cuts_tokens.items()
        if cuts
    ]
    for key, part in resolved.by_judge.items():
        is_second = not any(plugin.trains for plugin in part.rewards.values())
        if key != "judge" and is_second and part.config.judge.model == resolved.config.judge.model:
            problems.append(
                f"{key}.model: {part.config.judge.model!r} is the run's judge, with the same blind "
                "spots. Use a model of another family"
            )
    checkpoint = resolved.config.checkpoint
    if checkpoint.keep_every_n_iterations % checkpoint.save_every_n_iterations:
        problems.append(
            f"checkpoint.keep_every_n_iterations: {checkpoint.keep_every_n_iterations} is no "
            f"multiple of save_every_n_iterations ({checkpoint.save_every_n_iterations}), so few "
            "of these checkpoints exist"
        )
    if algorithm.loss == "dr_grpo" and algorithm.advantage_scale != "none":
        problems.append(
            f"algorithm.advantage_scale: {algorithm.advantage_scale!r} divides by a standard "
            "deviation, which loss 'dr_grpo' avoids (Liu et al. 2025). Use 'none', or loss "
            "'grpo' or 'dapo'"
        )
    if algorithm.truncated_completions == "mask" and resolved.policy.config.thought is not None:
        problems.append(
            "algorithm.truncated_completions: 'mask' keeps an unfinished thought out of the loss, "
            "so the policy is never taught to end one. Use 'floor' or 'score'"
        )
    return problems
