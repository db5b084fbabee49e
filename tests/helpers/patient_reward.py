"""Brightness with a delay until a file exists, like a judge that is slower than a rollout."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rl.api.metric import Metric
from rl.api.plugin import PluginConfig, Resources
from rl.api.reward import Reward
from rl.api.types import RewardInput, RewardOutput
from tests.helpers.brightness_reward import Brightness

PATIENCE_S = 20.0


class Config(PluginConfig):
    """The file to wait for."""

    wait_for: str
    """Grades are given once this file exists."""


class Patient(Reward[Config]):
    needs = frozenset({"image"})
    runs_model = True  # skips the trial before the run, which would wait
    metrics = {"waited_s": Metric("s", "longest wait for a file since the last report")}

    def __init__(self, config: Config, resources: Resources) -> None:
        super().__init__(config, resources)
        self._wait_for = Path(config.wait_for)
        self._brightness = Brightness(PluginConfig(), resources)
        self._longest_s = 0.0

    def take_metrics(self) -> dict[str, float]:
        longest_s, self._longest_s = self._longest_s, 0.0
        return {"waited_s": longest_s}

    def close(self) -> None:
        self._wait_for.with_name("reward_is_closed").touch()

    async def grade(self, reward_input: RewardInput) -> RewardOutput:
        waited_s = 0.0
        while not self._wait_for.exists():
            if waited_s > PATIENCE_S:
                return RewardOutput(None, failure="timeout: no such file")
            await asyncio.sleep(0.02)
            waited_s += 0.02
            self._longest_s = max(self._longest_s, waited_s)
        return await self._brightness.grade(reward_input)
