"""What plugs that are classes have in common: a section of the config, read as their `Config`.

What: `PlugBase`, `PlugConfig`, `shown`. What not: the rooms (`reward.py`, `data.py`),
finding and checking a plug (`find.py`).
"""

from __future__ import annotations

from typing import Any, ClassVar, Generic, get_args, get_origin

from typing_extensions import TypeVar

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

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "Config" in cls.__dict__:
            return
        for base in cls.__dict__.get("__orig_bases__", ()):
            origin, given = get_origin(base), get_args(base)
            is_ours = isinstance(origin, type) and issubclass(origin, PlugBase)
            if is_ours and not isinstance(given[0], TypeVar):
                cls.Config = given[0]


def shown(value: object) -> str:
    """A value and its type on one line, short."""
    text = " ".join(repr(value).split())
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
