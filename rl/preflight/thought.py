"""Does the policy's thought fit the rest of the run? Part of `--check`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rl.api.plug import unread

if TYPE_CHECKING:
    from rl.build import Resolved


def problems(resolved: Resolved) -> Iterable[str]:
    """What is wrong with `policy.thought`, each with its key and remedy."""
    policy, section = resolved.policy, resolved.policy.config.thought
    if section is None:
        return
    if not policy.cls.thinks:
        own = (
            ": what it writes before its picture is its thought already"
            if "image_tokens" in policy.cls.emits
            else ""
        )
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


def no_effect(resolved: Resolved) -> Iterable[str]:
    """'key: why' for what nothing reads beside the other keys."""
    section, renderer = resolved.policy.config.thought, resolved.renderer
    if section is None:
        return
    if renderer.cls.accepts != "hidden_states":
        why = f"renderer {renderer.name} takes {renderer.cls.accepts}, not hidden states"
        yield from unread(section, "states", why, at="policy.thought.")
