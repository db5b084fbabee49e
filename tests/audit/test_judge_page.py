"""The reward that docs/judge.md prints."""

from __future__ import annotations

import asyncio
from typing import Any

from PIL import Image
from tiny_pages import printed
from tiny_rewards import ScriptedJudge, make

from rl.api.plugin import PluginConfig
from rl.api.types import RewardInput, Sample


def test_the_printed_reward_grades_and_reports_failures() -> None:
    namespace: dict[str, Any] = {"__name__": "legible"}
    [source] = [block for block in printed("docs/judge.md") if "class Legible" in block]
    exec(source, namespace)
    picture = RewardInput(Sample("a", "write a word"), "", Image.new("RGB", (8, 8)))
    for reply, value in (('{"score": 7}', 0.7), ('{"score": 11}', None), ("seven", None)):
        reward = make(namespace["Legible"], PluginConfig(type="legible"), ScriptedJudge(reply))
        output = asyncio.run(reward.grade(picture))
        assert output.value == value and output.replies == (reply,)
        assert (output.failure is None) == (value is not None)
