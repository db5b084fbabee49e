"""The evidence of a model card is read from a run folder as training writes it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tiny_report import held_out, write_held_out, write_lines

from rl.record.publish import Evidence
from rl.tools.commands.export import gather

REWARDS = {0: [0.1, 0.3, None, 0.2], 8: [0.9, 0.5, 0.8, 0.2], 16: [1.0, 1.0, 1.0, 1.0]}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    rows: list[dict[str, Any]] = [{"iteration": 0, "eval/reward": 0.2, "drift/alarm": 0.0}]
    rows += [{"iteration": i, "reward/mean": i / 20, "status/ungraded": 0.1} for i in range(1, 17)]
    rows[8] |= {"drift/alarm": 1.0}
    write_lines(tmp_path / "metrics.jsonl", rows)
    for iteration, rewards in REWARDS.items():
        folder = write_held_out(tmp_path, iteration, [held_out(*one) for one in enumerate(rewards)])
        Image.new("RGB", (64, 48), "blue").save(folder / "source.png")
        Image.new("RGB", (1600, 1200), "red").save(folder / "image.png")
    return tmp_path


def evidence_of(run_dir: Path, done: int = 8, with_pictures: bool = True) -> Evidence:
    target = run_dir / "out"
    target.mkdir()
    evidence = gather(run_dir, done, target, with_pictures)
    assert evidence is not None
    return evidence


def test_evidence_is_of_the_exported_iteration_and_not_of_later_ones(run_dir: Path) -> None:
    evidence = evidence_of(run_dir)
    assert evidence.iterations == (0, 8)
    overall, of_a, of_b = evidence.learnt
    assert [len(one.rewards) for one in (overall, of_a, of_b)] == [3, 1, 2]
    assert overall.before == pytest.approx(0.2) and overall.after == pytest.approx(1.6 / 3)
    assert evidence.num_left_out == 1 and evidence.ungraded_share == pytest.approx(0.1)
    assert evidence.drift_alarms == [8]
    [bare] = evidence.arms
    assert len(bare.rewards) == 4 and bare.before == 0.25 and bare.after == pytest.approx(0.6)
    assert [sample.instruction for sample in evidence.samples] == [f"ask {i}" for i in range(4)]
    assert evidence.samples[2].rewards == (None, 0.8)
    assert gather(run_dir, 7, run_dir / "none", True) is None, "only one evaluation by then"


def test_pictures_are_resized_and_written_beside_the_card(run_dir: Path) -> None:
    evidence = evidence_of(run_dir)
    files = [file for sample in evidence.samples for file in sample.files]
    written = {f"pictures/{path.name}" for path in (run_dir / "out" / "pictures").iterdir()}
    assert written == {*files} and len(files) == 12
    with Image.open(run_dir / "out" / "pictures" / "01_after.png") as image:
        assert image.size == (512, 384)
    (run_dir / "out").rename(run_dir / "with")
    without = evidence_of(run_dir, with_pictures=False)
    assert not any(sample.files for sample in without.samples)
    assert not list((run_dir / "out").iterdir())


def test_a_sample_shows_all_its_sources_or_the_users_words(run_dir: Path) -> None:
    others = (["image.png", "source.png"], "no")
    for iteration in (0, 8):
        rows = [held_out(i, 0.5, other_source_files=files) for i, files in enumerate(others)]
        rows.append(held_out(2, 0.5, source_file=None, bare_file="source.png"))
        write_held_out(run_dir, iteration, rows)
    three, one, none = evidence_of(run_dir).samples
    assert none.files[0] == "pictures/03_own_words.png"
    names = ("source", "source2", "source3", "before", "after")
    assert three.files == tuple(f"pictures/01_{name}.png" for name in names)
    assert one.files == tuple(f"pictures/02_{name}.png" for name in ("source", *names[-2:]))
    with Image.open(run_dir / "out" / three.files[1]) as image:
        assert image.getpixel((0, 0)) == (255, 0, 0)


def test_only_pictures_of_the_held_out_folder_are_copied(run_dir: Path) -> None:
    folder = run_dir / "evaluation" / "it_000008"
    Image.new("RGB", (8, 8)).save(run_dir / "private.png")
    os.symlink(run_dir / "private.png", folder / "link.png")
    (folder / "words.png").write_text("no picture")
    names = ("../../private.png", "link.png", "words.png", str(run_dir / "private.png"), 7)
    write_held_out(run_dir, 8, [held_out(i, 0.5, image_file=n) for i, n in enumerate(names)])
    write_held_out(run_dir, 0, [held_out(i, 0.5) for i in range(5)])
    evidence = evidence_of(run_dir)
    assert len(evidence.samples) == 5 and not any(sample.files for sample in evidence.samples)


def test_invalid_values_count_as_absent(run_dir: Path) -> None:
    invalid: list[Any] = [
        {"id": "s0"}, [1], "x", held_out(1, "high"), held_out(2, 0.5, category=[1]),
        held_out(3, 0.5, instruction=None), held_out(4, 0.5, bare_reward={}), held_out(5, 0.5),
    ]  # fmt: skip
    for iteration in (0, 8):
        write_held_out(run_dir, iteration, invalid)
    lines = [{"iteration": "x"}, {"iteration": 1, "reward/mean": []}]
    write_lines(run_dir / "metrics.jsonl", lines)
    evidence = evidence_of(run_dir)
    assert (len(evidence.samples), len(evidence.learnt[0].rewards)) == (6, 4)
    assert [len(arm.rewards) for arm in evidence.arms] == [3]
    assert evidence.samples[1].rewards == (None, None)
    assert evidence.drift_alarms is None and evidence.ungraded_share is None
