"""`judge.audit`: a starting run audits its judge, warns, or stops."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import tiny_config
from tiny_messages import raising

from benchmarks.judge_defects import DefectiveJudge
from rl import build
from rl.check import check_report, trials
from rl.check.trials import judge_passed
from rl.files import write_atomically
from rl.judge.client import JudgeClient, JudgeError
from rl.judge.http import BackgroundLoop, StoppedError
from rl.progress import Console
from rl.ranks import signals
from rl.ranks.dist import Dist
from rl.record.publish import model_card
from rl.tools.page import alarms

TINY_AUDIT = Path(__file__).resolve().parents[1] / "helpers/tiny_audit.py"

MINE = """
from rl.rewards.judged import VieScore, VieScoreConfig
class Config(VieScoreConfig):
    type: str
class Mine(VieScore):
    Config = Config
"""


FEW = ("base_exp_dir=.", "judge.max_attempts=1", "judge.audit_min_auroc=0.5")
"""So few cases suffice for this line; each test runs in its own folder."""


@contextmanager
def gate(folder: Path, defect: str) -> Iterator[tuple[DefectiveJudge, object]]:
    """A judge with `defect`, and a function: the `judge_passed` of a run that uses this judge."""
    with DefectiveJudge("tiny-world-judge", defect) as judge, BackgroundLoop() as loop:

        def passes(*changes: str, key: str = "judge") -> bool | None:
            resolved = build.resolve(tiny_config.evaluated("quickstart", *FEW, *changes))
            client = JudgeClient(resolved.by_judge[key].config.judge, judge.api_base)
            try:
                arguments = (client, folder / "judge_0.log", Dist(), loop, Console(True))
                return judge_passed(resolved, key, *arguments)
            finally:
                loop.submit(client.aclose()).result()

        yield judge, passes


@pytest.fixture(autouse=True)
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_spec(trials.AUDIT[4])
    tiny = (sys.executable, "-u", "-P", str(TINY_AUDIT), *trials.AUDIT[5:])
    monkeypatch.setattr(trials, "AUDIT", tiny)


@pytest.mark.slow
def test_required_audits_an_unknown_judge_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with gate(tmp_path, "sound") as (judge, passes):
        assert passes("judge.audit=warn") is False
        assert "has not been audited" in capsys.readouterr().err
        assert passes("judge.audit=off") is None
        assert passes() is True
        assert "auditing the judge on 3 samples" in capsys.readouterr().out
        judge.sound = None  # type: ignore[assignment, method-assign] # a further question would fail
        assert passes() is True
        assert passes("judge.audit=warn") is True
        out, err = capsys.readouterr()
        assert "passed its audit" in out and err == ""


@pytest.mark.slow
def test_a_failed_audit_stops_the_run_or_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with gate(tmp_path, "constant") as (_, passes):
        with raising(JudgeError, "not above judge.audit_min_auroc ... judge.audit: 'warn'"):
            passes()
        assert passes("judge.audit=warn") is False
        assert "failed its audit" in capsys.readouterr().err
        assert passes("judge.audit_min_auroc=0")
    config = tiny_config.evaluated("quickstart", *FEW)
    text, code = check_report.report(config, gpu_gb=80)
    assert code == 1 and "judge.audit: the judge failed its audit" in text
    file = tmp_path / trials.FILE
    text = file.read_text()
    [key] = json.loads(text)
    damages = (('"auroc":', '"area":'), ('"auroc":', '"auroc": "x", "mean":'), ('"date"', '"day"'))
    for damaged in (*(text.replace(*damage) for damage in damages), f'{{"{key}": 3}}', "{"):
        file.write_text(damaged)
        text, code = check_report.report(config, gpu_gb=80)
        assert code == 1 and "is damaged" in text


@pytest.mark.slow
def test_an_undecided_audit_is_no_passed_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with gate(tmp_path, "sound") as (_, passes):
        with pytest.raises(JudgeError, match=r"is undecided: add cases .*all kinds: AUROC 1\.00"):
            passes("judge.audit_min_auroc=0.85")
        assert "UNDECIDED: add cases" in capsys.readouterr().out
        assert passes("judge.audit_min_auroc=0.85", "judge.audit=warn") is False
        assert "is undecided" in capsys.readouterr().err


@pytest.mark.slow
def test_a_judge_of_its_own_is_audited_with_its_own_rewards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a reward of the working folder; the judge's key is in the environment."""
    write_atomically(tmp_path / "audited_here/mine.py", MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("KEY_OF_THE_SECOND", "a-key-of-some-length")
    second = (
        "rewards.second={type: 'audited_here.mine', judge: {model: 'tiny-world-judge', "
        "revision: 'b', audit: 'required', audit_min_auroc: 0.5, audit_set: 'data', "
        "api_key_env: 'KEY_OF_THE_SECOND'}}"
    )
    with gate(tmp_path, "sound") as (_, passes):
        assert passes(second, key="rewards.second.judge") is True
    [entry] = json.loads((tmp_path / trials.FILE).read_text()).values()
    assert [audit["reward"] for audit in entry["audits"]] == ["rewards.second"]
    assert entry["judge"]["revision"] == "b" and "viescore" not in entry["judge"]["rewards"]


def test_an_audit_that_cannot_be_made_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with gate(tmp_path, "sound") as (judge, passes):
        (tmp_path / "judge_0.ended").write_text("the judge ended with exit code 3")
        with pytest.raises(JudgeError, match="cannot be audited: the judge ended with exit code 3"):
            passes()
        judge.close()
        (tmp_path / "judge_0.ended").unlink()
        with pytest.raises(JudgeError, match=r"^judge\.audit: .* cannot be audited: no judge at"):
            passes()
        assert capsys.readouterr().err == ""
        monkeypatch.setattr(trials, "AUDIT", ("sh", "-c", "kill -9 $$"))
        with pytest.raises(JudgeError, match="the audit ended with exit code -9"):
            passes()
        monkeypatch.setitem(signals._received_s, signal.SIGTERM, 0.0)
        with pytest.raises(StoppedError):  # a batch system signals both
            passes()


def test_a_stop_signal_ends_the_audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_s: list[float] = []
    is_over = threading.Event()
    with gate(tmp_path, "sound") as (judge, passes):

        def never(parts: object) -> str:
            signals._received_s.setdefault(signal.SIGTERM, 0.0)
            asked_s.append(time.monotonic())
            is_over.wait(60)
            return ""

        monkeypatch.setattr(signals, "_received_s", {})
        judge.answer = never  # type: ignore[assignment, method-assign]
        with pytest.raises(StoppedError):
            passes()
        assert time.monotonic() - asked_s[0] < 10
        is_over.set()
    # Leaves out a child that ends while it is looked at.
    found = [each.info for each in psutil.process_iter(["ppid", "cmdline"])]
    children = [each["cmdline"] or () for each in found if each["ppid"] == os.getpid()]
    assert not [words for words in children if str(TINY_AUDIT) in words]
    assert not (tmp_path / trials.FILE).exists()


def test_page_and_card_say_whether_the_judge_passed() -> None:
    for passed in (0.0, 1.0):
        line = {"iteration": 3, "judge/audit_passed": passed}
        assert any("audit" in text for text in alarms([line], {}, {})) == (not passed)
        card = model_card({"run_name": "x"}, 3, line)
        assert ("has NOT passed an audit" in card) == (not passed)
        assert ("The judge passed an audit" in card) == bool(passed)
    assert "audit" not in model_card({"run_name": "x"}, 3, {})
