"""Reward plugin: 1 if the policy's answer equals the sample's known answer, else 0."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from rl.api.plugin import PluginConfig, Resources
from rl.api.reward import Reward
from rl.api.types import RewardInput, RewardOutput
from rl.rewards.accuracy import answers
from rl.rewards.accuracy.maths import MathsProcess
from rl.rewards.shared.tags import TagName, last_block

_BOXED = r"\boxed{"


class Config(PluginConfig):
    """Where the answer is in the completion, and how much time a comparison may take."""

    answer_tag: TagName = "answer"
    """The answer is the content of the last complete block with this tag."""
    tag_required: bool = True
    """false: without such a block, the content of the last \\boxed{} is the answer."""
    max_answer_chars: Annotated[int, Field(ge=1, le=10_000)] = 400
    """A longer answer is wrong and is not compared."""
    max_cpu_s: Annotated[int, Field(ge=1, le=3600)] = 3
    """CPU time for comparing two formulas, s; an answer that takes more is wrong, `undecided`."""


class UnreadableGoldError(ValueError):
    """The known answer is missing, or no answer can be compared with it."""


class Accuracy(Reward[Config]):
    """Compares the last `<answer>...</answer>` of the policy's words with the gold, which is
    `Sample.hidden['answer']`: multiple choice by letter or text, numbers with percent, units and
    thousands commas, dates, scores and codes as they are written, text regardless of case and
    punctuation, formulas by symbolic equality. A letter does not equal its text if only the
    question says which belong together."""

    needs = frozenset({"text", "answer"})
    reads_thoughts = False

    def __init__(self, config: Config, resources: Resources) -> None:
        """Starts the worker process that compares formulas, without waiting for it."""
        super().__init__(config, resources)
        self._maths = MathsProcess(config.max_cpu_s)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="accuracy")

    def close(self) -> None:
        """Ends the worker process after its current comparison."""
        self._thread.shutdown(cancel_futures=True)
        self._maths.close()

    async def grade(self, reward_input: RewardInput) -> RewardOutput:
        """1.0 or 0.0. Parts: `parsed`, there is an answer; `undecided`, comparing it took too long.
        No value (UNGRADED) if the gold cannot be read or the machine is too busy."""
        started = time.monotonic()
        answer = self._answer(reward_input.words)
        try:
            gold = read_gold(reward_input.sample.hidden, self.config.answer_tag)
            right, undecided = await self._compare(gold, answer)
        except UnreadableGoldError as error:
            # The gold is not quoted: failures are written into episode records.
            return RewardOutput(
                None, failure=f"gold: of sample {reward_input.sample.id!r}: {error}"
            )
        except TimeoutError as error:
            return RewardOutput(None, failure=f"timeout: {error}")
        parts = {"parsed": float(bool(answer)), "undecided": float(undecided)}
        return RewardOutput(float(right), parts, seconds=time.monotonic() - started)

    def _answer(self, text: str) -> str:
        """The policy's bare answer; '' if there is none, or if it is too long."""
        answer = last_block(text, self.config.answer_tag)
        if answer is None and not self.config.tag_required:
            answer = last_boxed(text)
        if answer is None or len(answer) > self.config.max_answer_chars:
            return ""
        return answers.bare(answer)

    async def _compare(self, gold: str, answer: str) -> tuple[bool, bool]:
        """(equal, undecided). Raises UnreadableGoldError and TimeoutError."""
        if answer and answers.is_same_text(gold, answer):
            return True, False
        if answers.needs_verifier(gold) and await self._ask_maths(gold, None) != "readable":
            raise UnreadableGoldError("cannot be read as a formula")
        if not answer:
            return False, False
        same = answers.compare(gold, answer)
        if same is not None:
            return same, False
        verdict = await self._ask_maths(gold, answer)
        return verdict == "equal", verdict == "too_costly"

    async def _ask_maths(self, gold: str, answer: str | None) -> str:
        latex = None if answer is None else answers.as_latex(answer)
        compare = partial(self._maths.compare, answers.as_latex(gold), latex)
        return await asyncio.get_running_loop().run_in_executor(self._thread, compare)


def read_gold(hidden: Mapping[str, Any], answer_tag: str) -> str:
    """The bare known answer; `hidden` may give it within answer tags.

    Raises UnreadableGoldError.
    """
    gold = hidden.get("answer")
    if isinstance(gold, bool) or not isinstance(gold, str | int | float):
        raise UnreadableGoldError(f"{type(gold).__name__} under 'answer'; expected text or number")
    text = str(gold)
    tagged = last_block(text, answer_tag)
    text = answers.bare(text if tagged is None else tagged)
    if not text:
        raise UnreadableGoldError("empty")
    return text


def last_boxed(text: str) -> str | None:
    """The content of the last complete \\boxed{}."""
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    depth = 1
    for brace in re.finditer(r"[{}]", text[start + len(_BOXED) :]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start + len(_BOXED) :][: brace.start()]
    return None
