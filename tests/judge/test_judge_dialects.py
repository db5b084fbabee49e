"""Judges that refuse some request parameters: a refusal is remembered."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tiny_faulty_judge import (
    Fault,
    FaultyJudge,
    PickyJudge,
    answers_of,
    ask_all,
    pair_question,
    with_client,
)
from tiny_messages import holds

from rl.api.judge import Answer
from rl.judge.client import JudgeClient, JudgeRefused
from rl.judge.http import refused_parameter

SENT = dict.fromkeys(["model", "messages", "max_tokens", "temperature", "top_p", "seed"])

DIALECTS = {
    "OpenAI": """{"error": {"message": "Unsupported parameter: 'NAME' is not supported with this
        model.", "type": "invalid_request_error", "param": "NAME"}}""",
    "OpenAI, a value": """{"error": {"message": "Unsupported value: 'NAME' does not support 0 with
        this model. Only the default (1) value is supported.", "code": "unsupported_value"}}""",
    "OpenAI, new": """{"error": {"message": "Unknown parameter: 'NAME'.", "type": "error"}}""",
    "Azure": '{"error": {"message": "Unrecognized request argument supplied: NAME"}}',
    "Azure, .NET": r'{"message": "\u0027NAME\u0027 is not supported by this model"}',
    "LiteLLM": r"""{"error": {"message": "litellm.UnsupportedParamsError: anthropic does not
        support parameters: ['NAME'], for model=claude. To drop these, set
        `litellm.drop_params=True` or for proxy:\n\n`litellm_settings:\n drop_params: true`\n"}}""",
    "LiteLLM, old": """{"message": "ollama does not support parameters: {'NAME': 1}, for x"}""",
    "LiteLLM, a value": """{"message": "gpt-5 models don't support NAME=0. Only NAME=1 is it."}""",
    "Anthropic": '{"error": {"message": "`NAME` is deprecated for this model."}}',
    "Bedrock": '{"message": "The model returned: NAME: Extra inputs are not permitted"}',
    "vLLM, old": """{"message": "[{'type': 'extra_forbidden', 'loc': ('body', 'NAME'), 'msg':
        'Extra inputs are not permitted', 'input': 42}]", "code": 400}""",
    "Mistral": r"""{"message": "{\"detail\": [{\"type\": \"extra_forbidden\", \"loc\": [\"body\",
        \"NAME\"], \"msg\": \"Extra inputs are not permitted\", \"input\": 0.0}]}"}""",
    "Gemini": r"""[{"error": {"message": "Invalid JSON payload received. Unknown name \"NAME\":
        Cannot find field.", "status": "INVALID_ARGUMENT"}}]""",
    "Groq": """{"error": {"message": "property 'NAME' is unsupported, did you mean 'n'?"}}""",
    "TGI": """Failed to deserialize the JSON body into the target type: unknown field `NAME`,
        expected one of `model`, `messages` at line 1 column 9""",
    "xAI": '{"code": "invalid", "error": "Argument not supported on this model: NAME"}',
    "llama.cpp": '{"error": {"code": 500, "message": "Unsupported param: NAME"}}',
    "Python": "create() got an unexpected keyword argument 'NAME'",
    "a gateway": '{"message": "Bad.", "code": "unsupported_parameter", "param": "NAME"}',
}
"""Error pages as bug reports quote them."""
STATUSES = {"LiteLLM, old": 500, "llama.cpp": 500, "Mistral": 422, "TGI": 422}
"""All other dialects use status 400."""


def page_of(dialect: str, name: str = "NAME") -> str:
    return " ".join(DIALECTS[dialect].replace("NAME", name).split())


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("parameter", ["max_tokens", "temperature", "seed"])
def test_each_dialect_names_its_refused_parameter(name: str, parameter: str) -> None:
    status = STATUSES.get(name, 400)
    text = page_of(name, parameter).encode()
    assert refused_parameter(status, text, SENT) == parameter
    without = {key: value for key, value in SENT.items() if key != parameter}
    assert refused_parameter(status, text, without) is None, "it was not sent"
    for other in (200, 401, 403, 404, 413, 429, 503):
        assert refused_parameter(other, text, SENT) is None


@pytest.mark.parametrize(
    ("page", "refused"),
    [
        ("`temperature` and `top_p` cannot both be specified for this model.", "top_p"),
        ("invalid temperature: only 0.6 is allowed for this model", "temperature"),
        ("Input validation error: `top_p` must be > 0.0 and < 1.0", "top_p"),
        (r"Unknown name \"seed\": Cannot find field.\nUnknown name \"max_tokens\": ...", "seed"),
        ("This response_format type is unavailable now", "response_format"),
        ("The json_schema is not supported by this backend", "response_format"),
        ("max_tokens is too large: 5000. This model supports at most 4096 tokens.", "max_tokens"),
        # Errors that name no parameter.
        ("At most 1 image(s) may be provided in one request.", None),
        ("llama is not a multimodal model", None),
        ("Your request was rejected by our safety system: bad_seeds", None),
        ("unknown variant `image_url`, expected `text`", None),
        ("'messages.0' : property 'metadata' is unsupported", None),
        ("", None),
    ],
)
def test_of_the_parameters_that_a_page_names_the_least_important_is_left_out(
    page: str, refused: str | None
) -> None:
    assert refused_parameter(400, page.encode(), SENT | {"response_format": {}}) == refused


def answers_to(client: JudgeClient, texts: str, repeat: int = 0) -> list[Answer[Any]]:
    return answers_of(client, map(pair_question, texts), repeat)


@pytest.mark.parametrize("dialect", ["OpenAI", "Azure", "LiteLLM, old", "Mistral", "Gemini", "TGI"])
def test_three_refused_parameters_cost_three_extra_requests_once(dialect: str, caplog) -> None:
    refused, status = ("max_tokens", "temperature", "seed"), STATUSES.get(dialect, 400)
    with PickyJudge(*refused, status=status, page=page_of(dialect)) as judge:
        client = judge.client(max_tokens=300)
        answers = answers_to(client, "abc")
    assert [answer.value for answer in answers] == [(8.0, 6.5)] * 3
    assert judge.log() == [
        "max_tokens seed temperature top_p",
        "max_completion_tokens seed temperature top_p",
        "max_completion_tokens seed top_p",
        *["max_completion_tokens top_p"] * 3,
    ]
    assert [answer.attempts for answer in answers] == [4, 1, 1]
    assert judge.requests[-1]["max_completion_tokens"] == 300
    assert client.take_stats().retries == {"parameter": 3}
    [log] = caplog.messages
    assert holds(log, f"{judge.api_base} ... without max_tokens, seed, temperature from now on")


def test_questions_at_once_are_all_answered(caplog: pytest.LogCaptureFixture) -> None:
    """The refusals are logged once."""
    with PickyJudge("max_tokens", "temperature", "seed") as judge:
        answers, _ = with_client(judge, lambda client: ask_all(client, 8))
    assert all(answer.value == (8.0, 6.5) for answer in answers)
    assert len(caplog.records) == 1 and len(judge.requests) <= 8 * 4


@pytest.mark.parametrize(
    ("make", "match"),
    [
        # No reply is asked for without a limit of its length.
        (partial(PickyJudge, "max_tokens", "max_completion_tokens"), "max_completion_tokens"),
        # One that is already left out.
        (partial(FaultyJudge, after=Fault(400, body=page_of("OpenAI", "seed"))), "'seed' is not"),
    ],
)
def test_a_parameter_that_cannot_be_left_out_stops_the_run(
    make: Callable[[], FaultyJudge], match: str
) -> None:
    with make() as judge, pytest.raises(JudgeRefused, match=match):
        answers_to(judge.client(), "a")
    assert len(judge.requests) == 2


def test_a_schema_that_is_refused_at_a_retry_is_left_out() -> None:
    with PickyJudge("response_format") as judge:
        judge.faults = [Fault(reply="hm")]
        answers = answers_to(judge.client(guided_json="on_retry"), "ab")
    assert [answer.attempts for answer in answers] == [3, 1]
    assert ["response_format" in log for log in judge.log()] == [False, True, False, False]


def test_a_parameter_that_was_accepted_before_is_left_out_for_one_request_only() -> None:
    """An endpoint may accept the first temperature and refuse the higher one of a retry."""

    refusal = Fault(400, body="Unsupported value: 'temperature' does not support 1.2")
    with FaultyJudge([Fault(reply="hm"), refusal]) as judge:
        answers = answers_to(judge.client(temperature=0.9), "ab")
    assert [answer.value for answer in answers] == [(8.0, 6.5)] * 2
    assert [r.get("temperature") for r in judge.requests] == [0.9, 1.2, None, 0.9]


def test_a_refused_parameter_is_remembered_only_after_an_answer() -> None:
    faults = [Fault(400, body=page_of("OpenAI", "seed")), Fault(400, body="no pictures, please")]
    with FaultyJudge(faults) as judge:
        client = judge.client()
        with pytest.raises(JudgeRefused, match="no pictures, please"):
            answers_to(client, "a")
        assert client.addresses[0].dialect.names == set()


def test_the_journal_recognises_a_question_whatever_parameters_are_refused(tmp_path: Path) -> None:
    """The run may have begun with an endpoint or a release that used other parameters."""
    path = tmp_path / "replies.jsonl"
    varied = [Fault(reply=f'{{"score": [{n}, 1]}}') for n in range(8)]
    with PickyJudge("max_tokens", "seed") as judge:
        judge.faults = list(varied)
        first = answers_to(judge.client(path), "abc")
    with FaultyJudge(varied) as judge:
        second = answers_to(judge.client(path), "abc")
        third = answers_to(judge.client(path), "abc", repeat=1)
        assert len(judge.requests) == 3, "only new questions are sent"
    assert [a.value for a in second] == [a.value for a in first]
    assert [a.attempts for a in second] == [0, 0, 0] and third[0].value == (0.0, 1.0)
