"""A plugin for every room that does nothing: `type: 'tiny_plugins.nothing'`."""

from __future__ import annotations

from typing import NoReturn

from rl.api.data import DataSource
from rl.api.engine import Engine
from rl.api.policy import Policy
from rl.api.reward import Reward
from rl.api.types import RewardInput, Sample
from rl.renderers.none import NoRenderer


def unused(*given: object) -> NoReturn:
    raise AssertionError("it is only looked at")


class Nobody(Policy):
    """A policy."""

    emits = frozenset({"text"})
    build_prompt = encode_completion = decode_actions = collate = unused
    engine_folder = decoder = reference = unused
    export_weights = save_pretrained = unused


class Nowhere(Engine):
    """An engine."""

    generate = load_weights = unused


class Nil(NoRenderer):
    """A renderer."""


class NothingMuch(Reward):
    """A reward."""

    def grade(self, reward_input: RewardInput) -> float:
        return 0.0


class Nix(DataSource):
    """A data source."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Sample:
        return Sample(str(index), "do nothing")
