"""Asks the judge real questions before a model is loaded, as the rewards of training ask them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from rl.api.judge import Answer, Question
from rl.api.plugin import Resources
from rl.api.reward import Reward
from rl.api.types import RewardInput, Sample
from rl.build import Plugin, Resolved
from rl.check.compatibility import READABLE
from rl.check.dry_run import grade_once, made_up_input
from rl.console import duration
from rl.judge.client import JudgeClient, JudgeError, JudgeUnreachableError
from rl.judge.http import TOO_MANY_REQUESTS, Dialect, remedy_for
from rl.printing import excerpt

T = TypeVar("T")

SHOWN_REPLY_CHARS = 300
START_PATIENCE_S = 60.0
"""Longest wait for a judge that has too many requests, or that fails between two questions."""


@dataclass
class JudgeCheck:
    """The result of asking the judge."""

    problems: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    """A line for each reward that was asked or skipped; endpoints that are down, if one answers."""
    dialects: dict[str, Dialect] = field(default_factory=dict)
    """API base -> dialect."""


async def ask_judge(
    resolved: Resolved,
    api_bases: Sequence[str],
    wait_s: float,
    sample: Sample | None = None,
    num_sources: int = 1,
) -> JudgeCheck:
    """Let each reward ask each endpoint about one picture. `wait_s`: time limit of a judge's start.
    `sample`: a row of the run's data, whose source is graded; fields that it lacks are made up.
    `num_sources`: source pictures of a sample that is made up.
    """
    reward_input = _reward_input(resolved, sample, num_sources)
    result, down = JudgeCheck(), []
    for base_result in await asyncio.gather(
        *(_ask_base(resolved, base, wait_s, sample is None, reward_input) for base in api_bases)
    ):
        if isinstance(base_result, JudgeUnreachableError):
            down.append(str(base_result))
            continue
        result.problems += base_result.problems
        result.lines += base_result.lines
        result.dialects |= base_result.dialects
    if result.dialects:
        result.lines += down
    else:
        result.problems += down
    return result


async def _ask_base(
    resolved: Resolved, base: str, wait_s: float, is_made_up: bool, reward_input: RewardInput
) -> JudgeCheck | JudgeUnreachableError:
    # A run waits, e.g. until a quota is renewed; before a run, such a wait is a problem to report.
    config = resolved.config.judge
    patience_s = min(config.max_outage_s, config.timeout_s, START_PATIENCE_S)
    try:
        client = JudgeClient(config.model_copy(update={"max_outage_s": patience_s}), base)
    except ValueError as error:  # a bad key, proxy or certificate in the environment
        return JudgeCheck([f"judge: {error}"])
    result = JudgeCheck(dialects=client.dialects())
    try:
        await client.check_health(wait_s)
        for plugin in resolved.rewards.values():
            if plugin.cls.needs_judge:
                await _ask_reward(plugin, client, base, is_made_up, reward_input, result)
    except JudgeUnreachableError as error:
        return error
    except JudgeError as error:
        result.problems.append(f"judge: {error}")
    finally:
        await client.aclose()
    return result


async def _ask_reward(
    plugin: Plugin[Reward],
    client: JudgeClient,
    base: str,
    is_made_up: bool,
    reward_input: RewardInput,
    result: JudgeCheck,
) -> None:
    needs = plugin.cls.needs_with(plugin.config)
    if plugin.cls.runs_model or (is_made_up and needs - READABLE):
        reason = "loads a model" if plugin.cls.runs_model else "reads hidden keys of the data"
        result.lines.append(f"{plugin.key}: not asked, since it {reason}")
        return
    judge = _RecordingJudge(client)
    limit_s = 2 * client.config.timeout_s
    started = time.monotonic()
    try:
        async with asyncio.timeout(limit_s):
            output, problems = await grade_once(plugin, Resources(judge, "cpu"), reward_input)
    except TimeoutError:
        reason = f"did not answer within {limit_s:g} s{_remedy('timeout', client)}"
        output, problems = None, [f"{plugin.key}: {base} {reason}"]
    failed = [answer for answer in judge.answers if answer.failure]
    if failed and not problems:
        problems = [f"{plugin.key}: {base} {_why_unusable(failed[0], client)}"]
    result.problems += problems
    if output is not None and not problems:
        took = duration(time.monotonic() - started)
        unreadable = sum(len(answer.replies) - 1 for answer in judge.answers)
        result.lines.append(
            f"{plugin.key}: {base} answered {len(judge.answers)} questions in {took}"
            + (f", {unreadable} replies unreadable" if unreadable > 0 else "")
            + (f", {output.failure}" if output.value is None else f", value {output.value:.3g}")
        )


def _why_unusable(answer: Answer[Any], client: JudgeClient) -> str:
    failure, config = str(answer.failure), client.config
    if not answer.replies:
        return f"gave no answer: {failure}{_remedy(failure, client)}"
    reply = excerpt(answer.replies[-1], SHOWN_REPLY_CHARS) or "(nothing)"
    remedy = (
        "set judge.guided_json='always' if the endpoint supports it; raise judge.max_tokens="
        f"{config.max_tokens} if the reply is cut or empty (a reasoning model also spends it on "
        f"reasoning); else choose another judge.model={config.model!r}."
    )
    if "min_legal_mass" in failure:
        remedy = "use a model that does not think first, other labels, or a prompt of your own."
    return f"gives unusable answers: {failure}; its reply: {reply}\nRemedy: {remedy}"


def _remedy(failure: str, client: JudgeClient) -> str:
    if failure.startswith("http_"):
        status = 429 if failure.startswith(TOO_MANY_REQUESTS) else 500
        return f"\n{remedy_for(status, None, client.config)}"
    return (
        "\nRemedy: look into the endpoint's own log; raise judge.timeout_s="
        f"{client.config.timeout_s:g} if it is slow."
    )


class _RecordingJudge:
    """Passes questions to the judge and keeps its answers."""

    def __init__(self, client: JudgeClient) -> None:
        self.config = client.config
        self.answers: list[Answer[Any]] = []
        self._client = client

    async def ask(
        self, question: Question, parse: Callable[[str], T], repeat: int = 0
    ) -> Answer[T]:
        answer = await self._client.ask(question, parse, repeat)
        self.answers.append(answer)
        return answer


def _reward_input(resolved: Resolved, sample: Sample | None, num_sources: int) -> RewardInput:
    """The input to grade. Without a `sample`, it has `num_sources` sources of noise in the largest
    size that the judge gets: noise takes about as many PNG bytes as a photo."""
    from PIL import Image

    side_px = resolved.config.judge.image_side_px
    pixels = random.Random(0).randbytes(side_px * side_px)
    fake = made_up_input(resolved, Image.frombytes("L", (side_px, side_px), pixels).convert("RGB"))
    if sample is None:
        return replace(fake, sample=replace(fake.sample, sources=fake.sample.sources * num_sources))
    sources = sample.sources or fake.sample.sources
    filled = replace(sample, sources=sources, target=sample.target or fake.sample.target)
    return replace(fake, sample=filled, image=fake.image and (filled.source or fake.image))
