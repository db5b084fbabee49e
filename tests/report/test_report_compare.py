"""`rl report A --against B`: the numbers, and what cannot be compared."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from tiny_messages import holds, refusal
from tiny_report import facts_of, held_out, write_held_out, write_lines, write_run

from rl.files import read_rows
from rl.tools.commands import report
from rl.tools.commands.report import by_chance, compare, lines

PICTURES = "aabbbcdd"
"""The source picture of each sample: four pictures, shared by 2, 3, 1 and 2 samples."""
OURS = [0.9, 0.4, 0.8, 0.7, 0.1, 0.6, 1.0, 0.5]
THEIRS = [0.2, 0.5, 0.5, 0.7, 0.0, 0.1, 0.25, 0.5]


def make(folder: Path, rewards: list[Any], iteration: int = 8, **changes: Any) -> Path:
    folder.mkdir()
    config = {"format": 3, "run_name": folder.name, "judge": {"model": "j"}, "seed": 1}
    (folder / "config.json").write_text(json.dumps(config))
    write_lines(folder / "metrics.jsonl", [{"iteration": iteration, "eval/reward": 0.5}])
    rows = [
        held_out(i, reward, shown=[PICTURES[i]], parts={"r/part": 10 * (reward or 0)}, noise_seed=i)
        | changes
        for i, reward in enumerate(rewards)
    ]
    write_held_out(folder, iteration, rows)
    return folder


def compared(capsys: pytest.CaptureFixture[str], ours: Path, *others: Path) -> tuple[str, str]:
    """What the command prints, and its page."""
    assert report.main([str(ours), "--against", *map(str, others)]) == 0
    return capsys.readouterr().out, (ours / "report/compare.html").read_text("utf-8")


def change_config(folder: Path, **sections: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | sections))


def exact_interval(sums: dict[str, list[float]]) -> tuple[float, float]:
    """Of the cluster bootstrap, from all resamples instead of random ones: each of the C^C equally
    likely ways to draw C pictures. Tails: Hesterberg (2015), section 4.2."""
    num = len(sums)
    means = [
        np.mean([gain for cluster in drawn for gain in cluster])
        for drawn in itertools.product(sums.values(), repeat=num)
    ]
    tail = stats.norm.cdf(-((num / (num - 1)) ** 0.5) * stats.t.ppf(0.975, num - 1))
    return float(np.quantile(means, tail)), float(np.quantile(means, 1 - tail))


def test_differences_are_paired_and_their_interval_resamples_pictures(tmp_path: Path) -> None:
    result = compare(make(tmp_path / "a", OURS), make(tmp_path / "b", THEIRS))
    assert result.reasons == [] and result.notes == [] and result.settings == []
    total, *categories = result.changes
    gains = np.array(OURS) - np.array(THEIRS)
    expected = [np.mean(THEIRS), np.mean(OURS), gains.mean()]
    assert [total.before, total.after, total.gain] == pytest.approx(expected)
    assert [(c.name, len(c.gains)) for c in categories] == [("a", 4), ("b", 4)]
    assert categories[0].gain == pytest.approx(gains[0::2].mean())
    [part] = result.parts
    assert part.name == "r/part" and part.gain == pytest.approx(10 * gains.mean())
    by_picture: dict[str, list[float]] = {}
    for shown, gain in zip(PICTURES, gains, strict=True):
        by_picture.setdefault(shown, []).append(gain)
    assert total.interval == pytest.approx(exact_interval(by_picture), abs=0.01)
    wrong = exact_interval({str(i): [gain] for i, gain in enumerate(gains[:5])})
    assert total.interval != pytest.approx(wrong, abs=0.01), "samples of a picture go together"
    differences = [round(gain, 6) for gain, _ in total.ranked]
    assert differences == [0.75, 0.7, 0.5, 0.3, 0.1, 0.0, 0.0, -0.1]
    assert holds("\n".join(lines("a", result)), f"b -> a) ... {total.gain:+.3f}")


def test_samples_that_only_one_run_has_are_left_out(tmp_path: Path) -> None:
    ours = make(tmp_path / "a", [*OURS[:3], None])
    theirs = make(tmp_path / "b", THEIRS, iteration=4, image_file=None, noise_seed=99)
    result = compare(ours, theirs)
    assert result.reasons == [], "noise is of pictures"
    assert holds(result.notes, "after 4 iterations of b, and 8 here ... the 4 samples ... 8 and 4")
    assert len(result.changes[0].gains) == 3


@pytest.mark.parametrize(
    ("sections", "changes", "reason"),
    [
        ({"judge": {"model": "k"}}, {}, "another judge: judge.model is j here and k in the other"),
        ({"rewards": {"x": {"type": "clip"}}}, {}, "another reward: rewards.x.type"),
        ({}, {"instruction": "other"}, "other held-out data: sample s0 has another instruction"),
        ({}, {"shown": ["z"]}, "other held-out data: sample s0 shows another picture"),
        ({}, {"noise_seed": 99}, "other noise: sample s0"),
        ({}, {"id": "elsewhere"}, "other held-out data: no sample is in both"),
    ],
)
def test_runs_of_other_data_judge_or_noise_are_not_compared(
    tmp_path: Path, capsys: Any, sections: Any, changes: Any, reason: str
) -> None:
    ours, theirs = make(tmp_path / "a", OURS), make(tmp_path / "b", THEIRS, **changes)
    change_config(theirs, **sections)
    result = compare(ours, theirs)
    assert holds(result.reasons, reason) and result.changes == []
    out, page = compared(capsys, ours, theirs)
    assert holds(out, f"NOT COMPARABLE ... {reason}")
    assert holds(page, f"Not comparable ... {reason}") and "95 % interval</th>" not in page


def test_runs_whose_reward_is_another_sum_are_compared_part_by_part(
    tmp_path: Path, capsys: Any
) -> None:
    ours, theirs = make(tmp_path / "a", OURS), make(tmp_path / "b", THEIRS)
    change_config(theirs, final_reward={"op": "weighted_sum", "weights": {"r": 2.0}})
    result = compare(ours, theirs)
    assert result.reasons == [] and result.changes == []
    [part] = result.parts
    assert part.name == "r/part"
    assert part.gain == pytest.approx(10 * (np.mean(OURS) - np.mean(THEIRS)))
    out, page = compared(capsys, ours, theirs)
    assert holds(out, "different sums (final_reward.op, final_reward.weights.r): only ... r/part")
    assert "NOT COMPARABLE" not in out
    assert holds(page, "different sums ... r/part") and 'class="all"' not in page


def make_curve(folder: Path, curve: list[float], control: bool = True, **sections: Any) -> Path:
    """A run of another seed than every other one, with these held-out rewards."""
    make(folder, OURS, noise_seed=folder.name)
    change_config(folder, algorithm={"shuffle_rewards": control}, seed=folder.name, **sections)
    rows = [{"iteration": 2 * i, "eval/reward": value} for i, value in enumerate(curve)]
    write_lines(folder / "metrics.jsonl", rows)
    return folder


def test_a_gain_is_compared_with_those_of_the_controls_of_its_config(
    tmp_path: Path, capsys: Any
) -> None:
    learnt = make_curve(tmp_path / "learnt", [0.3, 0.2, 0.65], control=False)
    lucky = make_curve(tmp_path / "lucky", [0.3, 0.6, 0.4])
    fallen = make_curve(tmp_path / "fallen", [0.3, 0.1, 0.2])
    short = make_curve(tmp_path / "short", [0.9])
    longer = make_curve(tmp_path / "longer", [0.0, 1.0], num_iterations=9)
    out, page = compared(capsys, learnt, lucky, fallen, short, longer)
    assert holds(out, "  lucky: 0.300 -> 0.400, at most +0.300\n")
    assert holds(out, "  fallen: 0.300 -> 0.200, at most -0.100\n")
    assert holds(out, "this run: +0.350, more than any control ... at most one run of 3")
    assert re.findall("against (.*): NOT COMPARABLE", out) == ["short", "longer"]
    assert holds(page, 'href="#chance" ... <bdi>short ... <bdi>longer ... at most +0')
    assert page.count("<section") == 3
    out, _ = compared(capsys, fallen, lucky)
    assert holds(out, "this run: -0.100, no more than a control's +0.300: chance can do that")
    assert by_chance(lucky, [compare(lucky, learnt)]) == []


def test_a_run_is_not_compared_with_itself_or_without_an_evaluation(tmp_path: Path) -> None:
    ours, bare = make(tmp_path / "a", OURS), make(tmp_path / "b", [])
    (tmp_path / "link").symlink_to(ours)
    message = refusal(report.main, [str(ours), "--against", str(tmp_path / "link")])
    assert "the run itself" in message
    (bare / "evaluation/it_000008/records.jsonl").unlink()
    assert holds(compare(ours, bare).reasons, "b: no held-out evaluation")


def test_the_page_has_the_numbers_curves_and_pictures_of_all_runs(
    tmp_path: Path, capsys: Any
) -> None:
    ours, *others = (write_run(tmp_path / name, name=name) for name in ("mine", "other&run", "3"))
    rows = read_rows(others[0] / "evaluation/it_000004/records.jsonl")[0]
    write_held_out(others[0], 4, [row | {"reward": 0.1} for row in rows])
    out, page = compared(capsys, ours, *others)
    [change, *_] = compare(ours, others[0]).changes
    # 0.9, 0.3, 0.8, 0.2, 0.6 against 0.1 five times.
    assert change.gain == pytest.approx(0.46)
    assert "+0.460" in out and "+0.460" in page and change.interval_text in page
    assert page.count("<script") == 4 and "<img src=x" not in page
    pictures = re.findall(r'<img src="([^"]+)"', page.replace("%26", "&"))
    assert len(pictures) == 15
    assert all((ours / "report" / picture).is_file() for picture in pictures)
    facts = facts_of(page)
    lines = facts["curves"][0]["lines"]
    assert [style for *_, style in lines] == ["main", "dash run1", "dot run2"]
    values = [facts["data"]["of"][metric] for metric, *_ in lines]
    assert values[0] == values[2] and any(value is not None for value in values[0])
