"""Decodes single tokens, where the policy's tokenizer is on this machine; no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl.config.shipped import located

_HALF = "\ufffd"
_MAX_JOINED = 8
"""Tokens that make one character together: more are no character."""


class Pieces:
    """The tokenizer of a run's policy."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """`config`: as the run's `config.json` holds it."""
        self._tokenizer = _tokenizer(config)

    def of(self, token_ids: Sequence[int]) -> list[str] | None:
        """Each token's own text; where several make one character, the first has it and the others
        ''. None where they are not known."""
        if self._tokenizer is None:
            return None
        texts: list[str] = []
        waiting: list[int] = []
        for token in token_ids:
            waiting.append(token)
            text = self._decoded(waiting)
            if text is None:
                return None
            if _HALF in text and len(waiting) < _MAX_JOINED:
                continue
            texts += [text, *[""] * (len(waiting) - 1)]
            waiting = []
        return texts + [self._decoded(waiting) or "", *[""] * (len(waiting) - 1)] * bool(waiting)

    def _decoded(self, token_ids: Sequence[int]) -> str | None:
        try:
            return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))
        except (OverflowError, TypeError, ValueError):  # ids that no tokenizer has
            return None


def _tokenizer(config: Mapping[str, Any]) -> Any:
    policy = config.get("policy")
    path = policy.get("model_path") if isinstance(policy, Mapping) else None
    if not isinstance(path, str):
        return None
    try:
        from tokenizers import Tokenizer

        file = Path(located(path)) / "tokenizer.json"
        if not file.is_file():
            from huggingface_hub import try_to_load_from_cache

            found = try_to_load_from_cache(path, "tokenizer.json")
            if not isinstance(found, str):
                return None
            file = Path(found)
        return Tokenizer.from_file(str(file))
    # The library raises bare Exceptions for a file it cannot read; ImportError where there is none.
    except Exception:
        return None
