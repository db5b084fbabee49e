"""Brightness, told only once a certain file is there: a judge that is slower than a rollout."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rl.api.types import RewardInput, RewardOutput
from rl.config.schema import Section
from tests.brightness_reward import Brightness

NEEDS = frozenset({"image"})
NEEDS_JUDGE = False
PATIENCE_S = 20.0


class Config(Section):
    """What to wait for."""

    type: str
    """'tests.patient_reward'."""
    wait_for: str
    """A file; without it there is no grade."""


class Patient(Brightness):
    def __init__(self, wait_for: Path) -> None:
        self._wait_for = wait_for

    async def grade(self, reward_input: RewardInput) -> RewardOutput:
        waited_s = 0.0
        while not self._wait_for.exists():
            if waited_s > PATIENCE_S:
                return RewardOutput(None, failure="timeout: nobody went on")
            await asyncio.sleep(0.02)
            waited_s += 0.02
        return await super().grade(reward_input)


def build(config: Config, judge: object, device: object) -> Patient:
    return Patient(Path(config.wait_for))
