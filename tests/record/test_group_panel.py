"""The console panel of one group: its completions, its iterations, and that text is escaped."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.cells import cell_len
from tiny_run import SAMPLE, episode

from rl.api.types import Action, Episode, Prompt, Status
from rl.console import Console

HOSTILE = "[red]no[/red] [/] :smile: \x1b[31mred\x1b[0m \u202eturned\u200f \x07 " + "w" * 400


def wrote(text: str, reward: float | None, **changes) -> Episode:
    status = Status.UNGRADED if reward is None else Status.SCORED
    return episode(action=Action(text, text), reward=reward, status=status, **changes)


def panel_text(episodes: list[Episode], stream: io.StringIO) -> str:
    Console(True, stream).print_group(1, episodes, [0.5] * len(episodes))
    return stream.getvalue()


def test_the_best_the_median_and_the_worst_completion_are_shown() -> None:
    def shown(rewards: list[float | None]) -> list[str]:
        group = [wrote(f"text{g}", reward) for g, reward in enumerate(rewards)]
        return re.findall(r"text\d", panel_text(group, io.StringIO()))

    assert shown([0.5, None, 0.0, 1.0, 0.25]) == ["text3", "text4", "text1"]
    assert shown([0.0, 1.0]) == ["text1", "text0"]
    assert shown([1.0]) == shown([None]) == ["text0"]


def test_each_completion_has_reward_advantage_failure_and_a_reply() -> None:
    replies = {"judge": ("reply 0", "reply 1"), "other": ("x",)}
    action = Action("lost", "lost", thought="because")
    group = [
        wrote("good", 1.0, replies=replies),
        replace(wrote("", 0.0), status=Status.POLICY_FAILED, failure="empty: wrote nothing"),
        replace(wrote("lost", None), failure="timeout: 120 s", action=action),
    ]
    stream = io.StringIO()
    Console(True, stream).print_group(1, group, [1.25, -0.75, None])
    assert [line.split() for line in stream.getvalue().split("\n")[1:-2]] == [
        ["row-7:", "make", "it", "red"],
        ["reward", "wrote", "judge"],
        ["1", "(+1.25)", "good", "reply", "0"],
        ["x"],
        ["0", "(-0.75)", "(nothing)", "empty:", "wrote", "nothing"],
        ["ungraded", "because", "timeout:", "120", "s"],
        ["lost"],
    ]


@pytest.fixture
def hostile() -> list[Episode]:
    prompt = Prompt(replace(SAMPLE, id=HOSTILE, instruction="日本語の長い文章" * 60), (1,))
    return [
        wrote(HOSTILE, 0.5, prompt=prompt, parts={HOSTILE: 1.0}, replies={HOSTILE: (HOSTILE,) * 9}),
        wrote("\ud800 half\r\nof it\u2028", None, failure=HOSTILE),
    ]


def test_the_panel_has_plain_lines_of_eighty_columns(hostile: list[Episode]) -> None:
    lines = panel_text(hostile, io.StringIO()).split("\n")
    assert max(map(cell_len, lines)) == 80
    assert all(line.isprintable() for line in lines)
    assert lines[0].startswith("---- one group of iteration 1 ---") and lines[-2] == "-" * 80
    text = "\n".join(lines)
    assert "─" not in text and "│" not in text
    for kept in ("[red]no[/red] [/] :smile:", r"\x1b[31mred", r"\u202eturned\u200f", r"\ud800"):
        assert kept in text
