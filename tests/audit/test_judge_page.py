"""The reward that docs/judge.md prints."""

from __future__ import annotations

import asyncio
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tiny_rewards import ScriptedJudge, make
from tiny_typing import typing_errors

from rl.api.plugin import PluginConfig
from rl.api.types import RewardInput, Sample

PAGE = Path(__file__).resolve().parents[2] / "docs/judge.md"


def source() -> str:
    block = re.search(r"^    # my_plugins/legible\.py\n(?:    .*\n|\n)+", PAGE.read_text(), re.M)
    return textwrap.dedent(block[0])


def test_the_printed_reward_grades_and_reports_failures() -> None:
    namespace: dict[str, Any] = {"__name__": "legible"}
    exec(source(), namespace)
    picture = RewardInput(Sample("a", "write a word"), "", Image.new("RGB", (8, 8)))
    for reply, value in (('{"score": 7}', 0.7), ('{"score": 11}', None), ("seven", None)):
        reward = make(namespace["Legible"], PluginConfig(type="legible"), ScriptedJudge(reply))
        output = asyncio.run(reward.grade(picture))
        assert output.value == value and output.replies == (reply,)
        assert (output.failure is None) == (value is not None)


@pytest.mark.slow
def test_the_printed_reward_is_typed(tmp_path: Path) -> None:
    (tmp_path / "legible.py").write_text(source())
    assert typing_errors([tmp_path / "legible.py"], tmp_path) == []
