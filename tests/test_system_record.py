"""What a run leaves on disk: traceable, rewound exactly, free of keys, owned by one run."""

from __future__ import annotations

import json
import math
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from PIL import Image
from tiny_ranks import spawn
from tiny_run import episode, run_config

from rl.system.dist import Dist
from rl.system.files import write_atomically
from rl.system.record import RunRecord
from rl.system.scrub import scrub, scrubbed
from rl.types import Action, Completion, Status

KEY = "sk-0123456789abcdef"


def record_in(folder: Path, dist: Dist | None = None, **config) -> RunRecord:
    return RunRecord(folder, run_config(**config), dist or Dist())


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_an_episode_can_be_traced_from_its_line(tmp_path):
    record = record_in(tmp_path)
    forced = Completion((5, 6), (-0.25, -1.0 / 3.0), "length", forced=(True, False))
    failed = episode(
        completion=forced,
        action=Action("", None, failure="no JSON"),
        image=None,
        status=Status.POLICY_FAILED,
        reward=0.0,
        failure="no JSON",
        parts={},
        replies={},
    )
    ungraded = episode(status=Status.UNGRADED, reward=None, failure="judge: timeout")
    record.write_episodes(12, [[episode(), failed], [ungraded]], [[1.0, -1.0], [None]])
    scored, broken, lost = lines_of(tmp_path / "episodes" / "it_000012.rank0.jsonl")
    assert scored == {
        "sample_id": "row-7",
        "group_id": "it12/row-7",
        "category": "colour",
        "instruction": "make it red",
        "completion": "a red circle",
        "finish": "stop",
        "status": "scored",
        "failure": None,
        "reward": 0.75,
        "advantage": 1.0,
        "parts": {"judge": 0.75, "judge/edit_success": 8.0},
        "judge_s": 0.5,
        "replies": {"judge": ['{"score": [8, 9]}']},
        "noise_seed": 99,
        "token_ids": [5, 6],
        "sampler_logprobs": [-0.25, -0.333333],
        "forced": None,
        "rank": 0,
        "member": 0,
        "source_file": "images/it_000012/rank0_g00_source.png",
        "target_file": "images/it_000012/rank0_g00_target.png",
        "image_file": "images/it_000012/rank0_g00_m0.png",
    }
    assert (broken["status"], broken["failure"], broken["forced"]) == (
        "policy_failed",
        "no JSON",
        [1, 0],
    )
    assert broken["image_file"] is None and broken["member"] == 1
    assert (lost["reward"], lost["advantage"], lost["status"]) == (None, None, "ungraded")
    rendered = Image.open(tmp_path / scored["image_file"])
    assert rendered.getpixel((0, 0)) == (255, 0, 0)
    assert Image.open(tmp_path / scored["source_file"]).getpixel((0, 0)) == (0, 0, 255)
    assert Image.open(tmp_path / scored["target_file"]).getpixel((0, 0)) == (255, 255, 0)


def test_pictures_and_records_keep_to_their_limits(tmp_path):
    tracking = {"log_episodes_every_n_iterations": 3, "images_per_iteration": 3}
    record = record_in(tmp_path, Dist(rank=1, world_size=2), tracking=tracking)
    groups = [[episode(), episode()], [episode(), episode()]]
    advantages = [[0.0, 0.0], [0.0, 0.0]]
    for iteration in range(1, 5):
        record.write_episodes(iteration, groups, advantages)
    assert [path.name for path in (tmp_path / "episodes").iterdir()] == ["it_000003.rank1.jsonl"]
    assert len(lines_of(tmp_path / "episodes" / "it_000003.rank1.jsonl")) == 4
    images = sorted(path.name for path in (tmp_path / "images" / "it_000003").iterdir())
    assert images == [
        "rank1_g00_m0.png",
        "rank1_g00_m1.png",
        "rank1_g00_source.png",
        "rank1_g00_target.png",
        "rank1_g01_m0.png",
        "rank1_g01_source.png",
        "rank1_g01_target.png",
    ]


def test_metrics_are_strict_json_and_only_rank_0_writes(tmp_path):
    record_in(tmp_path).write_metrics(1, {"a": 0.1, "nan": math.nan, "inf": -math.inf})
    record_in(tmp_path, Dist(rank=1, world_size=2)).write_metrics(1, {"a": 9.0})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"iteration": 1, "a": 0.1, "nan": null, "inf": null}\n'


def test_half_a_surrogate_pair_costs_no_record(tmp_path):
    """JSON rows, completions cut in the middle of a sign, and judges can all spell one."""
    odd = episode(
        action=Action("half \ud83d", None),
        replies={"vie": ("\udc00",)},
        status=Status.UNGRADED,
        reward=None,
        failure="\ud800",
    )
    record_in(tmp_path).write_episodes(1, [[odd]], [[None]])
    (row,) = lines_of(tmp_path / "episodes" / "it_000001.rank0.jsonl")
    assert row["completion"] == "half \ud83d" and row["failure"] == "\ud800"
    assert row["replies"] == {"vie": ["\udc00"]}


def test_a_resume_rewinds_to_its_checkpoint(tmp_path):
    record = record_in(tmp_path)
    for iteration in range(6):
        record.write_metrics(iteration, {"a": iteration / 7})
        record.write_episodes(iteration, [[episode()]], [[0.0]])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 2, "a": 0.1')  # what a kill in mid-write leaves
    before = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)

    record.rewind(3)
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(before[:4])
    kept = [f"it_00000{n}" for n in range(4)]
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == kept
    records = sorted(path.name for path in (tmp_path / "episodes").iterdir())
    assert records == [f"{name}.rank0.jsonl" for name in kept]

    record.write_metrics(4, {"a": 4 / 7})
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(before[:5])
    record.rewind(-1)
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert list((tmp_path / "images").iterdir()) == []


def test_a_replaced_file_is_old_or_new_never_half(tmp_path, monkeypatch):
    path = tmp_path / "file.txt"
    write_atomically(path, "old")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("killed here")))
    with pytest.raises(OSError, match="killed here"):
        write_atomically(path, "new" * 1000)
    assert path.read_text() == "old"


def test_keys_in_the_environment_reach_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HOSTED_JUDGE_KEY", KEY)
    monkeypatch.setenv("ODDLY_NAMED", "hunter2-hunter2")
    judge = {"api_key_env": "ODDLY_NAMED", "api_base": f"http://user:{KEY}@judge:4877"}
    record = record_in(tmp_path, judge=judge, rewards={"judge": {"type": "x", "header": KEY}})
    record.write_config()
    leaky = episode(
        status=Status.UNGRADED,
        reward=None,
        failure=f"refused: 401 invalid key {KEY}",
        replies={"judge": ("you sent hunter2-hunter2",)},
    )
    record.write_episodes(1, [[leaky]], [[None]])
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) == 5
    assert not any(KEY.encode() in data or b"hunter2" in data for data in written)
    assert record.config["rewards"]["judge"]["header"] == "<HOSTED_JUDGE_KEY>"
    assert record.config["judge"]["api_key_env"] == "ODDLY_NAMED"
    assert "<ODDLY_NAMED>" in (tmp_path / "episodes" / "it_000001.rank0.jsonl").read_text()


def test_scrubbing_spares_what_is_no_key(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghij")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "yes-please-in-parallel")
    monkeypatch.setenv("SHORT_KEY", "abc")
    text = "abc yes-please-in-parallel hf_abcdefghij"
    assert scrub(text) == "abc yes-please-in-parallel <HF_TOKEN>"
    assert scrubbed({"hf_abcdefghij": ["hf_abcdefghij", 1, None]}) == {
        "<HF_TOKEN>": ["<HF_TOKEN>", 1, None]
    }


def hold(folder: Path, answers: Connection) -> None:
    record = record_in(folder)
    record.claim()
    answers.send("held")
    time.sleep(60)
    record.release()


def test_one_run_folder_belongs_to_one_run(tmp_path):
    receiver, sender = multiprocessing.Pipe(duplex=False)
    owner = spawn(hold, tmp_path, sender)
    assert receiver.recv() == "held"
    record = record_in(tmp_path)
    with pytest.raises(ValueError, match=f"in use by process {owner.pid}.*another run_name"):
        record.claim(wait_s=0.3)
    owner.kill()  # a killed run leaves no lock behind
    owner.join()
    record.claim(wait_s=0)
    record.release()
