"""The process in which expressions are compared: it may hang or die, and the run goes on.

Reads JSON lines `{"gold": ..., "answer": ... | null, "cpu_s": ...}` (LaTeX) and answers each with
one word: `readable` (a gold alone), `unreadable_gold`, `equal`, `different`. What is read is parsed
by a LaTeX grammar, never evaluated as Python. The kernel ends the process over a comparison that
takes more than `cpu_s`, in C code too. A script of its own: it imports nothing of this project.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from typing import Any

MEMORY_BYTES = 2 * 2**30


def main() -> None:
    """Serve until the parent closes our input."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints is not a reply
    for stop in (signal.SIGINT, signal.SIGTERM):  # meant for the run, which saves and then ends us
        signal.signal(stop, signal.SIG_IGN)
    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import math_verify  # noqa: F401 (seconds, before the first question rather than within it)

    print("ready", file=replies)
    for line in sys.stdin:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, question["cpu_s"])  # SIGPROF ends the process
        verdict = judge(question["gold"], question["answer"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(verdict, file=replies)


def judge(gold: str, answer: str | None) -> str:
    """The word for one question."""
    from math_verify import verify

    golds = read(gold)
    if not golds:
        return "unreadable_gold"
    if answer is None:
        return "readable"
    answers = read(answer)
    same = bool(answers) and verify(golds, answers, timeout_seconds=None)
    return "equal" if same else "different"


def read(latex: str) -> list[Any]:
    """The expression, in a list of one; [] when it is none."""
    from math_verify import LatexExtractionConfig, parse

    return parse(
        f"${latex}$",
        extraction_config=[LatexExtractionConfig(boxed_match_priority=-1)],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )


if __name__ == "__main__":
    main()
