"""`rl report` prints the results of a run folder as training writes it."""

from __future__ import annotations

import json

import pytest
from tiny_messages import holds
from tiny_report import held_out, write_held_out

from rl.files import read_rows
from rl.tools.commands import report
from rl.tools.reading import read_named

REWARDS = {0: [0.1, 0.3, None, 0.2], 8: [0.9, 0.5, 0.8, 0.2]}


@pytest.fixture
def run_dir(tmp_path):
    baseline = {"eval/bare_reward": 0.15}
    rows = [
        {"iteration": 0, "eval/reward": 0.2, "eval_reference/reward": 0.0}
        | {"eval/reward_gain": 0.05, **baseline},
        *({"iteration": i, "reward/mean": i / 10} for i in range(1, 8)),
        {"iteration": 8, "reward/mean": None, "eval/reward": 0.6, "eval_reference/reward": 0.9}
        | {"eval/reward_gain": 0.45, **baseline},
    ]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"iteration": 9, "rew']))
    for iteration, rewards in REWARDS.items():
        write_held_out(tmp_path, iteration, [held_out(*one) for one in enumerate(rewards)])
    return tmp_path


def test_before_and_after_are_compared_on_the_same_samples(run_dir, capsys):
    assert report.main([str(run_dir)]) == 0
    assert (run_dir / "report").stat().st_mode & 0o777 == 0o700, "it holds completions"
    lines = capsys.readouterr().out.splitlines()
    assert holds(lines[0], "0 to 1 ... 8 iterations")
    # s0, s1, s3: gains 0.8, 0.2, 0.0. One resample in 27 has only the least and one only the
    # largest; 1/27 is more than 2.5 %, so the interval reaches from the least to the largest.
    span = "95 % +0.000 to +0.800"
    for line, parts in (
        (1, f"held-out ... 0.200 -> 0.533   (+0.333, {span}, 3 samples)"),
        (2, "  a  ... 0.100 -> 0.900   (+0.800, no interval ... 1 samples)"),
        (3, "  b  ... 0.250 -> 0.350   (+0.100, 95 % +0.000 to +0.200, 2 samples)"),
        (4, "left out: 1 "),
        (5, "95 % interval"),
        (8, "other training seeds"),
        (9, "reference descriptions: 0.000 -> 0.900"),
        (10, "user's own words: 0.150 -> 0.150"),
        (11, "gain over the user's own words: 0.050 -> 0.450"),
    ):
        assert holds(lines[line], parts), lines
    assert lines[12].startswith("  page: "), "the run measured nothing else"


@pytest.mark.parametrize(
    ("pictures", "rewards", "interval"),
    [
        ("ab", (0.2, 0.4), "95 % ... 2 samples"),
        ("aaaa", (0.2, 0.4), "no interval ... 4 samples"),
        ("abcd", (0.3, 0.3), "no interval ... 4 samples"),
    ],
)
def test_a_control_is_named_and_samples_of_one_picture_have_no_interval(
    run_dir, capsys, pictures, rewards, interval
):
    config = {"format": 3, "run_name": "tiny_control", "algorithm": {"shuffle_rewards": True}}
    (run_dir / "config.json").write_text(json.dumps(config))
    for iteration in REWARDS:
        rows = [
            held_out(i, bool(iteration) * rewards[i % 2], category="", shown=[picture])
            for i, picture in enumerate(pictures)
        ]
        write_held_out(run_dir, iteration, rows)
    assert report.main([str(run_dir)]) == 0
    out = capsys.readouterr().out
    parts = f"control run ... algorithm.shuffle_rewards ... other training seeds ... {interval}"
    assert holds(out, parts)
    assert "What was learnt" not in out
    assert "algorithm.shuffle_rewards" in (run_dir / "report/index.html").read_text("utf-8")


def test_gains_over_stock_and_by_thinking_and_drift_are_reported(run_dir, capsys):
    path = run_dir / "metrics.jsonl"
    rows, _ = read_rows(path)
    for row, gain, fall in ((rows[0], -0.1, 0.0), (rows[-1], 0.3, 0.06)):
        row |= {
            **{"eval/stock_reward": 0.3, "eval/stock_upstream_reward": 0.25},
            **{"eval/gain_over_stock": gain, "eval/gain_over_stock_error": 0.05},
            **{"drift/bare_fall": fall, "drift/bare_fall_error": 0.01, "drift/alarm": fall > 0},
            **{"eval/gain_of_thought": gain + 0.2, "eval/gain_of_thought_error": 0.05},
            **{"drift/state_l2": 4 * fall, "eval/cut_thought_reward": 0.2},
        }
    path.write_text("\n".join(map(json.dumps, rows)))
    assert report.main([str(run_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line, parts in (
        (9, "DRIFT: after 8 iterations"),
        (13, "untrained ... 0.300 -> 0.300"),
        (14, "diffusers' own ... 0.250"),
        (15, "over the untrained ... -0.100 +- 0.050 -> 0.300 +- 0.050"),
        (16, "thought ... 0.200"),
        (17, "thinking: 0.100 +- 0.050 -> 0.500 +- 0.050"),
        (18, "own words ... 0.000 +- 0.010 -> 0.060 +- 0.010"),
        (19, "states ... 0.000 -> 0.240"),
    ):
        assert holds(lines[line], parts), lines
    assert "Gain of thinking" in (run_dir / "report" / "index.html").read_text("utf-8")


def test_alarms_about_the_judge_are_on_the_page(run_dir, capsys):
    row = {"optimizer/steps": 1, "pictures/rewarded_copies": 0.5, "pictures/copies": "damaged"}
    rows = [{"iteration": i, "eval/gap_alarm/second": i // 6, **row} for i in range(1, 7)]
    (run_dir / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert report.main([str(run_dir)]) == 0
    page = (run_dir / "report" / "index.html").read_text("utf-8")
    assert holds(page, "Iteration 6: second, which trains nothing ... exploit its judge")
    assert holds(page, "Iteration 5: 50% of the graded pictures ... pays for doing nothing")
    assert page.count("pays for doing nothing") == 1


def test_a_damaged_line_is_named_and_the_others_are_read(run_dir, capsys):
    path = run_dir / "metrics.jsonl"
    rows, _ = read_rows(path)
    rows[3]["said"] = "\u2028 \u0085 \r"
    lines = [json.dumps(row, ensure_ascii=False).encode() for row in rows]
    path.write_bytes(b"\n".join([*lines[:2], b'{"iteration": \xff}', *lines[2:], b'{"iterat']))
    assert report.main([str(run_dir), "seed=1"]) == 1
    assert "only a config takes key=value" in capsys.readouterr().err
    (run_dir / "config.json").write_text("[]")
    assert report.main([str(run_dir)]) == 0
    output = capsys.readouterr()
    assert holds(output.err, f"config.json ... damaged ... {path}: ... damaged ... 3, 11\n")
    assert "config.json (1)" in (run_dir / "report/index.html").read_text()
    assert "0.050 -> 0.450" in output.out, "the first row and the last"
    assert len(read_named(path, "iteration")) == len(rows) == 9


def test_a_run_without_evaluations_has_a_page_too(run_dir, capsys):
    for path in run_dir.glob("evaluation/*/records.jsonl"):
        path.unlink()
    assert report.main([str(run_dir)]) == 0
    assert "two held-out evaluations" in capsys.readouterr().out
    assert (run_dir / "report/index.html").is_file()
