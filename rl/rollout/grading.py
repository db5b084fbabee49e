"""Calls a reward on pictures; an exception of the reward becomes a `RewardOutput` without value.

Axes: `_G` pictures of a group.
"""

from __future__ import annotations

import asyncio
import inspect
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from rl.api.find import described
from rl.api.plugin import brief
from rl.api.reward import Reward, checked_output
from rl.api.types import RewardInput, RewardOutput, is_unreadable
from rl.console import warn
from rl.files import copied_pictures
from rl.judge.client import JudgeError
from rl.ranks.error_messages import is_lost_device, is_raised_here

Outputs = Sequence[RewardOutput]


BLOCKED_S = 1.0
"""A warning names an `async` reward that blocks the event loop for longer than this."""
_warned: set[str] = set()


async def scores(
    name: str,
    reward: Reward,
    inputs_G: Sequence[RewardInput],
    unreadable: Literal["ungraded", "lowest"] = "ungraded",
    may_refuse: bool = False,
) -> Outputs:
    """Outputs of the reward `name`, one per input; `inputs_G` has one element if the reward grades
    single pictures. `unreadable`: as `judge.unreadable`. Raises `JudgeError`, which stops the
    run, if the judge is set up wrongly, unless it `may_refuse`."""
    started = time.perf_counter()
    method: Callable[[Any], Any] = reward.score_group if reward.scores_groups() else reward.grade
    try:
        inputs: Any = copied_pictures(list(inputs_G))
        if reward.scores_groups():
            returned = await _call(name, method, inputs)
            if isinstance(returned, Mapping | str):
                raise TypeError(f"score_group gives {brief(returned)}; expected a list of scores")
            scores_G = list(returned)
            if len(scores_G) != len(inputs_G):
                raise ValueError(f"{len(scores_G)} scores for {len(inputs_G)} pictures")
        else:
            scores_G = [await _call(name, method, inputs[0])]
        outputs_G = [checked_output(score, reward.unit_parts) for score in scores_G]
    except BaseException as error:  # a real KeyboardInterrupt reaches only the main thread
        task = asyncio.current_task()
        is_cancelled = task is not None and task.cancelling() > 0
        is_refused = isinstance(error, JudgeError) and not may_refuse
        if is_refused or is_lost_device(error) or is_cancelled:
            raise
        is_wrong_value = is_raised_here(error)  # by `checked_output`: no traceback
        form = traceback.format_exception_only if is_wrong_value else traceback.format_exception
        text = "".join(form(error))
        failure = f"raised {described(error, method)}"
        outputs_G = [RewardOutput(None, failure=failure, traceback=text)] * len(inputs_G)
    if unreadable == "lowest":
        lowest = dict.fromkeys(reward.unit_parts, 0.0)
        outputs_G = [
            replace(output, value=0.0, parts=lowest) if is_unreadable(output.failure) else output
            for output in outputs_G
        ]
    seconds = time.perf_counter() - started
    return [replace(output, seconds=output.seconds or seconds) for output in outputs_G]


async def _call(name: str, method: Callable[..., Any | Awaitable[Any]], argument: object) -> Any:
    """Run a coroutine function on this event loop, a plain function (it may block) in a thread."""
    is_async = inspect.iscoroutinefunction(method)
    if is_async:
        result = method(argument)
    else:
        result = await asyncio.to_thread(_without_stop, method, argument)
    if inspect.iscoroutine(result):
        return await _TimedCoroutine(name, result)
    return await result if inspect.isawaitable(result) else result


def _without_stop(method: Callable[..., Any], argument: object) -> Any:
    """`method(argument)`; a StopIteration, which no future can hold, becomes a RuntimeError, as in
    a coroutine."""
    try:
        return method(argument)
    except StopIteration as error:
        text = "a bare next(...) found nothing: StopIteration"
        raise RuntimeError(text).with_traceback(error.__traceback__) from error


class _TimedCoroutine:
    """Awaits a reward's coroutine, and warns if the reward blocks the event loop, which also
    receives the judge's replies."""

    def __init__(self, name: str, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._name, self._coroutine = name, coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        resume: Callable[[Any], Any] = self._coroutine.send
        value: Any = None
        while True:
            started = time.perf_counter()
            try:
                awaited = resume(value)
            except StopIteration as end:
                return end.value
            finally:
                self._warn_if_slow(time.perf_counter() - started)
            try:
                resume, value = self._coroutine.send, (yield awaited)
            except BaseException as error:
                resume, value = self._coroutine.throw, error

    def _warn_if_slow(self, seconds: float) -> None:
        if seconds > BLOCKED_S and self._name not in _warned:
            _warned.add(self._name)
            warn(
                f"reward {self._name}: its `async` code blocked the event loop for {seconds:.1f} s;"
                " meanwhile nothing else is graded, and no reply of the judge is read. Make it a"
                " plain `def`, which runs in a thread, or use `await asyncio.to_thread(...)`"
                " (logged once)"
            )
