"""Scores from the log-probs of one-token labels: parsed, computed by hand, and asked for."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_faulty_judge import Fault, FaultyJudge, first_token, with_client

from rl.api.judge import Answer, Question
from rl.judge.client import JudgeClient
from rl.judge.reply import (
    DIGITS,
    Distribution,
    NoLogprobsError,
    UnreadableReplyError,
    expected_minimum,
    read_chat,
    read_distribution,
)

READ = partial(read_distribution, labels=DIGITS, min_legal_mass=0.9)
SEVEN = first_token(("7", math.log(0.5)), ("8", math.log(0.3)), ("The", -3), ("2", math.log(0.15)))


def distribution(body: str) -> Distribution:
    return READ(read_chat(body.encode(), DIGITS)[0])


def test_the_distribution_is_a_softmax_over_the_labels_by_hand() -> None:
    read = distribution(SEVEN)
    assert read.legal_mass == pytest.approx(0.95)
    assert expected_minimum(read) == pytest.approx((7 * 0.5 + 8 * 0.3 + 2 * 0.15) / 0.95)
    p = (0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95)
    assert (read.probs[7], read.probs[8], read.probs[2]) == pytest.approx(p)
    assert read.entropy == pytest.approx(-sum(x * math.log(x) for x in p))
    sure = distribution(first_token(("9", 0.0), ("3", -9999.0), ("4", float("-inf"))))
    assert (expected_minimum(sure), sure.entropy, sure.legal_mass) == (9.0, 0.0, 1.0)


weights = st.lists(st.floats(0.01, 1), min_size=10, max_size=10)


@given(st.tuples(weights, weights))
def test_the_expected_minimum_is_the_sum_over_all_pairs(both: tuple[list[float], ...]) -> None:
    a, b = (Distribution(tuple(x / sum(each) for x in each), 1) for each in both)
    pairs = (min(i, j) * p * q for i, p in enumerate(a.probs) for j, q in enumerate(b.probs))
    assert expected_minimum(a, b) == pytest.approx(sum(pairs))


UNREADABLE = {
    "mass below the threshold": (first_token(("I", -0.05), ("7", -3.0)), "less than min_legal"),
    "no label at all": (first_token(("<think>", -0.01), (" 7", -5.0)), "0 of the first token's"),
    "an integer of 400 digits": (first_token(("7", -(10**400))), "0 of the first token's"),
    "a positive log-prob": (first_token(("7", 4.2)), "at most 0"),
    "raw logits": (first_token(("7", -0.1), ("8", -0.2)), "sum to more than 1"),
    "NaN": (first_token(("7", float("nan"))), "no number"),
    "text": (first_token(("7", "-0.1")), "at most 0"),
    "true": (first_token(("7", True)), "at most 0"),
    "a label twice": (first_token(("7", -0.1), ("7", -2.0)), "two log-probs"),
}


@pytest.mark.parametrize(("body", "reason"), UNREADABLE.values(), ids=UNREADABLE)
def test_unusable_log_probs_are_refused_with_the_reason(body: str, reason: str) -> None:
    with pytest.raises(UnreadableReplyError, match=reason):
        distribution(body)


@pytest.mark.parametrize(
    "logprobs", [None, {}, {"content": []}, {"content": None}, {"content": [{"token": "7"}]}]
)
def test_a_completion_without_log_probs_is_recognised(logprobs: Any) -> None:
    choice = {"message": {"content": "7"}, "logprobs": logprobs}
    with pytest.raises(NoLogprobsError):
        distribution(json.dumps({"choices": [choice]}))


keys = st.sampled_from(["token", "logprob", "top_logprobs", "logprobs", *DIGITS])
values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text("7 .\u00b2\u0663", max_size=5) | keys,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner),
    max_leaves=12,
)


@pytest.mark.slow
@given(values, values)
def test_any_log_probs_give_a_distribution_or_are_unreadable(entry: Any, journalled: Any) -> None:
    choice = {"message": {"content": "7"}, "logprobs": {"content": [entry]}}
    body = json.dumps({"choices": [choice]})
    for read in (partial(distribution, body), partial(READ, json.dumps(journalled))):
        try:
            result = read()
        except UnreadableReplyError:
            continue
        assert math.fsum(result.probs) == pytest.approx(1) and 0.9 <= result.legal_mass <= 1


# --- asking -----------------------------------------------------------------------------------


async def asked(client: JudgeClient) -> Answer[Distribution]:
    return await client.ask(Question(("how good?",), {}, labels=DIGITS), READ)


def test_one_token_is_asked_for_and_the_reply_is_journalled(tmp_path: Path) -> None:
    """A resumed run gets the same numbers from the journal."""
    with FaultyJudge(after=Fault(body=SEVEN)) as judge:
        config = {"journal": tmp_path / "j.jsonl", "guided_json": "always", "temperature": 0.0}
        (answer, _), (again, client) = (with_client(judge, asked, **config) for _ in range(2))
    [request] = judge.requests
    del request["messages"]
    assert request == {
        "model": "tiny-judge", "max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "seed": 0,
        "logprobs": True, "top_logprobs": 20,
    }  # fmt: skip
    assert answer.value.probs[7] == pytest.approx(0.5 / 0.95)
    assert again.value == answer.value and client.take_stats().reused == 1


def test_low_mass_is_final_but_a_lost_answer_is_asked_again() -> None:
    """The same question would get the same probabilities. An address that has returned log-probs
    once is set up correctly."""
    thinks = Fault(body=first_token(("<think>", -0.001), ("7", -8.0)))
    good = Fault(body=SEVEN)
    with FaultyJudge([Fault(503), thinks, good, Fault(reply="7")], after=good) as judge:

        async def thrice(client: JudgeClient) -> list[Answer[Distribution]]:
            return [await asked(client) for _ in range(3)]

        (low, *high), _ = with_client(judge, thrice)
    assert (low.failure or "").startswith("unreadable: 0.000335 of the first token's")
    assert [answer.attempts for answer in (low, *high)] == [2, 1, 2]
    assert all(answer.value for answer in high)
