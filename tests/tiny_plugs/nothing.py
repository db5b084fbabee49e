"""A plug that fits every room and does nothing: `type: 'tiny_plugs.nothing'`."""

from __future__ import annotations

from rl.api.data import DataSource
from rl.api.plug import PlugConfig
from rl.api.reward import Reward
from rl.api.types import RewardInput, Sample
from rl.config.schema import Section

EMITS = frozenset({"text"})
ACCEPTS = "text"
MAKES_IMAGES = False
NEEDS: frozenset[str] = frozenset()


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


def build(*args: object) -> None:
    return None


class NothingMuch(Reward):
    """A reward."""

    def grade(self, reward_input: RewardInput) -> float:
        return 0.0


class Nobody(DataSource):
    """A data source."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Sample:
        return Sample(str(index), "do nothing")

    @classmethod
    def count(cls, config: PlugConfig) -> int:
        return 40
