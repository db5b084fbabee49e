"""The console panel of one group: its completions, its iterations, and that text is escaped."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.cells import cell_len
from tiny_run import SAMPLE, episode

from rl.api.types import Action, Completion, Episode, Prompt, Status
from rl.console import Console, group_rows

HOSTILE = "[red]no[/red] [/] :smile: \x1b[31mred\x1b[0m \u202eturned\u200f \x07 " + "w" * 400


def wrote(text: str, reward: float | None, **changes) -> Episode:
    status = Status.UNGRADED if reward is None else Status.SCORED
    return episode(action=Action(text, text), reward=reward, status=status, **changes)


def panel_text(episodes: list[Episode], stream: io.StringIO) -> str:
    Console(True, stream).print_group(1, episodes, [0.5] * len(episodes))
    return stream.getvalue()


def test_the_best_the_median_and_the_worst_completion_are_shown() -> None:
    def shown(rewards: list[float | None]) -> list[str]:
        group = [wrote(f"text {g}", reward) for g, reward in enumerate(rewards)]
        rows = group_rows(group, [None] * len(group))
        return [text for label, text in rows if label == "  wrote"]

    assert shown([0.5, None, 0.0, 1.0, 0.25]) == ["text 3", "text 4", "text 1"]
    assert shown([0.0, 1.0]) == ["text 1", "text 0"]
    assert shown([1.0]) == shown([None]) == ["text 0"]


def test_each_completion_has_reward_advantage_parts_failure_and_replies() -> None:
    replies = {"judge": tuple(f"reply {n}" for n in range(5)), "other": ("x",)}
    group = [
        wrote("good", 1.0, replies=replies),
        replace(wrote("", 0.0), status=Status.POLICY_FAILED, failure="empty: wrote nothing"),
        wrote(
            "lost", None, failure="timeout: 120 s", completion=Completion((5,), (0.0,), "length")
        ),
    ]
    rows = group_rows(group, [1.25, -0.75, None])
    parts = [("  part", "judge 0.75"), ("  part", "judge/edit_success 8")]
    assert rows == [
        ("asked", "make it red"),
        ("sample", "row-7"),
        ("reward 1", "scored, advantage +1.25"),
        ("  wrote", "good"),
        *parts,
        ("  judge", "reply 0"),
        ("  judge", "x"),
        ("reward 0", "policy_failed, advantage -0.75, empty: wrote nothing"),
        ("  wrote", "(nothing)"),
        *parts,
        ("  judge", '{"score": [8, 9]}'),
        ("no reward", "ungraded, timeout: 120 s, cut at the token limit"),
        ("  wrote", "lost"),
        *parts,
        ("  judge", '{"score": [8, 9]}'),
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
