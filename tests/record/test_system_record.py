"""The run folder: traceable episodes, exact rewinds, no keys, and one owner at a time."""

from __future__ import annotations

import json
import math
import shutil
import time
from pathlib import Path

import pytest
from PIL import Image
from tiny_checkpoints import checkpoints_in, save
from tiny_disk import contents
from tiny_loop import episodes_of, rows_of
from tiny_messages import holds
from tiny_ranks import spawn
from tiny_run import episode, record_in
from tiny_waits import wait_for

from rl.api.types import Action, Completion, Region, Status
from rl.config.schema import TrackingConfig
from rl.files import json_line, read_rows, write_atomically
from rl.judge.http import ReplyJournal
from rl.ranks.dist import Dist
from rl.record.run_record import MAX_WAITING, RunRecord, provenance
from rl.run.follower import Follower

KEY = "sk-0123456789abcdef"


def test_the_line_of_an_episode_has_all_its_values(record, tmp_path):
    failed = episode(
        completion=Completion((5, 6), (-0.25, -1.0 / 3.0), "length", forced=(True, False)),
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
    scored, broken, lost = rows_of(tmp_path / "episodes" / "it_000012.rank0.jsonl")
    named = provenance(episode(regions={"judge": (Region("hat", (0.1, 0.0, 0.5, 1.0)),)}), 1.0)
    assert json.loads(json_line(named["regions"])) == {
        "judge": [{"label": "hat", "box": [0.1, 0.0, 0.5, 1.0]}]
    }
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
        "source_thumbnails": ["thumbnails/it_000012/rank0_g00.webp#xywh=0,0,48,32"],
        "target_thumbnail": "thumbnails/it_000012/rank0_g00.webp#xywh=48,0,48,32",
        "thumbnail": "thumbnails/it_000012/rank0_g00.webp#xywh=96,0,48,32",
    }
    assert "bare" not in broken
    keys = ("status", "failure", "forced", "image_file", "member")
    assert [broken[key] for key in keys] == ["policy_failed", "no JSON", [1, 0], None, 1]
    assert (lost["reward"], lost["advantage"], lost["status"]) == (None, None, "ungraded")
    for kind, colour in (
        ("image", (255, 0, 0)),
        ("source", (0, 0, 255)),
        ("target", (255, 255, 0)),
    ):
        assert Image.open(tmp_path / scored[f"{kind}_file"]).getpixel((0, 0)) == colour


def test_episodes_are_written_every_n_iterations(tmp_path):
    record = record_in(tmp_path, tracking={"log_episodes_every_n_iterations": 3})
    for iteration in range(1, 5):
        record.write_episodes(iteration, [[episode()]], [[0.0]])
    assert [path.name for path in (tmp_path / "episodes").iterdir()] == ["it_000003.rank0.jsonl"]
    assert [path.name for path in (tmp_path / "images").iterdir()] == ["it_000003"]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_limit_of_pictures_is_for_all_ranks_together(tmp_path, world_size):
    groups = [[episode(group_id=f"{p}/{g}") for g in range(2)] for p in range(4)]
    each = 4 // world_size
    for rank in range(world_size):
        dist = Dist(rank=rank, world_size=world_size)
        record = record_in(tmp_path, dist, tracking={"images_per_iteration": 5})
        mine = groups[rank * each : (rank + 1) * each]
        record.write_episodes(1, mine, [[0.0, 0.0]] * each)
    rows = episodes_of(tmp_path)
    pictured = [row["group_id"] for row in rows if row["image_file"]]
    assert pictured == ["0/0", "0/1", "1/0", "1/1", "2/0"], "the run's first, group by group"
    assert [row["source_file"] is not None for row in rows] == [True] * 6 + [False] * 2
    assert len(list((tmp_path / "images").rglob("*_m?.png"))) == 5
    assert len(list((tmp_path / "images").rglob("*_source.png"))) == 3


def test_only_pictures_of_old_iterations_are_deleted(tmp_path):
    """Pictures of removed ranks are deleted, too; files with other names are kept."""
    ranks = [
        record_in(tmp_path, Dist(rank, 2), tracking={"keep_images_of_last_n_iterations": 2})
        for rank in range(2)
    ]
    removed_rank = record_in(tmp_path, Dist(2, 3), tracking={"images_per_iteration": 99})
    removed_rank.write_episodes(1, [[episode()]], [[0.0]])
    others = ("images/it_000001/mine.png", "images/it_000001_best/rank0_g00_m0.png", "images/x")
    for name in others:
        write_atomically(tmp_path / name, name)
    last = MAX_WAITING + 4
    for iteration in range(1, last + 1):
        for record in ranks:
            record.write_episodes(iteration, [[episode()]], [[0.0]])
    folders = sorted(path for path in (tmp_path / "images").iterdir() if path.is_dir())
    pictures = {path.name: sorted(p.name for p in path.iterdir()) for path in folders}
    assert pictures["it_000001"] == ["mine.png"]
    assert pictures["it_000001_best"] == ["rank0_g00_m0.png"]
    assert "it_000002" not in pictures, "its folder is empty and old"
    assert not any(pictures[f"it_{n:06d}"] for n in range(5, last - 1))
    assert all(len(pictures[f"it_{n:06d}"]) == 6 for n in (last - 1, last))
    small = {path.parent.name for path in (tmp_path / "thumbnails").rglob("*.webp")}
    assert small == {f"it_{n:06d}" for n in (last - 1, last)}
    assert all((tmp_path / name).read_text() == name for name in others)
    assert len(list((tmp_path / "episodes").iterdir())) == 2 * last + 1
    keeps_all = record_in(tmp_path / "every")
    for iteration in range(1, 13):
        keeps_all.write_episodes(iteration, [[episode()]], [[0.0]])
    assert len(list((tmp_path / "every/images").glob("*/*_m0.png"))) == 12, "all by default"


def test_metrics_are_strict_json_and_only_rank_0_writes(tmp_path):
    record_in(tmp_path).write_metrics(1, {"a": 0.1, "nan": math.nan, "inf": -math.inf})
    record_in(tmp_path, Dist(rank=1, world_size=2)).write_metrics(1, {"a": 9.0})
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"iteration": 1, "a": 0.1, "nan": null, "inf": null}\n'
    )


ODD = "".join(map(chr, (0x0B, 0x0C, 0x0D, 0x1C, 0x1D, 0x1E, 0x85, 0x2028, 0x2029)))
"""Characters at which Python's `splitlines` splits, but JSON lines do not."""


def write_some(folder: Path, num: int = 6) -> RunRecord:
    """A record of iterations 0 .. `num` - 1, whose lines hold characters of `ODD` unescaped."""
    record = record_in(folder)
    record.write_config()
    rows = [{"iteration": n, "a": n / 7, "said": f"{ODD} {n}"} for n in range(num)]
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    (folder / "metrics.jsonl").write_bytes("".join(lines).encode())
    for iteration in range(num):
        record.write_episodes(iteration, [[episode()]], [[0.0]])
    for iteration in range(0, num, 2):
        write_atomically(folder / f"evaluation/it_{iteration:06d}/records.jsonl", "{}\n")
    return record


@pytest.mark.parametrize("iteration", [-1, 0, 3, 5])
def test_a_resume_sets_aside_the_iterations_that_it_repeats(tmp_path, iteration):
    run_dir, expected = tmp_path / "run", tmp_path / "expected"
    record = write_some(run_dir)
    before = contents(run_dir)
    messages = record.rewind(iteration)
    if not messages:
        assert (iteration, contents(run_dir)) == (5, before), "there is no later iteration"
        return
    write_some(expected, iteration + 1)
    (aside,) = (run_dir / "set_aside").iterdir()
    set_aside = contents(aside)
    kept = {name: data for name, data in contents(run_dir).items() if "set_aside" not in name}
    assert kept == contents(expected)
    # Every byte is either kept or set aside.
    assert kept.pop("metrics.jsonl") + set_aside.pop("metrics.jsonl") == before.pop("metrics.jsonl")
    assert set_aside.pop("config.json") == before["config.json"]
    assert kept | set_aside == before and not kept.keys() & set_aside.keys()
    begin = "base weights" if iteration < 0 else f"after iteration {iteration} "
    [line] = messages
    assert holds(line, f"{begin} ... {aside}")


DAMAGE = {
    "torn": b'{"iteration": 2, "a": 0.1',
    "no UTF-8": b'{"iteration": 2, "a": "\xff"}',
    "zeros": b"\0" * 40,
    "a string": b'{"iteration": "2"}',
    "a truth": b'{"iteration": true}',
    "too deep": b"[" * 100_000,
    "too long a number": b'{"iteration": ' + b"9" * 5000,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_line_of_the_metrics_loses_no_other_line(tmp_path, damage):
    for index in (0, 5):
        folder = tmp_path / str(index)
        record = write_some(folder)
        path = folder / "metrics.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1]
        path.write_bytes(b"\n".join([*lines[:index], damage, *lines[index:]]))  # no final line feed
        [line] = record.rewind(3)
        assert path.read_bytes() == b"".join(line + b"\n" for line in lines[:4])
        (aside,) = (folder / "set_aside").iterdir()
        assert holds(line, f"lines [{index + 1}] of metrics.jsonl are damaged ... {aside}")
        assert damage in (aside / "metrics.jsonl").read_bytes().split(b"\n")
        assert record.rewind(3) == [], "a second rewind does nothing"


def test_missing_records_are_reported(tmp_path):
    record = write_some(tmp_path, 20)
    path = tmp_path / "metrics.jsonl"
    assert record.rewind(19) == []
    lines = path.read_bytes().split(b"\n")[:-1]
    path.write_bytes(b"\n".join([lines[0], *lines[2:5], *lines[6:19]]))
    assert record.rewind(19) == [f"{path} has no line of iterations [1, 5]"]
    path.unlink()
    [message] = record.rewind(19)
    assert message.startswith(f"{path} has no line of iterations [0, 1, 2") and len(message) < 400
    (tmp_path / "episodes/it_000019.rank0.jsonl").unlink()
    of_episodes = f"{tmp_path / 'episodes'} has none of iteration 19"
    for every, messages in ((1, [message, of_episodes]), (2, [message]), (0, [message])):
        record = record_in(tmp_path, tracking={"log_episodes_every_n_iterations": every})
        assert record.rewind(19) == messages


def test_a_line_written_after_an_incomplete_line_is_complete(record, tmp_path):
    """A full disk may cut a line short while the run continues."""
    record.write_metrics(1, {"a": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 2, "a')
    record.write_metrics(3, {"a": 3.0})
    rows, damaged = read_rows(tmp_path / "metrics.jsonl")
    assert ([row["iteration"] for row in rows], damaged) == ([1, 3], [2])


def test_a_json_line_is_one_line_for_every_reader(record, tmp_path):
    value = {"said": ODD + "\n\ud83d half", "iteration": 1}
    line = json_line(value)
    assert json.loads(line) == value
    assert len(line.splitlines()) == 1 and line.encode()
    # Half a surrogate pair, from a completion cut within a character or from a judge's JSON.
    odd = episode(action=Action("half \ud83d", None), replies={"judge": (ODD + "\udcff",)})
    record.write_episodes(1, [[odd]], [[1.0]])
    (row,) = rows_of(tmp_path / "episodes" / "it_000001.rank0.jsonl")
    assert (row["completion"], row["replies"]) == ("half \ud83d", {"judge": [ODD + "\udcff"]})


def test_a_rewind_moves_no_other_files(tmp_path):
    record = write_some(tmp_path)
    others = (
        "episodes/it_000004.notes.txt", "episodes/it_000004.rank0.jsonl.bak", "episodes/mine",
        "images/it_000004_best/a.png", "images/it_4", "images/xit_000004", "notes.md",
        "evaluation/it_000004b/x", "judge/iteration_000005.rank0.jsonl", "judge/a_b.rank0.jsonl",
    )  # fmt: skip
    for name in others:
        write_atomically(tmp_path / name, name)
    record.rewind(-1)
    assert {name: (tmp_path / name).read_text() for name in others} == {n: n for n in others}


def test_keys_in_the_environment_are_in_no_file(tmp_path, monkeypatch):
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
    assert len(written) == 6
    assert not any(KEY.encode() in data or b"hunter2" in data for data in written)
    assert record.config["rewards"]["judge"]["header"] == "<HOSTED_JUDGE_KEY>"
    assert record.config["judge"]["api_key_env"] == "ODDLY_NAMED"
    assert "<ODDLY_NAMED>" in (tmp_path / "episodes" / "it_000001.rank0.jsonl").read_text()


def hold(folder: Path) -> None:
    record = record_in(folder)
    record.claim()
    (folder / "held").touch()
    time.sleep(60)
    record.release()


def test_a_run_stops_if_its_folder_is_moved_away(tmp_path):
    record, checkpoints = record_in(tmp_path / "run"), checkpoints_in(tmp_path / "run")
    record.claim()
    save(checkpoints, 1)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    for again in range(2):
        with pytest.raises(FileNotFoundError, match=f"{tmp_path / 'run'} is gone"):
            record.write_metrics(2 + again, {"loss": 0.4})
        with pytest.raises(FileNotFoundError, match="is gone"):
            record.write_episodes(2, [[episode()]], [[1.0]])
        assert save(checkpoints, 2) is None
        assert list(tmp_path.glob("run/*")) == [], "nothing is created at the old path"
        (tmp_path / "run").mkdir(exist_ok=True)  # another folder at the path is not the run's
    (tmp_path / "run").rmdir()
    (tmp_path / "elsewhere").rename(tmp_path / "run")
    record.write_metrics(2, {"loss": 0.4})
    assert [row["iteration"] for row in rows_of(tmp_path / "run" / "metrics.jsonl")] == [1, 2]
    assert checkpoints.latest().name == "step_000001", "what was saved remains"


def test_a_deleted_run_folder_is_not_created_again(tmp_path):
    run_dir = tmp_path / "run"
    record, checkpoints = record_in(run_dir), checkpoints_in(run_dir)
    record.claim()
    shutil.rmtree(run_dir)
    for write in (
        lambda: record.write_metrics(1, {"loss": 0.4}),
        lambda: ReplyJournal(run_dir / "judge" / "iteration_000001.jsonl"),
        lambda: write_atomically(run_dir / "evaluation" / "records.jsonl", ""),
    ):
        with pytest.raises(FileNotFoundError, match="is gone: it was moved or deleted"):
            write()
    assert save(checkpoints, 1) is None
    Follower(run_dir, TrackingConfig()).start()
    assert not run_dir.exists()


@pytest.mark.slow
def test_one_run_folder_belongs_to_one_run(record, tmp_path):
    owner = spawn(hold, tmp_path)
    wait_for((tmp_path / "held").exists)
    with pytest.raises(ValueError, match=f"in use by process {owner.pid}.*another run_name"):
        record.claim(wait_s=0.3)
    owner.kill()  # a killed run leaves no lock
    owner.join()
    record.claim(wait_s=0)
    record.release()


def test_the_bare_arm_is_in_the_first_line_of_its_group(tmp_path):
    bare = episode(reward=0.25, action=Action("make it red", "make it red"))
    record = record_in(tmp_path, tracking={"images_per_iteration": 2})
    record.write_episodes(3, [[episode(), episode()]] * 2, [[1.0, -1.0]] * 2, [bare, bare])
    lines = rows_of(tmp_path / "episodes" / "it_000003.rank0.jsonl")
    assert ["bare" in line for line in lines] == [True, False, True, False]
    line, without_picture = lines[0]["bare"], lines[2]["bare"]
    assert (line["completion"], line["reward"], line["advantage"]) == ("make it red", 0.25, None)
    assert line["image_file"] == "images/it_000003/rank0_g00_bare.png"
    assert (tmp_path / line["image_file"]).is_file()
    assert without_picture["image_file"] is None, "no picture of its group was kept"
