"""Asks a reward about pictures, however it is written and whatever it does.

What a reward raises, or returns in a wrong shape, makes that picture's `RewardOutput` one without a
value, with the traceback; the run goes on.

Axes: `_G` pictures of a group.
"""

from __future__ import annotations

import asyncio
import inspect
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl.api.find import STRANGE, described
from rl.api.plug import shown
from rl.api.reward import Reward, checked_output
from rl.api.types import RewardInput, RewardOutput
from rl.files.images import own_pictures
from rl.judge.client import JudgeError
from rl.ranks.error_messages import is_lost_device

Outputs = Sequence[RewardOutput]


async def scores(reward: Reward, inputs_G: Sequence[RewardInput]) -> Outputs:
    """_G. A reward that grades picture by picture takes one. Raises `JudgeError`: a judge that is
    set up wrongly stops the run."""
    started = time.perf_counter()
    verb: Callable[[Any], Any] = reward.score_group if reward.scores_groups() else reward.grade
    try:
        given: Any = own_pictures(list(inputs_G))
        if reward.scores_groups():
            found = await _call(verb, given)
            if isinstance(found, Mapping | str):
                raise TypeError(f"score_group gives {shown(found)}; expected a list of scores")
            scores_G = list(found)
            if len(scores_G) != len(inputs_G):
                raise ValueError(f"{len(scores_G)} scores for {len(inputs_G)} pictures")
        else:
            scores_G = [await _call(verb, given[0])]
        outputs_G = [checked_output(score, reward.unit_parts) for score in scores_G]
    except JudgeError:
        raise
    except STRANGE as error:
        if is_lost_device(error):
            raise
        text = "".join(traceback.format_exception(error))
        failure = f"raised {described(error, verb)}"
        outputs_G = [RewardOutput(None, failure=failure, traceback=text)] * len(inputs_G)
    seconds = time.perf_counter() - started
    return [replace(output, seconds=output.seconds or seconds) for output in outputs_G]


async def _call(verb: Callable[..., Any | Awaitable[Any]], given: object) -> Any:
    """A coroutine function runs here; a plain one in a thread, since it may take its time."""
    is_async = inspect.iscoroutinefunction(verb)
    found = verb(given) if is_async else await asyncio.to_thread(verb, given)
    return await found if inspect.isawaitable(found) else found
