"""An error that was foreseen is a sentence, any other a traceback."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import TracebackType

from rl.config.schema import ConfigError, listed

_PACKAGE = Path(__file__).resolve().parents[1]


def sentence(error: BaseException) -> str | None:
    """What to tell the user; None for an error that nobody foresaw, whose traceback is needed.

    Foreseen is what a `raise` statement of this package raised. Its asserts, and what a library or
    a user's own plug raises, are not.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not str(error):
        return None
    last = frames[-1]
    if _PACKAGE not in Path(last.filename).resolve().parents:
        return None
    if not (last.line or "").startswith("raise "):
        return None
    if isinstance(error, ConfigError):
        return f"this config cannot run:\n{listed(error.problems)}"
    return "\n  ".join(["this run cannot go on:", *str(error).split("\n")])


def excepthook(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    text = sentence(error)
    if text is None:
        sys.__excepthook__(kind, error, trace)
    else:
        print(text, file=sys.stderr)
