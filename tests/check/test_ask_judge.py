"""`--check --online` asks the judge before a model is loaded and reports its replies."""

from __future__ import annotations

import asyncio
import base64
import io
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_config
import tiny_loop
from PIL import Image
from tiny_faulty_judge import MODEL, Fault, FaultyJudge, PickyJudge, first_token
from tiny_messages import holds, refusal
from tiny_ranks import held_port

from rl import build
from rl.api.types import Sample
from rl.check import check_report
from rl.check.trials import JudgeCheck, ask_judge
from rl.config.schema import RunConfig
from rl.simple_launch import main
from tiny_world.judge_server import JudgeServer

KEY = "sk-very-secret-0123456789"


def config_of(folder: Path, *bases: str, **changes: Any) -> RunConfig:
    judge = {"api_base": list(bases), "model": MODEL, "max_outage_s": 6.0, "image_side_px": 64}
    config = tiny_config.real(folder, judge=judge | changes.pop("judge", {}), **changes)
    return tiny_config.validated(config)


def report_online(folder: Path, *bases: str, **changes: Any) -> tuple[str, int]:
    """(report of `--check --online`, exit code)."""
    return check_report.report(config_of(folder, *bases, **changes), 141, online=True)


def pictures(request: dict[str, Any]) -> list[Image.Image]:
    urls = [p["image_url"]["url"] for p in request["messages"][0]["content"] if "image_url" in p]
    return [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]


def test_each_reward_asks_the_same_questions_as_in_training(tmp_path: Path) -> None:
    quality = {"type": "edit_quality", "n_evals": 1, "temperature": 0.0}
    rewards = {"vie": {"type": "viescore"}, "quality": quality}
    with FaultyJudge([Fault(reply="hm"), Fault(reply='{"alignment": 1, "quality": 0.5}')]) as judge:
        text, code = report_online(tmp_path, judge.api_base, rewards=rewards)
    assert code == 0 and text.endswith("nothing is wrong")
    sizes = [[picture.size for picture in pictures(request)] for request in judge.requests]
    assert sizes[:2] == [[(64, 64)] * 2] * 2 and sorted(sizes[2:]) == [[(64, 64)], [(64, 64)] * 2]
    assert [request["seed"] for request in judge.requests] == [0, 1, 0, 0]
    assert f"rewards.vie: {judge.api_base} answered 2 questions in " in text
    assert ", value 0.65\n" in text and ", value 0.8\n" in text


SCORE = {"rewards": {"score": {"type": "expected_score"}}}
REFUSED: dict[str, tuple[Fault, str, dict[str, Any]]] = {
    "wrong key": (Fault(401, body=f"Incorrect API key provided: {KEY}."),
                  "HTTP 401 Incorrect API key provided: <MY_JUDGE> ... judge.api_key_env", {}),
    "no pictures, llama.cpp": (Fault(500, body="image input is not supported"), "vision-lang", {}),
    "too many bytes": (Fault(413, body="Request Entity Too Large"), "judge.image_side_px=64", {}),
    "no such path": (Fault(404, body="?"), "the path in judge.api_base", {}),
    "no pictures": (
        Fault(400, body="llama is not a multimodal model"),
        "vision-language ... judge.model ... --limit-mm-per-prompt '{\"image\": 2}'", {}),
    "context": (
        Fault(400, body="The decoder prompt (length 2180) is longer than the maximum model length"),
        "--max-model-len ... judge.image_side_px=64 ... judge.max_tokens=", {}),
    "prose": (Fault(reply="A lovely picture,\x1b[1m I would say 8."),
              "no JSON object ... 2 tries ... A lovely picture,\\x1b[1m I would say 8.\n", {}),
    "too few": (Fault(reply='{"score": [8]}'), '1 numbers ... "score" ... 2 tries', {}),
    "silence": (Fault(reply=""), "(nothing)\n ... judge.guided_json=", {}),
    "broken": (Fault(503, body="out of memory"), "http_503: out of memory (2 ", {}),
    # one whose first token cannot be read
    "thinks": (Fault(body=first_token(("<think>", -0.01), ("7", -9.0))),
               "rewards.score: ... less than min_legal_mass=0.9 ... its reply: ... <think> ... "
               "Remedy: ... does not think first", SCORE),
    "no log-probs": (Fault(reply="7"),
                     "judge: ... no log-probs of the first token ... Remedy: ... vLLM", SCORE),
    "refused log-probs": (
        Fault(403, body="You are not allowed to request logprobs from this model"),
        "HTTP 403 ... Remedy: ... 'rubric'", SCORE),
    # given up sooner than by a run
    "late": (Fault(stall_s=3.0), "timeout: no reply within 0.3 s ... Remedy: ",
             {"judge": {"timeout_s": 0.3, "max_outage_s": 600.0}}),
    "quota": (Fault(429, body="insufficient_quota"),
              "http_429: insufficient_quota (for 1 s) ... Remedy: ... judge.max_concurrency=",
              {"judge": {"timeout_s": 1.0, "max_outage_s": 600.0}}),
}  # fmt: skip


@pytest.mark.parametrize(("fault", "parts", "changes"), REFUSED.values(), ids=REFUSED)
def test_a_judge_that_cannot_grade_is_reported_with_a_fix(
    fault: Fault, parts: str, changes: dict[str, Any], tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("MY_JUDGE", KEY)
    own = {"api_key_env": "MY_JUDGE", "max_attempts": 2} | changes.get("judge", {})
    with FaultyJudge(after=fault) as judge:
        text, code = report_online(tmp_path, judge.api_base, **changes | {"judge": own})
    assert code == 1 and holds(text, parts) and KEY not in text, text


def test_a_wrong_model_or_a_judge_that_is_down_is_reported(tmp_path: Path) -> None:
    with FaultyJudge() as judge:
        text, code = report_online(tmp_path, judge.api_base, judge={"model": "Qwen/Qwen2.5-VL-72B"})
        assert code == 1 and holds(text, "tiny-judge ... judge.model")
        assert judge.requests == []
    with held_port() as port:
        started = time.monotonic()
        text, code = report_online(tmp_path, f"http://127.0.0.1:{port}")
    assert code == 1 and f"http://127.0.0.1:{port}/v1 after 0 s" in text
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("fault", [None, Fault(reply="A lovely picture.")])
def test_the_judge_of_one_reward_is_asked_as_well(tmp_path: Path, fault: Fault | None) -> None:
    with FaultyJudge() as judge, FaultyJudge(after=fault) as second:
        two = {"model": MODEL, "api_base": second.api_base, "max_attempts": 2}
        rewards = {"viescore": {"type": "viescore"}, "second": {"type": "viescore", "judge": two}}
        text, code = report_online(tmp_path, judge.api_base, rewards=rewards)
    assert second.requests and code == bool(fault), text
    assert not fault or holds(text, "1 wrong ... rewards.second.judge: ... no JSON object")


def test_an_invalid_proxy_is_reported_by_its_variable(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "ftp://proxy")
    text, code = report_online(tmp_path, "http://judge.test:1")
    assert code == 1 and holds(text, "judge: HTTP_PROXY ... NO_PROXY")


def test_every_judge_endpoint_is_asked_and_one_may_be_down(tmp_path, caplog) -> None:
    with held_port() as port, PickyJudge("seed") as seedless, FaultyJudge() as other:
        down = f"http://127.0.0.1:{port}"
        text, code = report_online(tmp_path, seedless.api_base, down, other.api_base)
        assert code == 0 and f"{down}/v1" in text
        assert holds(caplog.text, f"{seedless.api_base} ... without seed")
        assert len(seedless.requests) == 2 + 2 and len(other.requests) == 2
        other.after = Fault(reply="hm")
        text, code = report_online(tmp_path, seedless.api_base, other.api_base)
    assert code == 1 and f"rewards.vie: {other.api_base} " in text


def test_the_judge_is_asked_about_the_runs_own_sample(tmp_path: Path) -> None:
    source = Image.new("RGB", (40, 30), "red")
    sample = Sample("one", "erase the circle", sources=(source,))
    with FaultyJudge() as judge:
        resolved = build.resolve(config_of(tmp_path, judge.api_base))
        outcome = asyncio.run(ask_judge(resolved, [judge.api_base], 0.0, sample))
    assert isinstance(outcome, JudgeCheck) and outcome.problems == []
    sent = sorted((pictures(request) for request in judge.requests), key=len)
    assert [[p.tobytes() for p in row] for row in sent] == [[source.tobytes()] * n for n in (1, 2)]
    assert "erase the circle" in str(judge.requests)


def test_no_judge_is_asked_unless_online_and_running(tmp_path) -> None:
    with FaultyJudge() as judge:
        judge.models = Fault(500)
        assert check_report.report(config_of(tmp_path, judge.api_base), 141)[1] == 0
    text, code = report_online(tmp_path, judge={"start_command": tiny_loop.JUDGE})
    assert code == 0 and "not asked" in text
    assert holds(refusal(main, ["--online", "config.jsonnet"], 2), "--online ... --check")


@pytest.mark.parametrize("name", ["quickstart", "tiny_earl"])
def test_the_tiny_judge_grades_the_first_training_sample(name: str) -> None:
    """The samples of `tiny_earl` have no picture before its renderer is loaded."""
    resolved = build.resolve(tiny_config.evaluated(name))
    [source] = build.build_data(resolved, resolved.train)
    with JudgeServer(resolved.config.judge.model) as judge:
        outcome = asyncio.run(ask_judge(resolved, [judge.api_base], 0.0, source[0]))
    assert outcome.problems == [] and len(outcome.lines) == len(resolved.rewards)
