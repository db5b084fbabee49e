"""A run tests its judge before it loads a model and remembers which parameters it rejects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_loop
from tiny_faulty_judge import MODEL, Fault, FaultyJudge, PickyJudge
from tiny_messages import holds

from rl import build
from rl.config.schema import load_config
from rl.judge.client import JudgeClient, JudgeError
from rl.ranks.dist import Dist
from rl.run import set_up


class LoadingError(Exception):
    """Raised instead of loading the first model."""


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise LoadingError

    monkeypatch.setattr(build, "build_policy", load)


def open_run(folder: Path, judge: FaultyJudge, second: Any = None) -> None:
    config = tiny_loop.config_of({"policy": "some/base", "editor": "some/editor"}, folder)
    config["judge"] = {"api_base": judge.api_base, "model": MODEL, "max_attempts": 1}
    if second is not None:
        own = {"type": "viescore", "held_out_only": True, "judge": second}
        config["rewards"] |= {"second": own}
    with set_up.open_run(load_config(tiny_loop.write_config(folder, config)), Dist()):
        raise AssertionError("the run opened without a model")


def test_an_unreadable_judge_is_an_error_before_models_are_loaded(tmp_path: Path) -> None:
    with (
        FaultyJudge(after=Fault(reply="A lovely picture.")) as judge,
        pytest.raises(JudgeError, match=r"^rewards\.viescore: .* its reply: A lovely picture\."),
    ):
        open_run(tmp_path, judge)
    assert len(judge.requests) == 2


def test_parameters_that_the_judge_rejects_are_left_out_and_not_counted_as_retries(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    clients = []

    def make_client(*arguments: Any, **options: Any) -> JudgeClient:
        clients.append(JudgeClient(*arguments, **options))
        return clients[0]

    monkeypatch.setattr(set_up, "JudgeClient", make_client)
    with PickyJudge("max_tokens", "seed") as judge, pytest.raises(LoadingError):
        open_run(tmp_path, judge)
    [client] = clients
    stats = client.take_stats()
    assert stats.requests == 1 and not stats.retries, "only the request that tests the address"
    assert len(judge.requests) == 2 * 3, "each question, until it lacks both parameters"
    [message] = [record.getMessage() for record in caplog.records]
    assert holds(message, "without max_tokens, seed")
    assert f"rewards.viescore: {judge.api_base} " in capsys.readouterr().out


def test_a_second_judge_that_does_not_answer_at_the_start_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(set_up, "START_PATIENCE_S", 0.0)
    with FaultyJudge() as judge, pytest.raises(LoadingError):
        open_run(tmp_path, judge, {"api_base": "http://127.0.0.1:9", "model": "second"})
    parts = "rewards.second.judge: ... training goes on ... no judge at http://127.0.0.1:9"
    assert holds(capsys.readouterr().err, parts)


def test_a_reward_asks_its_own_judge_and_no_other(tmp_path: Path) -> None:
    with FaultyJudge() as judge, FaultyJudge() as second:
        with pytest.raises(LoadingError):
            open_run(tmp_path, judge, {"api_base": second.api_base, "model": MODEL})
        assert len(judge.requests) == len(second.requests) == 2, "each question of VIEScore once"
        broken = ["{python}", "-c", "raise SystemExit('no GPU')", "{url_file}"]
        with pytest.raises(JudgeError, match="no GPU"):
            open_run(tmp_path, judge, {"start_command": broken, "model": MODEL})
