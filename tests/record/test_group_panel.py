"""The console panel of one group: its completions, its iterations, and that text is escaped."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.cells import cell_len
from tiny_run import SAMPLE, episode

from rl.api.types import Action, Completion, Episode, Prompt, Status
from rl.console import Console, GroupPanel, chosen, group_rows

HOSTILE = "[red]no[/red] [/] :smile: \x1b[31mred\x1b[0m \u202eturned\u200f \x07 " + "w" * 400


def wrote(text: str, reward: float | None, **changes) -> Episode:
    status = Status.UNGRADED if reward is None else Status.SCORED
    return episode(action=Action(text, text), reward=reward, status=status, **changes)


def panel_text(episodes: list[Episode], stream: io.StringIO, every: int = 1) -> str:
    panel = GroupPanel(Console(True, stream), every)
    panel.note(1, [episodes], [[0.5] * len(episodes)])
    panel.show()
    return stream.getvalue()


def test_the_panel_shows_the_best_the_worst_one_between_and_a_lost_completion() -> None:
    group = [wrote(f"text {g}", r) for g, r in enumerate([0.5, None, 0.0, 1.0, 0.25, None])]
    assert chosen(group) == [("best", 3), ("between", 4), ("worst", 2), ("lost", 1)]
    assert chosen(group[2:4]) == [("best", 1), ("worst", 0)]
    assert chosen(group[:1]) == [("one", 0)]
    assert chosen(group[1:2]) == [("lost", 0)]
    equal = chosen([wrote("a", 0.0)] * 4)
    assert [name for name, _ in equal] == ["one", "another", "a third"]


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
    assert rows == [
        ("asked", "make it red"),
        ("sample", "row-7 (group it12/row-7)"),
        ("group", "3 completions, reward 0.5 (0 to 1), 1 policy_failed, 1 ungraded"),
        ("best", "reward 1, advantage +1.25"),
        ("  wrote", "good"),
        ("  parts", "judge=0.75  edit_success=8"),
        ("  judge", "(judge) reply 0"),
        ("  judge", "(judge) reply 1"),
        ("", "(judge) and 3 more"),
        ("  judge", "(other) x"),
        ("worst", "reward 0, advantage -0.75, policy_failed, empty: wrote nothing"),
        ("  wrote", "(nothing)"),
        ("  parts", "judge=0.75  edit_success=8"),
        ("  judge", '{"score": [8, 9]}'),
        ("lost", "ungraded, timeout: 120 s, cut at the token limit"),
        ("  wrote", "lost"),
        ("  parts", "judge=0.75  edit_success=8"),
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


def test_the_panel_is_shown_once_every_n_iterations_by_one_rank() -> None:
    stream = io.StringIO()
    panel, mute = GroupPanel(Console(True, stream), 3), GroupPanel(Console(False, stream), 3)
    never = GroupPanel(Console(True, stream), 0)
    was_shown = []
    for iteration in range(1, 8):
        for one in (panel, mute, never):
            one.note(iteration, [[wrote("a", 1.0)], [wrote("b", 1.0)]], [[None], [None]])
            one.show()
            one.show()
        was_shown.append("wrote  a" in stream.getvalue())
        stream.truncate(0)
    assert was_shown == [False, False, True, False, False, True, False]
