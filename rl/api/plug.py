"""What plugs that are classes have in common: a section of the config, read as their `Config`, and
metrics of their own.

What: `PlugBase`, `PlugConfig`, `shown`. What not: the rooms (`reward.py`, `data.py`),
finding and checking a plug (`find.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Generic, get_args, get_origin

from typing_extensions import TypeVar

from rl.api.metric import Metric
from rl.config.schema import Section


class PlugConfig(Section):
    """Base of a plug's own keys; by itself: no keys."""

    type: str = ""
    """The plug's name, or its dotted path."""


ConfigT = TypeVar("ConfigT", bound=Section, default=PlugConfig)


class PlugBase(Generic[ConfigT]):
    """`class Mine(Reward[MyConfig])` reads its section as a `MyConfig`; a bare `Reward` has no
    keys."""

    Config: ClassVar[type[Section]] = PlugConfig
    """Of its section: what stands in those brackets."""
    metrics: ClassVar[Mapping[str, Metric]] = {}
    """What `take_metrics` may report, by name. In a run's lines, wandb and the metrics table a name
    stands behind the plug's place: `reward/metric/<reward>/<name>`, `data/metric/train.<i>/<name>`,
    `policy/metric/<name>`, `engine/<name>`, `renderer/<name>`."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "Config" in cls.__dict__:
            return
        for base in cls.__dict__.get("__orig_bases__", ()):
            origin, given = get_origin(base), get_args(base)
            is_ours = isinstance(origin, type) and issubclass(origin, PlugBase)
            if is_ours and not isinstance(given[0], TypeVar):
                cls.Config = given[0]

    def take_metrics(self) -> Mapping[str, float]:
        """What there is to report since the last call: means over what this rank saw, by declared
        names; those with nothing to say are left out.

        Asked once an iteration, when its last verdict is in (a renderer when its last picture is);
        what a held-out run left is taken too, and dropped. The line holds the mean over the ranks
        that report a name, each rank counting once. Under `max_staleness` 1 the next iteration is
        under way already, and part of it may be counted. What belongs to one picture is a part of
        its `RewardOutput` instead.

        A run's first iteration refuses an undeclared name and an exception. Later on, and for a
        value that is not finite at any time, they are left out and said once.
        """
        return {}


def shown(value: object) -> str:
    """A value and its type on one line, short."""
    text = " ".join(repr(value).split())
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
