"""Audits and attacks through the real client: a sound judge passes, each defect is caught."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from itertools import product
from pathlib import Path

import pytest
from datasets import Dataset
from tiny_config import REPO
from tiny_messages import code_of

from benchmarks.judge_defects import DEFECTS, DefectiveJudge, examine
from rl import build
from rl.api.types import RewardOutput, Sample
from rl.check.trials import verdict
from rl.config.schema import JudgeConfig, load_config
from rl.judge.client import JudgeError
from rl.tools.audit_cases import CORRECT, Case
from rl.tools.commands import audit_judge
from rl.tools.commands.audit_judge import Readings, audit_lines
from tiny_world.data.shapes import Shapes
from tiny_world.data.synthetic import SyntheticConfig

MODEL = "tiny-world-judge"


def quickstart(folder: Path, api_base: str) -> list[str]:
    """Arguments: the quickstart's config with a judge that is running."""
    return [
        str(REPO / "configs/quickstart.jsonnet"),
        f"base_exp_dir={folder}",
        f"judge.api_base={api_base}",
        "judge.start_command=[]",
    ]


CAUGHT = {
    "constant": "no_edit: AUROC 0.50, not above judge.audit_min_auroc=0.85",
    "prefers length": "no_edit: AUROC 0.50, not above judge.audit_min_auroc=0.85",
    "prefers copies": "no_edit: AUROC 0.50, not above judge.audit_min_auroc=0.85",
    "order-biased": "exchanged: AUROC 0.00",
    "ignores order": "exchanged: AUROC 0.50",
    "noisy": "readings of one picture differ by",
    "ignores a category": "erase: AUROC",
    "silent on copies": "no_edit: no usable reply to 100%",
    "echo": "correct: no usable reply to 100%",
}


@pytest.mark.slow
@pytest.mark.parametrize("defect", CAUGHT)
def test_each_defect_fails_the_audit(defect: str) -> None:
    audit, _ = examine(defect, 64 if "category" in defect else 8, attacked=False)
    assert CAUGHT[defect] in "\n".join(audit.failures)


@pytest.mark.slow
def test_a_sound_judge_passes_audit_and_attack() -> None:
    audit, (attacks, right, floor) = examine("sound", 12)
    assert audit.failures == audit.doubts == []
    assert audit.num_ungraded == 0
    assert {kind.auroc for kind in audit.kinds} == {1.0}
    assert all(attack.passed for attack in attacks)
    assert right > 0.9 and floor < 0.1


@pytest.mark.slow
def test_attacks_find_a_judge_that_believes_writing() -> None:
    audit, (attacks, _, _) = examine("reads text in pictures", 12)
    assert audit.failures == audit.doubts == []  # an audit alone does not see it
    failed = {attack.name for attack in attacks if not attack.passed}
    assert failed == {"pasted_score", "instruction", "addressed"}
    # A fall-back value looks like honest doubt; what it costs is in the AUROC.
    assert {*DEFECTS} == {*CAUGHT, "sound", "reads text in pictures", "half marks as a fall-back"}


CASES = [Case(Sample(str(number), ""), {}) for number in range(16)]


def replies(lost: Mapping[str, Collection[int]], failure: str) -> Readings:
    """Readings of `CASES` by a perfect judge that does not grade the cases `lost` of some kinds."""
    silence = RewardOutput(None, failure=failure)
    return {
        (case, kind): [
            silence if case in lost.get(kind, ()) else RewardOutput(float(kind == CORRECT))
        ]
        for case, kind in product(range(16), (CORRECT, "no_edit", "partial"))
    }


@pytest.mark.parametrize("num_lost", [1, 6, 16])
def test_silence_counts_per_kind_and_keeps_its_row(num_lost: int) -> None:
    asked = replies({"no_edit": range(num_lost)}, "unreadable: prose")
    audit = audit_judge.measured("r", CASES, asked, JudgeConfig())
    text = f"no_edit: no usable reply to {num_lost / 16:.0%}"
    told = audit.doubts if num_lost == 1 else audit.failures
    assert any(text in each for each in told) and bool(audit.doubts) == (num_lost == 1)
    assert [kind.num_pairs for kind in audit.kinds] == [16 - num_lost, 16]
    printed = "\n".join(audit_lines(audit))
    [row] = [line for line in printed.split("\n") if line.startswith("  no_edit")]
    assert row.split()[1] == str(16 - num_lost) and row.endswith(f" {num_lost / 16:.0%}")
    assert "nan" not in printed


def test_a_kind_to_which_the_judge_may_be_blind_is_undecided() -> None:
    """6 ties of 16 are an AUROC of 0.81, whose interval holds 0.7 and 0.85."""
    blind = {(case, "partial"): [RewardOutput(1.0)] for case in range(6)}
    audit = audit_judge.measured("r", CASES, {**replies({}, ""), **blind}, JudgeConfig())
    assert audit.failures == [] and "partial: AUROC 0.81 (0.6" in audit.doubts[-1]


def test_an_outage_is_not_kept_and_silence_is(tmp_path: Path) -> None:
    config, *overrides = quickstart(tmp_path, "http://127.0.0.1:9")
    resolved = build.resolve(load_config(config, overrides))
    lost, limits = {"partial": range(16)}, resolved.config.judge
    audit = audit_judge.measured("r", CASES, replies(lost, "timeout: 60 s"), limits)
    with pytest.raises(JudgeError, match="16 of 48 results got no usable reply"):
        audit_judge.save_results(resolved, audits=[audit])
    assert verdict(resolved).passed is None
    audit = audit_judge.measured("r", CASES, replies(lost, "unreadable: prose"), limits)
    audit_judge.save_results(resolved, audits=[audit])
    known = verdict(resolved)
    assert known.passed is False and "partial: no usable reply to 100%" in known.text


@pytest.mark.slow
def test_the_command_keeps_its_result_by_the_judges_identity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_judge, "NUM_REPEATED", 1)
    with DefectiveJudge(MODEL, "sound") as judge:
        arguments = [*quickstart(tmp_path, judge.api_base), "judge.audit_min_auroc=0.5"]
        assert audit_judge.main(["audit", *arguments, "--cases", "1"]) == 3
        assert "UNDECIDED: add cases (--cases N): all kinds: AUROC" in capsys.readouterr().out
        assert audit_judge.main(["audit", *arguments, "--cases", "3"]) == 0
        assert audit_judge.main(["attack", *arguments, "--cases", "1"]) == 0
    printed = capsys.readouterr().out
    assert "PASS" in printed and "requests" in printed
    lines = [line for line in printed.split("\n") if str(tmp_path) not in line]
    assert max(map(len, lines)) <= 80
    [entry] = json.loads((tmp_path / "judge_audit.json").read_text()).values()
    assert entry["judge"]["model"] == MODEL
    assert {"audits", "attacks", "date"} <= set(entry)
    page = (tmp_path / "judge_audit.html").read_text()
    assert page.count("data:image/webp") >= 12 * 3 and "<script" not in page
    for change, passed in (
        ("seed=1", True),
        ("rewards.viescore.n_evals=1", True),  # the default
        ("judge.revision=b", None),
        ("judge.temperature=0.5", None),
    ):
        other = build.resolve(load_config(arguments[0], [*arguments[1:], change]))
        assert verdict(other).passed is passed, change


@pytest.mark.slow
def test_the_command_reads_labelled_pairs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = Shapes(SyntheticConfig(type="shapes", num_samples=12, seed=3), None)  # type: ignore[arg-type]
    rows = []
    for number in range(12):
        sample = source[number]
        row = {"q": sample.instruction}
        for name, picture in (
            ("before", sample.source),
            ("good", sample.target),
            ("bad", sample.source),
        ):
            row[name] = f"{number}_{name}.png"
            picture.save(tmp_path / row[name])
        rows.append(row)
    pairs = tmp_path / "pairs.parquet"
    Dataset.from_list(rows).to_parquet(pairs)
    named = "instruction=q,source=before,better=good,worse=bad"
    with DefectiveJudge(MODEL, "sound") as judge:
        arguments = ["audit", *quickstart(tmp_path / "runs", judge.api_base), "--pairs", str(pairs)]
        assert audit_judge.main([*arguments, "--columns", named]) == 0
        assert "worse" in capsys.readouterr().out
        for wrong, parts in (
            ([*arguments, "--columns", "instruction=q"], "--columns: nothing for better, worse"),
            ([*arguments[:-1], "nowhere.csv"], "--pairs: nowhere.csv does not exist"),
            ([*arguments, "--columns", named.replace("bad", "nil")], "nil"),
        ):
            assert audit_judge.main(wrong) == 2
            assert parts in capsys.readouterr().err
    # The gate asks for the audit, which labelled pairs do not replace.
    [entry] = json.loads((tmp_path / "runs/judge_audit.json").read_text()).values()
    assert "pairs" in entry and "audits" not in entry


def test_the_command_names_what_it_cannot_audit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(REPO / "configs/tiny_reasoning.jsonnet")
    assert audit_judge.main(["audit", config, f"base_exp_dir={tmp_path}"]) == 2
    assert "there is nothing to audit" in capsys.readouterr().out
    arguments = quickstart(tmp_path, "http://127.0.0.1:9")
    assert code_of(audit_judge.main, "audit", *arguments, "--columns", "source=a") == 2
    assert audit_judge.main(["audit", *arguments]) == 2
    assert "no judge at http://127.0.0.1:9" in capsys.readouterr().err
    with DefectiveJudge(MODEL, "echo") as judge:  # nothing is graded
        arguments = [*quickstart(tmp_path, judge.api_base), "--cases", "1", "judge.max_attempts=1"]
        assert audit_judge.main(["audit", *arguments]) == 1
        out = capsys.readouterr().out
        assert "ungraded: 30 of" in out and "FAIL correct: no usable reply" in out
        assert audit_judge.main(["attack", *arguments]) == 2
        assert "no usable reply" in capsys.readouterr().err
        [entry] = json.loads((tmp_path / "judge_audit.json").read_text()).values()
        assert {*entry} == {"judge", "audits", "date"}
        judge.sound = None  # type: ignore[assignment, method-assign] # a question would fail
        (tmp_path / "judge_audit.json").write_text("[")
        assert audit_judge.main(["audit", *arguments]) == 2
        assert "is damaged" in capsys.readouterr().err
