"""A reply that names another model than was asked: said once, or refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from tiny_faulty_judge import (
    GOOD,
    MODEL,
    Fault,
    FaultyJudge,
    answers_of,
    pair_question,
)
from tiny_messages import names

from rl.judge.client import JudgeRefused, JudgeStats


def named(model: Any) -> Fault:
    choice = {"message": {"content": GOOD}}
    return Fault(body=json.dumps({"model": model, "choices": [choice]}))


def serving(*models: str) -> Fault:
    return Fault(body=json.dumps({"data": [{"id": model} for model in models]}))


def asked(
    faults: Sequence[Fault], models: Fault | None = None, **config: Any
) -> tuple[JudgeStats, int]:
    """What the client counted, and how many questions were answered."""
    with FaultyJudge(faults) as judge:
        judge.models = models
        client = judge.client(**config)
        questions = [pair_question(str(n)) for n in range(len(faults))]
        answers = answers_of(client, questions, at_once=False)
    return client.take_stats(), sum(answer.value is not None for answer in answers)


@pytest.mark.parametrize("name", [MODEL, None, "", 7, ["x"], "missing"])
def test_the_asked_name_and_none_at_all_are_silent(caplog, name: Any) -> None:
    reply = Fault() if name == "missing" else named(name)
    stats, num_answered = asked([reply] * 3)
    assert (caplog.text, stats.other_model, num_answered) == ("", 0, 3)


@pytest.mark.parametrize(
    "name", ["tiny-judge-2026-01-02", "someone/tiny-judge", "a b\x1b[2J\u202e" + "x" * 999]
)
def test_another_name_is_said_once_and_counted(caplog: pytest.LogCaptureFixture, name: str) -> None:
    """Which an alias's full name is too."""
    stats, num_answered = asked([named(name)] * 4)
    [line] = [record.getMessage() for record in caplog.records]
    assert f"asked for judge.model={MODEL!r}: its full name is fine" in line
    assert line.isprintable() and len(line) < 600
    assert (stats.other_model, num_answered) == (4, 4)


def test_a_name_that_changes_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """A gateway's fallback: a minute of another model among the right one's replies."""
    stats, num_answered = asked([named(MODEL)] * 2 + [named("fallback")] * 2 + [named(MODEL)] * 2)
    [line] = [record.getMessage() for record in caplog.records]
    assert names(line, f"'fallback' ... '{MODEL}'")
    assert (stats.other_model, num_answered) == (2, 6)


def test_names_without_end_are_listened_to_no_longer(caplog: pytest.LogCaptureFixture) -> None:
    asked([named(f"instance-{number}") for number in range(12)])
    assert len(caplog.records) == 8


def test_another_model_in_place_of_the_one_asked_stops_the_run() -> None:
    """The server was started anew with other weights while the run went on."""
    other = "other-judge\x1b[2J"
    with pytest.raises(JudgeRefused) as refused:
        asked([named(MODEL), named(other)], models=serving(other))
    message = str(refused.value)
    assert "answers as 'other-judge" in message
    assert names(message, "it serves: other-judge ... Remedy: ")
    assert message.isprintable()


@pytest.mark.parametrize(
    "models",
    [Fault(404), Fault(body="<html>"), Fault(reset=True), Fault(429), serving("x", MODEL)],
    ids=["none", "no list", "reset", "busy", "listed"],
)
def test_one_that_does_not_say_what_it_serves_is_only_warned_of(caplog, models: Fault) -> None:
    _, num_answered = asked([named("other")] * 2, models=models)
    assert num_answered == 2 and len(caplog.records) == 1


def test_a_key_in_a_name_is_not_shown(monkeypatch, caplog) -> None:
    monkeypatch.setenv("MY_JUDGE", "made-up-hunter2")
    asked([named("echo made-up-hunter2")], api_key_env="MY_JUDGE")
    assert "<MY_JUDGE>" in caplog.text and "abcdefghij" not in caplog.text
