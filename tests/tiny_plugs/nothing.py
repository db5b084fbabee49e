"""A plug that fits every room and does nothing: `type: 'tiny_plugs.nothing'`."""

from __future__ import annotations

from rl.config.schema import Section

EMITS = frozenset({"text"})
ACCEPTS = "text"
MAKES_IMAGES = False
NEEDS: frozenset[str] = frozenset()
NEEDS_JUDGE = False


class Config(Section):
    """No knobs."""

    type: str
    """'tiny_plugs.nothing'."""


def validate(config: Config) -> list[str]:
    return []


def prompt_template(config: Config) -> None:
    return None


def negative_prompt(config: Config) -> None:
    return None


def parameter_counts(config: Config) -> dict[str, float]:
    return {}


def activation_counts(config: Config) -> dict[str, float]:
    return {}


def provides(config: Config) -> frozenset[str]:
    return frozenset()


def check(config: Config, on_bad_row: str, max_image_side_px: int) -> list[str]:
    return []


def count(config: Config) -> int:
    return 40


def build(*args: object) -> None:
    return None
