"""The judge's interface for rewards: `Question`, `Answer` and the `Judge` protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from rl.config.schema import JudgeConfig

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Question:
    """One user message."""

    parts: tuple[str | Image, ...]
    """In the order in which the judge reads them. Parts that a group shares (picture, rubric)
    come first, so that the judge's prefix cache can reuse it."""
    reply_schema: Mapping[str, Any]
    """JSON schema of the reply, sent when `judge.guided_json` says so."""
    temperature: float | None = None
    """Judge sampling temperature; None: `judge.temperature`."""
    labels: tuple[str, ...] = ()
    """If set, the judge writes one token, and the reply that `parse` gets is the JSON of the
    log-probs of these labels (`rl.judge.reply.read_chat`). `temperature` and `reply_schema`
    are then unused, and an unreadable reply is final, since a repeat would be the same."""


@dataclass(frozen=True)
class Answer(Generic[T]):
    """How one question ended."""

    value: T | None
    """The parsed reply; None exactly when `failure` is set."""
    replies: tuple[str, ...]
    """All raw replies in order, unreadable ones included; one above
    `rl.judge.reply.MAX_REPLY_CHARS` is truncated."""
    failure: str | None
    """Begins with a fixed word: timeout, transport, http_<status>, no_reply (a 2xx without a chat
    completion), outage; about this question: unreadable, refused (this question alone, others are
    answered)."""
    attempts: int
    """Requests sent for this question; 0 when all its replies came from the journal."""
    seconds: float
    """Seconds from the call to the answer, queueing included."""


class Judge(Protocol):
    """The judge client of a rank; all rewards that ask this judge share it."""

    config: JudgeConfig

    async def ask(
        self, question: Question, parse: Callable[[str], T], repeat: int = 0
    ) -> Answer[T]:
        """Ask until `parse` can read a reply, within the limits of `config`.

        `parse` raises `rl.judge.reply.UnreadableReplyError` on what it cannot read. `repeat`
        numbers equal questions whose answers are averaged. If the judge fails, the `Answer` has a
        `failure`; if it refuses every question (wrong key, model or request), the run stops.
        """
        ...
