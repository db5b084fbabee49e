"""A reply that names another model than judge.model is logged once or stops the run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from tiny_faulty_judge import GOOD, MODEL, Fault, FaultyJudge, answers_of, pair_question
from tiny_messages import holds

from rl.judge.client import JudgeRefused, JudgeStats


def said(**fields: Any) -> Fault:
    """A good reply with more fields, such as the name of the model."""
    return Fault(body=json.dumps({"choices": [{"message": {"content": GOOD}}], **fields}))


def test_reported_tokens_are_summed() -> None:
    usages = ({"prompt_tokens": 700, "completion_tokens": 20}, {"prompt_tokens": 5}, None, [1],
              {"prompt_tokens": "9", "completion_tokens": -3}, {"prompt_tokens": 1.5})  # fmt: skip
    stats, num_answered = ask([said(usage=usage) for usage in usages])
    assert (stats.prompt_tokens, stats.completion_tokens, num_answered) == (705, 20, 6)


def serving(*models: str) -> Fault:
    return Fault(body=json.dumps({"data": [{"id": model} for model in models]}))


def ask(
    faults: Sequence[Fault], models: Fault | None = None, **config: Any
) -> tuple[JudgeStats, int]:
    """The client's counts and the number of answered questions."""
    with FaultyJudge(faults) as judge:
        judge.models = models
        client = judge.client(**config)
        answers = answers_of(client, map(pair_question, "abcdefghijkl"[: len(faults)]))
    return client.take_stats(), sum(answer.value is not None for answer in answers)


@pytest.mark.parametrize("name", [MODEL, None, "", 7, ["x"], "missing"])
def test_the_configured_name_and_a_missing_one_log_nothing(caplog, name: Any) -> None:
    reply = Fault() if name == "missing" else said(model=name)
    stats, num_answered = ask([reply] * 3)
    assert (caplog.text, stats.other_model, num_answered) == ("", 0, 3)


@pytest.mark.parametrize(
    "names",
    [
        ["tiny-judge-2026-01-02"] * 4,  # the full name behind an alias counts as another name
        ["someone/tiny-judge"] * 4,
        ["a b\x1b[2J\u202e" + "x" * 999] * 4,
        [MODEL, MODEL, "fallback", "fallback", MODEL, MODEL],  # a gateway's, for a while
    ],
)
def test_another_model_name_is_logged_once_and_counted(caplog, names: list[str]) -> None:
    stats, num_answered = ask([said(model=name) for name in names])
    [line] = caplog.messages
    assert holds(line, f"'{names[2][:3]} ... asked for judge.model={MODEL!r}: this is fine if")
    assert line.isprintable() and len(line) < 600
    assert (stats.other_model, num_answered) == (len(names) - names.count(MODEL), len(names))


def test_at_most_eight_model_names_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    ask([said(model=f"instance-{number}") for number in range(12)])
    assert len(caplog.records) == 8


def test_a_judge_that_serves_another_model_stops_the_run() -> None:
    """The server was restarted with another model during the run."""
    other = "other-judge\x1b[2J"
    with pytest.raises(JudgeRefused) as refused:
        ask([said(model=MODEL), said(model=other)], models=serving(other))
    message = str(refused.value)
    assert holds(message, f"does not serve judge.model={MODEL!r}; it serves: other-judge ... again")
    assert message.isprintable()


@pytest.mark.parametrize(
    "models",
    [Fault(404), Fault(body="<html>"), Fault(reset=True), Fault(429), serving("x", MODEL)],
    ids=["none", "no list", "reset", "busy", "listed"],
)
def test_a_judge_without_a_usable_model_list_gets_only_a_warning(caplog, models: Fault) -> None:
    _, num_answered = ask([said(model="other")] * 2, models=models)
    assert num_answered == 2 and len(caplog.records) == 1
