"""Audits and attacks through the real client: a sound judge passes, each defect is caught."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from PIL import Image

from benchmarks.judge_defects import DEFECTS, DefectiveJudge, examine
from rl import build
from rl.audit import judge_audit
from rl.audit.audit_sets import run_cases
from rl.commands import audit_judge as command
from rl.config.schema import load_config
from tiny_world.data.shapes import Shapes
from tiny_world.data.synthetic import SyntheticConfig

REPO = Path(__file__).resolve().parents[2]
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
    "constant": "AUROC below judge.audit_min_auroc=0.8: no_edit 0.50",
    "prefers length": "AUROC below judge.audit_min_auroc=0.8: no_edit 0.50",
    "prefers copies": "AUROC below judge.audit_min_auroc=0.8: no_edit 0.50",
    "order-biased": "exchanged 0.00",
    "ignores order": "exchanged 0.50",
    "noisy": "judge.audit_max_noise",
    "ignores a category": "erase",
    "half marks as a fall-back": "judge.audit_max_fallback",
    "echo": "no usable reply",
}


@pytest.mark.slow
@pytest.mark.parametrize("defect", CAUGHT)
def test_each_defect_fails_the_audit(defect: str) -> None:
    audit, _ = examine(defect, 16 if "fall-back" in defect else 8, attacked=False)
    assert CAUGHT[defect] in "\n".join(audit.failures)


@pytest.mark.slow
def test_a_sound_judge_passes_audit_and_attack() -> None:
    audit, (attacks, right, floor) = examine("sound", 8)
    assert audit.failures == []
    assert audit.num_ungraded == 0
    assert {kind.auroc for kind in audit.kinds} == {1.0}
    assert all(attack.passed for attack in attacks)
    assert right > 0.9 and floor < 0.1


@pytest.mark.slow
def test_attacks_find_a_judge_that_believes_writing() -> None:
    audit, (attacks, _, _) = examine("reads text in pictures", 8)
    assert audit.failures == []  # an audit alone does not see it
    failed = {attack.name for attack in attacks if not attack.passed}
    assert failed == {"pasted_score", "instruction", "addressed"}
    assert len(DEFECTS) == len(CAUGHT) + 2


@pytest.mark.slow
def test_the_command_keeps_its_result_by_the_judges_identity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge_audit, "NUM_REPEATED", 1)
    monkeypatch.setattr(judge_audit, "MIN_PAIRS", 3)
    with DefectiveJudge(MODEL, "sound") as judge:
        arguments = quickstart(tmp_path, judge.api_base)
        assert command.main(["audit", *arguments, "--cases", "2"]) == 1
        assert "at most 2 pairs of a kind" in capsys.readouterr().out
        assert command.main(["audit", *arguments, "--cases", "3"]) == 0
        assert command.main(["attack", *arguments, "--cases", "1"]) == 0
    printed = capsys.readouterr().out
    assert "PASS" in printed and "requests" in printed
    lines = [line for line in printed.split("\n") if str(tmp_path) not in line]
    assert max(map(len, lines)) <= 80
    [entry] = json.loads((tmp_path / "judge_audit.json").read_text()).values()
    assert entry["judge"]["model"] == MODEL
    assert {"audits", "attacks", "date"} <= set(entry)
    page = (tmp_path / "judge_audit.html").read_text()
    assert page.count("data:image/webp") >= 12 * 3 and "<script" not in page
    resolved = build.resolve(load_config(arguments[0], arguments[1:]))
    assert judge_audit.verdict(resolved).passed is True
    for change in ("judge.revision=b", "judge.temperature=0.5", "rewards.viescore.n_evals=1"):
        other = build.resolve(load_config(arguments[0], [*arguments[1:], change]))
        same = change.endswith("n_evals=1")  # the default
        assert judge_audit.verdict(other).passed is (True if same else None), change


@pytest.mark.slow
def test_the_command_reads_labelled_pairs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = Shapes(SyntheticConfig(type="shapes", num_samples=10, seed=3), None)  # type: ignore[arg-type]
    samples = [source[i] for i in range(10)]
    columns: dict[str, list[Any]] = {"q": [], "before": [], "good": [], "bad": []}
    for sample in samples:
        columns["q"].append(sample.instruction)
        for name, picture in zip(
            ("before", "good", "bad"), (sample.source, sample.target, sample.source), strict=True
        ):
            assert isinstance(picture, Image.Image)
            file = tmp_path / f"{sample.id.replace('/', '_')}_{name}.png"
            picture.save(file)
            columns[name].append(file.name)
    pairs = tmp_path / "pairs.parquet"
    Dataset.from_dict(columns).to_parquet(pairs)
    named = "instruction=q,source=before,better=good,worse=bad"
    with DefectiveJudge(MODEL, "sound") as judge:
        arguments = ["audit", *quickstart(tmp_path / "runs", judge.api_base), "--pairs", str(pairs)]
        assert command.main([*arguments, "--columns", named]) == 0
        assert "worse" in capsys.readouterr().out
        assert command.main([*arguments, "--columns", "instruction=q"]) == 2
        assert "--columns: nothing for better, worse" in capsys.readouterr().err
        assert command.main([*arguments, "--columns", named.replace("bad", "nil")]) == 2
        assert "nil" in capsys.readouterr().err
    # The gate asks for the audit, which labelled pairs do not replace.
    [entry] = json.loads((tmp_path / "runs/judge_audit.json").read_text()).values()
    assert "pairs" in entry and "audits" not in entry


def test_the_command_names_what_it_cannot_audit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(REPO / "configs/tiny_reasoning.jsonnet")
    assert command.main(["audit", config, f"base_exp_dir={tmp_path}"]) == 2
    assert "there is nothing to audit" in capsys.readouterr().out
    arguments = quickstart(tmp_path, "http://127.0.0.1:9")
    for ignored in (["--columns", "source=a"], ["--pairs", "a.jsonl", "--seed", "1"]):
        with pytest.raises(SystemExit):
            command.main(["audit", *arguments, *ignored])
    capsys.readouterr()
    assert command.main(["audit", *arguments]) == 2
    assert "no judge at http://127.0.0.1:9" in capsys.readouterr().err
    with DefectiveJudge(MODEL, "echo") as judge:  # as in an outage: nothing is graded
        arguments = [*quickstart(tmp_path, judge.api_base), "--cases", "1", "judge.max_attempts=1"]
        for action in ("audit", "attack"):
            assert command.main([action, *arguments]) == 2
            out, err = capsys.readouterr()
            assert "no usable reply" in err and ("ungraded: 30 of" in out) == (action == "audit")
        [entry] = json.loads((tmp_path / "judge_audit.json").read_text()).values()
        assert {*entry} == {"judge"}, "nothing is kept that would refuse later starts"
        assert command.main(["audit", *arguments, "--run", str(tmp_path / "nope")]) == 2
        assert "does not exist" in capsys.readouterr().err
        judge.sound = None  # type: ignore[assignment, method-assign] # a question would fail
        (tmp_path / "judge_audit.json").write_text("[")
        assert command.main(["audit", *arguments]) == 2
        assert "is damaged" in capsys.readouterr().err


def test_a_runs_groups_are_read_back(tmp_path: Path) -> None:
    images = tmp_path / "images/it_000001"
    images.mkdir(parents=True)
    for name in ("source", "m0", "m1"):
        Image.new("RGB", (8, 8), "red").save(images / f"rank0_g00_{name}.png")
    rows = [
        {
            "group_id": "a", "sample_id": "s", "instruction": "paint", "member": member,
            "reward": 0.25 * member, "source_file": "images/it_000001/rank0_g00_source.png",
            "image_file": f"images/it_000001/rank0_g00_m{member}.png" if member < 2 else None,
        }
        for member in range(3)
    ]  # fmt: skip
    (tmp_path / "episodes").mkdir()
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "episodes/it_000001.rank0.jsonl").write_text(lines)
    [case] = run_cases(tmp_path, 5)
    assert set(case.results) == {"m0", "m1"}, "the third has no picture"
    assert case.sample.instruction == "paint" and len(case.sample.sources) == 1
