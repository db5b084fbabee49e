"""Measures seconds, CPU seconds and FLOPs of spans; an inner span pauses the outer one."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

OUTSIDE = "other"
"""Label of the cost outside of all spans."""


@dataclass(frozen=True)
class Spent:
    """The cost of the spans with one label."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    """CPU time of this thread or of the whole process, depending on the meter's clock."""
    flops: float = 0.0
    """A multiply-add counts as two; 0 if no counter runs."""

    def __add__(self, more: Spent) -> Spent:
        return Spent(self.wall_s + more.wall_s, self.cpu_s + more.cpu_s, self.flops + more.flops)

    def __sub__(self, less: Spent) -> Spent:
        return self + Spent(-less.wall_s, -less.cpu_s, -less.flops)


class Meter:
    """Measures the spans of one thread. `cpu_clock`: `time.thread_time`, or `time.process_time` to
    include the CPU time of other threads."""

    def __init__(
        self,
        cpu_clock: Callable[[], float] = time.thread_time,
        flops_so_far: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._cpu_clock = cpu_clock
        self._flops_so_far = flops_so_far
        self._open = [OUTSIDE]
        self.reset()

    def reset(self) -> None:
        """Sets all costs to zero; open spans stay open."""
        self.spent: dict[str, Spent] = {}
        self.positions = 0
        self._since = self._now()

    def _now(self) -> Spent:
        return Spent(time.perf_counter(), self._cpu_clock(), self._flops_so_far())

    def _charge(self) -> None:
        """Adds the cost since the last call to the innermost open span."""
        now = self._now()
        label = self._open[-1]
        self.spent[label] = self.spent.get(label, Spent()) + (now - self._since)
        self._since = now

    def read(self) -> dict[str, Spent]:
        """Label -> cost since the last reset."""
        self._charge()
        return dict(self.spent)

    @contextmanager
    def span(self, label: str) -> Iterator[None]:
        """Adds the cost of the block, without its inner spans, to `label`."""
        self._charge()
        self._open.append(label)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def watch(
        self,
        owner: Any,
        name: str,
        label: str,
        unless_in: str = "",
        before: Callable[..., object] = lambda *_, **__: None,
    ) -> None:
        """Makes calls of `owner.name` a span `label`, unless they are inside a span `unless_in`;
        `before` gets their arguments first."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if unless_in in self._open:
                return original(*args, **kwargs)
            before(*args, **kwargs)
            with self.span(label):
                return original(*args, **kwargs)

        setattr(owner, name, watched)

    def watch_phases(self) -> None:
        """Makes every phase of every `PhaseTimer` a span of the same name."""
        from rl.progress import PhaseTimer

        original = PhaseTimer.phase

        @contextmanager
        def phase(timer: PhaseTimer, name: str) -> Iterator[Any]:
            with self.span(name), original(timer, name) as value:
                yield value

        setattr(PhaseTimer, "phase", phase)  # noqa: B010 (mypy sees no method replaced)
