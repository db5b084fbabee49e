"""The table of one config's runs with many seeds, against numbers computed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import seeds, training
from rl.record.run_summary import Summary


def write_run(out: Path, seed: int, held_out: list[float], dead: list[float]) -> None:
    folder = out / f"quickstart-seed-{seed}"
    folder.mkdir()
    rows: list[dict[str, float]] = [{"iteration": 0, "eval/reward": held_out[0]}]
    rows += [
        {"groups/dead": share, "time/iteration_s": 2.0, "reward/mean": held_out[i >= 10]}
        for i, share in enumerate(dead)
    ]
    rows[4] |= {"drift/state_l2": 0.4}
    rows[-1] |= {"eval/reward": held_out[1], "eval_reference/reward": 0.99, "drift/state_l2": 0.3}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_every_seed_is_printed_and_the_worst_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, 7, [0.25, 0.9], [0.5] * 10 + [0.0] * 10)
    write_run(tmp_path, 8, [0.35, 0.8], [0.0] * 15 + [0.2] * 5)
    # Finished: not started again.
    monkeypatch.setattr(training, "summarise", lambda _: Summary(tmp_path, planned="40", done=40))
    monkeypatch.delattr(training, "subprocess")
    seeds.main(["quickstart", "--first", "7", "--count", "2", "--out", str(tmp_path)])
    out = capsys.readouterr().out
    assert "| 7 | 0.250 0.900 | 0.990 | 0% | 50% | 0.40 | 40 |" in out
    assert "| 8 | 0.350 0.800 | 0.990 | 10% | 10% | 0.40 | 40 |" in out
    assert (
        "2 seeds: mean 0.850 +- 0.071 (standard deviation over seeds), median 0.850, worst 0.800, "
        "best 0.900; before training 0.300 +- 0.071. Sampled in training: 0.300 +- 0.071 in the "
        "first ten iterations, 0.850 +- 0.071 in the last."
    ) in out
