"""`judge.audit`: a starting run audits its judge, warns, or stops."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.judge_defects import DefectiveJudge
from rl import build
from rl.audit import judge_audit
from rl.check import check_report
from rl.config.schema import load_config
from rl.console import Console
from rl.judge.client import JudgeClient, JudgeError
from rl.judge.http import BackgroundLoop
from rl.ranks.dist import Dist
from rl.record.publish import model_card
from rl.report.summary import alarms
from rl.run.judge_gate import judge_passed


def overrides(folder: Path) -> list[str]:
    """So few cases suffice for this line."""
    return [f"base_exp_dir={folder}", "judge.max_attempts=1", "judge.audit_min_auroc=0.5"]


@contextmanager
def gate(folder: Path, defect: str) -> Iterator[tuple[DefectiveJudge, object]]:
    """A judge with `defect`, and a function: the `judge_passed` of a run that uses this judge."""
    with DefectiveJudge("tiny-world-judge", defect) as judge, BackgroundLoop() as loop:

        def passes(*changes: str) -> bool | None:
            config = load_config("configs/quickstart.jsonnet", [*overrides(folder), *changes])
            client = JudgeClient(config.judge, judge.api_base)
            try:
                resolved = build.resolve(config)
                return judge_passed(resolved, client, Dist(), loop, Console(True))
            finally:
                loop.submit(client.aclose()).result()

        yield judge, passes


@pytest.fixture(autouse=True)
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_audit, "NUM_CASES", 3)
    monkeypatch.setattr(judge_audit, "NUM_REPEATED", 1)


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
        printed = capsys.readouterr()
        assert "passed its audit" in printed.out and printed.err == ""


@pytest.mark.slow
def test_a_failed_audit_stops_the_run_or_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with gate(tmp_path, "constant") as (_, passes):
        with pytest.raises(JudgeError, match=r"not above judge\.audit_min_auroc") as refused:
            passes()
        assert "judge.audit: 'warn'" in str(refused.value)
        assert passes("judge.audit=warn") is False
        assert "failed its audit" in capsys.readouterr().err
        assert passes("judge.audit_min_auroc=0")
    config = load_config("configs/quickstart.jsonnet", overrides(tmp_path))
    text, code = check_report.report(config, gpu_gb=80)
    assert code == 1 and "judge.audit: the judge failed its audit" in text
    file = tmp_path / judge_audit.FILE
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


def test_page_and_card_say_whether_the_judge_passed() -> None:
    for passed in (0.0, 1.0):
        line = {"iteration": 3, "judge/audit_passed": passed}
        assert any("audit" in text for text in alarms([line], {}, {})) == (not passed)
        card = model_card({"run_name": "x"}, 3, line)
        assert ("has NOT passed an audit" in card) == (not passed)
        assert ("The judge passed an audit" in card) == bool(passed)
    assert "audit" not in model_card({"run_name": "x"}, 3, {})
