"""Checks which model a reply names: a new name is logged once, and refused if it took over."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rl.judge.dialect import Dialect
from rl.record.untrusted import shown

SHOWN_NAME_CHARS = 100
MAX_NAMES = 8
"""At one place: one that names itself anew each time is not listened to for ever."""

log = logging.getLogger(__name__)


def is_news(dialect: Dialect, name: str | None, asked: str) -> bool:
    """Whether a person should hear of `name`, which is remembered: a first name other than was
    asked, or any other than before."""
    known = dialect.model_names
    if name is None or name in known or len(known) >= MAX_NAMES:
        return False
    known.append(name)
    return known != [asked]


def told(url: str, dialect: Dialect, asked: str) -> str:
    """'http://... answers as 'that', after 'this', asked for judge.model='this''."""
    *earlier, name = (repr(shown(known, SHOWN_NAME_CHARS)) for known in dialect.model_names)
    after = f", after {earlier[-1]}" if earlier else ""
    return f"{url} answers as {name}{after}, asked for judge.model={asked!r}"


def refusal(told: str, served: Sequence[str]) -> str:
    """In words, where `served` lacks the model that was asked for."""
    return (
        f"{told}, which it does not serve any more; it serves: {names(served)}. Remedy: serve that "
        "model again, or start a run with the other one, whose grades are another reward."
    )


def names(served: Sequence[str]) -> str:
    """A list of models, shortened."""
    return ", ".join(shown(name, SHOWN_NAME_CHARS) for name in served[:10]) or "nothing"


def warn_of(told: str) -> None:
    log.warning(
        "%s: its full name is well, but another model's grades are another reward; if it is "
        "another, set judge.model to the one that is meant, or turn the gateway's fallback off "
        "(judge/other_model_replies counts)",
        told,
    )
