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
from tiny_faulty_judge import Fault, FaultyJudge, PickyJudge, first_token, with_client

from rl.api.judge import Answer, Question
from rl.judge.client import JudgeClient, JudgeRefused
from rl.judge.labels import (
    LABELS,
    Distribution,
    NoLogprobsError,
    expected_minimum,
    read_distribution,
    read_label_chat,
)
from rl.judge.reply import UnreadableReplyError

DIGITS = LABELS["digits"]
READ = partial(read_distribution, labels=DIGITS, min_legal_mass=0.9)
QUESTION = Question(("how good?",), {}, labels=DIGITS)
LN_HALF, LN_THIRD = math.log(0.5), math.log(0.3)
SEVEN = first_token(("7", LN_HALF), ("8", LN_THIRD), ("The", -3.5), ("2", math.log(0.15)))
"""P(7) = .5, P(8) = .3, P(2) = .15: legal mass .95."""


def distribution(body: str) -> Distribution:
    return READ(read_label_chat(body.encode(), DIGITS)[0])


def test_the_expected_score_is_a_softmax_over_the_labels_by_hand() -> None:
    read = distribution(SEVEN)
    assert read.legal_mass == pytest.approx(0.95)
    # (7 * .5 + 8 * .3 + 2 * .15) / .95 = 6.2 / .95
    assert read.mean == pytest.approx(6.526315789)
    p = (0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95)
    assert read.entropy == pytest.approx(-sum(x * math.log(x) for x in p))
    assert read.probs[7] == pytest.approx(p[0]) and read.probs[0] == 0


def test_a_certain_answer_has_its_own_score_and_no_entropy() -> None:
    read = distribution(first_token(("9", 0.0), ("3", -9999.0), ("4", float("-inf"))))
    assert (read.mean, read.entropy, read.legal_mass) == (9.0, 0.0, 1.0)


def test_the_expected_minimum_by_hand() -> None:
    a, b = Distribution((0.2, 0.3, 0.5), 1), Distribution((0.5, 0.5, 0.0), 1)
    # P(a>=1) P(b>=1) + P(a>=2) P(b>=2) = .8 * .5 + .5 * 0; min(E a, E b) = min(1.3, .5).
    assert expected_minimum([a, b]) == pytest.approx(0.4)
    assert expected_minimum([a]) == pytest.approx(a.mean) == pytest.approx(1.3)


probabilities = st.lists(st.floats(0.01, 1), min_size=10, max_size=10).map(
    lambda w: Distribution(tuple(x / sum(w) for x in w), 1)
)


@given(probabilities, probabilities)
def test_the_expected_minimum_is_the_sum_over_all_pairs(a: Distribution, b: Distribution) -> None:
    pairs = ((min(i, j) * p * q) for i, p in enumerate(a.probs) for j, q in enumerate(b.probs))
    assert expected_minimum([a, b]) == pytest.approx(sum(pairs))


UNREADABLE = {
    "mass below the threshold": (first_token(("I", -0.05), ("7", -3.0)), "less than min_legal"),
    "no label at all": (first_token(("<think>", -0.01), (" 7", -5.0)), "less than min_legal_mass"),
    "a positive log-prob": (first_token(("7", 4.2)), "at most 0"),
    "raw logits": (first_token(("7", -0.1), ("8", -0.2)), "sum to more than 1"),
    "NaN": (first_token(("7", float("nan"))), "two log-probs"),  # NaN differs from itself
    "text": (first_token(("7", "-0.1")), "at most 0"),
    "true": (first_token(("7", True)), "at most 0"),
    "null": (first_token(("7", None)), "at most 0"),
    "a label twice": (first_token(("7", -0.1), ("7", -2.0)), "two log-probs"),
    "an error beside it": (SEVEN[:-1] + ', "error": {"message": "no"}}', "an error"),
}


@pytest.mark.parametrize(("body", "reason"), UNREADABLE.values(), ids=UNREADABLE)
def test_unusable_log_probs_are_refused_with_the_reason(body: str, reason: str) -> None:
    with pytest.raises(UnreadableReplyError, match=reason):
        distribution(body)


@pytest.mark.parametrize(
    "logprobs",
    [None, {}, [], {"content": []}, {"content": None}, {"content": [{}]}, {"content": ["7"]},
     {"content": [{"token": "7"}]}, {"content": [{"token": [], "logprob": 0, "top_logprobs": 3}]}],
)  # fmt: skip
def test_a_completion_without_log_probs_is_recognised(logprobs: Any) -> None:
    choice = {"message": {"content": "7"}, "logprobs": logprobs}
    with pytest.raises(NoLogprobsError):
        read_label_chat(json.dumps({"choices": [choice]}).encode(), DIGITS)


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5) | st.sampled_from(DIGITS),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["token", "logprob", "top_logprobs", "logprobs", *DIGITS]), inner
        )
    ),
    max_leaves=12,
)


@given(json_values, json_values)
def test_any_log_probs_give_a_distribution_or_are_unreadable(entry: Any, journalled: Any) -> None:
    choice = {"message": {"content": "7"}, "logprobs": {"content": [entry]}}
    body = json.dumps({"choices": [choice]})
    for read in (partial(distribution, body), partial(READ, json.dumps(journalled))):
        try:
            result = read()
        except UnreadableReplyError:
            continue
        assert math.fsum(result.probs) == pytest.approx(1) and 0.9 <= result.legal_mass <= 1
        assert 0 <= result.mean <= 9 and 0 <= result.entropy <= math.log(10) + 1e-9


# --- asking -----------------------------------------------------------------------------------


async def asked(client: JudgeClient) -> Answer[Distribution]:
    return await client.ask(QUESTION, READ)


def test_one_token_is_asked_for_and_the_reply_is_journalled(tmp_path: Path) -> None:
    """A resumed run gets the same numbers from the journal, whatever the endpoint's token ids."""
    with FaultyJudge(after=Fault(body=SEVEN)) as judge:
        judge.token_ids = {label: [100 + int(label)] for label in DIGITS}
        config = {"guided_json": "always", "temperature": 0.0}
        answer, _ = with_client(judge, asked, tmp_path / "j.jsonl", **config)
        judge.token_ids = None
        again, client = with_client(judge, asked, tmp_path / "j.jsonl", **config)
    [request] = judge.requests
    del request["messages"]
    assert request == {
        "model": "tiny-judge", "max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "seed": 0,
        "logprobs": True, "top_logprobs": 20, "logprob_token_ids": list(range(100, 110)),
    }  # fmt: skip
    assert answer.value.mean == pytest.approx(6.526315789)
    assert again.value == answer.value and client.take_stats().reused == 1
    assert json.loads(answer.replies[0])["token"] == "7"


def test_without_token_ids_the_labels_are_found_by_their_text() -> None:
    with FaultyJudge(after=Fault(body=SEVEN)) as judge:
        answer, client = with_client(judge, asked)
    assert "logprob_token_ids" not in judge.requests[0]
    assert answer.value.legal_mass == pytest.approx(0.95)
    assert client.dialects()[judge.api_base].label_ids == {DIGITS: ()}


def test_an_endpoint_that_refuses_token_ids_is_asked_without() -> None:
    with PickyJudge("logprob_token_ids") as judge:
        judge.token_ids = {label: [int(label)] for label in DIGITS}
        judge.after = Fault(body=SEVEN)
        answer, client = with_client(judge, asked)
    assert answer.value.legal_mass == pytest.approx(0.95)
    assert client.dialects()[judge.api_base].names == {"logprob_token_ids"}


@pytest.mark.parametrize("ids", [[7, 8], [0], []])
def test_a_label_that_is_not_one_token_of_its_own_is_refused(ids: list[int]) -> None:
    with FaultyJudge(after=Fault(body=SEVEN)) as judge:
        judge.token_ids = {label: [int(label)] for label in DIGITS} | {"9": ids}
        with pytest.raises(JudgeRefused, match=r"label '9' as the tokens .*\n?.*letters"):
            with_client(judge, asked)
    assert judge.requests == [], "no question was paid for"


@pytest.mark.parametrize(
    "fault",
    [
        Fault(reply="7"),
        Fault(400, body="logprobs is not supported with this model"),
        Fault(403, body="You are not allowed to request logprobs from this model"),
    ],
)
def test_an_endpoint_without_log_probs_is_refused_with_the_remedy(fault: Fault) -> None:
    remedy = r"(?s)Remedy: .*log-probs.*vLLM.*'rubric'"
    with FaultyJudge(after=fault) as judge, pytest.raises(JudgeRefused, match=remedy):
        with_client(judge, asked)
    assert len(judge.requests) == 1


def test_low_mass_is_final_but_a_lost_answer_is_asked_again() -> None:
    """The same question would get the same probabilities."""
    thinks = first_token(("<think>", -0.001), ("7", -8.0))
    with FaultyJudge([Fault(503)], after=Fault(body=thinks)) as judge:
        answer, _ = with_client(judge, asked, max_attempts=5)
    assert answer.value is None and len(judge.requests) == 2
    assert (answer.failure or "").startswith("unreadable: 0.000335 of the first token's")
    with FaultyJudge([Fault(body=SEVEN), Fault(reply="7")], after=Fault(body=SEVEN)) as judge:

        async def twice(client: JudgeClient) -> Answer[Distribution]:
            await asked(client)
            return await asked(client)

        answer, _ = with_client(judge, twice)
    assert answer.value is not None and len(judge.requests) == 3, "an address that has log-probs"
