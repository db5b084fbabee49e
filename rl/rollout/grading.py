"""Ask the rewards about pictures, whatever they are written like and whatever they do.

A reward is a plug: what it raises or returns in a wrong shape is that picture's `RewardOutput`
without a value, with the traceback; the run goes on.

Axes: `_G` pictures of a group.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl.api.find import STRANGE
from rl.api.plug import shown
from rl.api.reward import Reward, checked_output
from rl.api.types import RewardInput, RewardOutput
from rl.judge.client import JudgeError
from rl.ranks.error_messages import is_lost_device

Grades = Mapping[str, RewardOutput]
"""By the name of the reward."""


async def grade(rewards: Mapping[str, Reward], reward_input: RewardInput) -> Grades:
    """Every reward that grades picture by picture. Raises `JudgeError`: a judge that is set up
    wrongly stops the run."""
    asked = {name: reward for name, reward in rewards.items() if not reward.scores_groups()}
    outputs = await asyncio.gather(*(_grade_one(reward, reward_input) for reward in asked.values()))
    return dict(zip(asked, outputs, strict=True))


async def score_group(
    rewards: Mapping[str, Reward], inputs_G: Sequence[RewardInput]
) -> list[Grades]:
    """Every reward that compares; _G."""
    asked = {name: reward for name, reward in rewards.items() if reward.scores_groups()}
    outputs = await asyncio.gather(*(_score_all(reward, inputs_G) for reward in asked.values()))
    return [dict(zip(asked, row, strict=True)) for row in zip(*outputs, strict=True)]


def _own(reward_input: RewardInput) -> RewardInput:
    """The same with copies of its pictures: a reward may draw on them, and neither the judge, nor
    another reward, nor the record sees that."""
    sample, image = reward_input.sample, reward_input.image
    return replace(
        reward_input,
        sample=replace(
            sample,
            sources=tuple(source.copy() for source in sample.sources),
            target=sample.target and sample.target.copy(),
        ),
        image=image and image.copy(),
    )


async def _grade_one(reward: Reward, reward_input: RewardInput) -> RewardOutput:
    try:
        return checked_output(await _call(reward.grade, _own(reward_input)), reward.unit_parts)
    except JudgeError:
        raise
    except STRANGE as error:
        return _raised(error)


async def _score_all(reward: Reward, inputs_G: Sequence[RewardInput]) -> list[RewardOutput]:
    try:
        found = await _call(reward.score_group, [_own(x) for x in inputs_G])
        if isinstance(found, Mapping | str):
            raise TypeError(f"score_group gives {shown(found)}; expected a list of scores")
        scores_G = list(found)
        if len(scores_G) != len(inputs_G):
            raise ValueError(f"{len(scores_G)} scores for {len(inputs_G)} pictures")
        return [checked_output(score, reward.unit_parts) for score in scores_G]
    except JudgeError:
        raise
    except STRANGE as error:
        return [_raised(error)] * len(inputs_G)


async def _call(verb: Callable[..., Any | Awaitable[Any]], given: object) -> Any:
    """A coroutine function runs here; a plain one in a thread, since it may take its time."""
    if inspect.iscoroutinefunction(verb):
        return await verb(given)
    found = await asyncio.to_thread(verb, given)
    return await found if inspect.isawaitable(found) else found


def _raised(error: BaseException) -> RewardOutput:
    """What a reward's exception is to an episode; a lost device ends the run."""
    if is_lost_device(error):
        raise error
    text = " ".join(str(error).split())
    return RewardOutput(
        None,
        failure=f"raised {type(error).__name__}: {text}",
        traceback="".join(traceback.format_exception(error)),
    )
