"""`rl runs`: what it says of a folder of runs; pruning takes what it showed and no more."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from rich.cells import cell_len
from rich.filesize import decimal
from tiny_messages import names
from tiny_run import episode, run_config

from rl.checkpoints.checkpoint import Checkpoints, ResumePoint
from rl.commands.runs import main
from rl.config.schema import CheckpointConfig
from rl.files.atomic import json_line
from rl.ranks.dist import Dist
from rl.ranks.seeding import rng_state
from rl.record.prune import plan, remove
from rl.record.run_lock import LOCKS
from rl.record.run_record import RunRecord
from rl.record.run_summary import look

ROOT = Path(__file__).resolve().parents[2]


def make_run(
    folder: Path,
    steps: tuple[int, ...] = (1, 2),
    rewards: tuple[float | None, ...] = (0.25, 0.75, 0.5),
    age_h: float = 0.0,
) -> Path:
    """A run of three iterations, as a run writes it."""
    config = run_config(
        run_name=folder.name,
        base_exp_dir=str(folder.parent),
        num_iterations=3,
        renderer={"type": "sd3", "model_path": "x"},
    )
    record = RunRecord(folder, config, Dist())
    record.claim()
    record.write_config()
    checkpoints = Checkpoints(folder, CheckpointConfig(keep_every_n_iterations=1), Dist())
    for iteration, reward in enumerate(rewards, start=1):
        record.write_episodes(iteration, [[episode(), episode()]], [[0.5, -0.5]])
        record.write_metrics(iteration, {"eval/reward": reward})
        if iteration in steps:
            save(checkpoints, iteration)
    record.release()
    at_s = time.time() - age_h * 3600
    for path in folder.rglob("*"):
        os.utime(path, (at_s, at_s))
    return folder


def save(checkpoints: Checkpoints, iteration: int) -> None:
    def write_model(model: Path) -> None:
        (model / "adapter_model.bin").write_text("x" * 5000)

    tensors = {"master/w": torch.full((8,), float(iteration))}
    point = ResumePoint(iteration, tensors, {"learner": {}}, [rng_state()], write_model, "# card")
    assert checkpoints.save(point) is not None


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every path below a folder -> its content, its target where it is a link."""
    return {
        str(path.relative_to(folder)): os.readlink(path).encode()
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in sorted(folder.rglob("*"))
    }


def gone(before: dict[str, bytes | None], folder: Path) -> set[str]:
    after = tree(folder)
    assert all(before[name] == after[name] for name in after if name in before), "was changed"
    return {name for name in before if name not in after}


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Given back after a command has guarded them."""
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    yield


def test_each_run_has_how_far_how_good_how_large_and_the_last_written_is_first(
    tmp_path: Path, capsys, monkeypatch
) -> None:
    make_run(tmp_path / "older", age_h=50)
    make_run(tmp_path / "newer", steps=(1,), age_h=2)
    assert main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.split("\n")
    head, newer, sizes, older = (" ".join(line.split()) for line in lines[:4])
    assert head == "run done held-out best checkpoint written"
    assert newer.startswith("newer 3/3 0.500 0.750 1 20")
    assert older.startswith("older 3/3 0.500 0.750 2 20")
    assert re.fullmatch(r"sd3; .+ kB: checkpoints .+, pictures .+, rest .+", sizes)
    assert lines[5].startswith("2 runs in ")
    monkeypatch.setenv("APP__BASE_EXP_DIR", str(tmp_path / "none"))
    assert main([]) == 1
    assert "APP__BASE_EXP_DIR" in capsys.readouterr().err
    run = tmp_path / "older"
    main([str(run)])
    assert "1 run in " in capsys.readouterr().out
    (run / "elsewhere").symlink_to("/usr")
    files = [path for path in run.rglob("*") if path.is_file() and not path.is_symlink()]
    assert look(run).num_bytes == sum(path.stat().st_size for path in files)


def test_a_run_under_way_is_told_and_so_is_one_that_only_saves(tmp_path: Path, capsys) -> None:
    for name, lock in (("loops", ".lock"), ("saves", ".saving.lock"), ("idle", "other.lock")):
        held = FileLock(make_run(tmp_path / name) / lock)
        held.acquire()
        assert look(tmp_path / name).use == ("idle" if name == "idle" else "running")
        main([str(tmp_path)])
        assert ("RUNNING; sd3" in capsys.readouterr().out) == (name != "idle")
        held.release()
        assert look(tmp_path / name).use == "idle"


def test_what_is_damaged_newer_or_no_run_is_named_and_left_alone(tmp_path: Path, capsys) -> None:
    broken = {name: make_run(tmp_path / name) for name in ("config", "future", "lines", "steps")}
    (broken["config"] / "config.json").write_text('{"run_name": ')
    config = json.loads((broken["future"] / "config.json").read_text())
    (broken["future"] / "config.json").write_text(json.dumps(config | {"format": 99}))
    with (broken["lines"] / "metrics.jsonl").open("ab") as file:
        file.write(b'{"iteration": "x"}\n{"iteration": 4, "eval/reward": "high"}\n\xff\n{"iter')
    (broken["steps"] / "checkpoints/step_000002/state.json").write_text("{}")
    (tmp_path / "photos").mkdir()
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/.lock").touch()
    (tmp_path / "a file").touch()
    before = tree(tmp_path)
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert main(["prune", str(tmp_path), "--yes"]) == 0
    for parts in (
        "config: ... config.json ... damaged",
        "format 99",
        "photos: ... no run",
        "begun: ... no config.json",
    ):
        assert names(" ".join(out.split()), parts)
    assert "checkpoint 2 is damaged" in " ".join(out.split()) and "a file" not in out
    assert "\nlines                    4/3            0.500" in out
    lost = {name.split("/")[0] for name in gone(before, tmp_path)}
    assert lost == {"lines"}


def test_foreign_names_are_text_and_every_line_fits(tmp_path: Path, capsys) -> None:
    make_run(tmp_path / "n").rename(tmp_path / ("\x1b[31m\u202e" + "n" * 190))
    run = make_run(tmp_path / "system")
    config = json.loads((run / "config.json").read_text())
    config["renderer"]["type"] = "mine.\x1b[2J" + "w" * 300
    (run / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil\nname\x07").mkdir()
    main([str(tmp_path)])
    main(["prune", str(tmp_path), "--yes"])
    lines = capsys.readouterr().out.split("\n")
    assert all(line.isprintable() for line in lines)
    assert max(map(cell_len, lines)) <= 80, max(lines, key=cell_len)


def test_nothing_goes_without_a_yes(tmp_path: Path, capsys, monkeypatch) -> None:
    make_run(tmp_path / "a", steps=(1, 2, 3))
    before = tree(tmp_path)
    for text in ("", "n\n", "\n", "yess\n"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        assert main(["prune", str(tmp_path)]) == 1
        assert "nothing was deleted" in capsys.readouterr().out
    assert not gone(before, tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert main(["prune", str(tmp_path)]) == 0
    assert gone(before, tmp_path)


def test_what_goes_is_what_was_shown_and_frees_as_much(tmp_path: Path, capsys) -> None:
    run = make_run(tmp_path / "a", steps=(1, 2, 3))
    aside = run / "checkpoints/.tmp-pruned-step_000001"
    aside.mkdir()
    (aside / "state.json").write_text("x" * 1000)
    before, size = tree(run), look(run).num_bytes
    assert main(["prune", str(tmp_path), "--yes"]) == 0
    out = capsys.readouterr().out
    lost = gone(before, run)
    assert {name.split("/")[0] for name in lost} == {"checkpoints"}
    assert {name.split("/")[1] for name in lost} == {"step_000001", aside.name}
    freed = size - look(run).num_bytes
    assert f"frees {decimal(freed)}\n" in out and f"freed {decimal(freed)} in" in out
    assert "a: .tmp-pruned-step_000001, step_000001 (" in out
    latest = Checkpoints(run, CheckpointConfig(), Dist()).latest()
    assert latest is not None and latest.name == "step_000003"


def test_the_newest_whole_checkpoint_stays_however_the_newer_ones_look(tmp_path: Path) -> None:
    """Damage that only a sha256 shows is damage."""
    run = make_run(tmp_path / "a", steps=(1, 2, 3), rewards=(None, None, None))
    weights = run / "checkpoints/step_000003/state.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    before = tree(run)
    planned = plan(look(run))
    assert [path.name for path in planned.going] == ["step_000001"]
    assert [line[:12] for line in planned.left] == ["step_000002:", "step_000003:"]
    assert "newest" in planned.left[0] and "damaged" in planned.left[1]
    assert remove(planned, print) > 0
    assert {name.split("/")[1] for name in gone(before, run)} == {"step_000001"}
    for step in (2, 3):
        (run / f"checkpoints/step_{step:06d}/state.json").write_text("")
    planned = plan(look(run))
    assert not planned.going and {line[12:] for line in planned.left} == {" no checkpoint is whole"}


def test_the_best_checkpoint_stays_and_so_does_what_may_be_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=(1, 2, 3), rewards=(0.9, 0.1, 0.2))
    before = tree(run)
    torn = json_line({"iteration": 2, "eval/reward": 0.1}) + '{"iteration": 1, "eval\n'
    torn += json_line({"iteration": 3, "eval/reward": 0.2})
    for metrics in ("", torn):
        kept = (run / "metrics.jsonl").read_text()
        (run / "metrics.jsonl").write_text(metrics)
        planned = plan(look(run))
        assert [path.name for path in planned.going] == ["step_000002"] * bool(metrics)
        assert "step_000001: metrics.jsonl" in planned.left[0]
        (run / "metrics.jsonl").write_text(kept)
    assert main(["prune", str(run), "--yes"]) == 0
    assert {name.split("/")[1] for name in gone(before, run)} == {"step_000002"}
    assert "best" in plan(look(make_run(tmp_path / "b", (1, 2, 3), (0.9, 0.1, 0.2)))).left[0]


def test_a_run_that_is_used_is_left_alone_also_when_it_begins_after_the_question(
    tmp_path: Path, capsys
) -> None:
    run = make_run(tmp_path / "a", steps=(1, 3))
    before = tree(run)
    planned = plan(look(run))
    assert planned.going
    with FileLock(run / ".lock"):
        said: list[str] = []
        assert remove(planned, said.append) == 0
        assert len(said) == 1 and said[0].startswith("a: running")
        assert main(["prune", str(tmp_path), "--yes"]) == 0
        assert "left alone: running" in capsys.readouterr().out
    assert not gone(before, run)
    # What a run wrote since the question stays.
    save(Checkpoints(run, CheckpointConfig(keep_every_n_iterations=1), Dist()), 2)
    assert remove(planned, print) > 0
    assert not (run / "checkpoints/step_000001").exists()
    assert (run / "checkpoints/step_000002").is_dir()


def test_what_the_run_did_not_write_stays_and_links_are_not_followed(tmp_path, capsys) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "state.json").write_text("precious")
    folder = tmp_path / "runs"
    run = make_run(folder / "a", steps=(1, 2, 3), rewards=(None, None, None))
    mine = [
        run / "checkpoints/step_000001/model/merged/my.safetensors",
        run / "checkpoints/step_12/state.json",
        run / "checkpoints/.tmp-mine/state.json",
        run / "models/step_000001/adapter.bin",
    ]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    (run / "checkpoints/.tmp-step_000009").symlink_to(outside)
    linked = run / "checkpoints/step_000002/model/adapter_model.bin"
    linked.rename(outside / "adapter_model.bin")
    linked.symlink_to(outside / "adapter_model.bin")  # of the same size
    (folder / "link").symlink_to(make_run(tmp_path / "elsewhere", (1, 2, 3)))
    (make_run(folder / "b", (1, 2, 3)) / "checkpoints").rename(tmp_path / "steps of b")
    (folder / "b/checkpoints").symlink_to(tmp_path / "steps of b")
    before = tree(tmp_path)
    assert main(["prune", str(folder), "--yes"]) == 0
    assert not gone(before, tmp_path)
    out = " ".join(capsys.readouterr().out.split())
    assert names(out, "a: nothing goes ... merged/my.safetensors ... adapter_model.bin")
    assert names(out, "b: nothing goes ... checkpoints is a link ... link: ... is a link")


def test_what_cannot_be_deleted_is_said_before_or_after(tmp_path, capsys, monkeypatch) -> None:
    run = make_run(tmp_path / "a", steps=(1, 2, 3))
    with monkeypatch.context() as of_another:  # root may delete anything, and tests may be root's
        of_another.setattr("os.access", lambda path, _: "checkpoints" not in str(path))
        assert main(["prune", str(tmp_path), "--yes"]) == 0
    assert names(capsys.readouterr().out, "left alone: ... may not delete ... nothing to delete")

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("rl.checkpoints.checkpoint.shutil.rmtree", refuse)
    assert main(["prune", str(tmp_path), "--yes"]) == 1
    assert names(capsys.readouterr().err, "step_000001 ... Permission denied")
    assert (run / "checkpoints/step_000002").is_dir()


def test_it_needs_nothing_but_what_a_check_needs(tmp_path: Path) -> None:
    make_run(tmp_path / "a", steps=(1, 2, 3))
    blocked = ("torch", "filelock", "transformers", "safetensors", "huggingface_hub", "wandb")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))\n"
        "from rl.commands.runs import main\n"
        "sys.exit(main(sys.argv[1:]) or main(['prune', *sys.argv[1:], '--yes']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "1 run in " in done.stdout and "\nfreed " in done.stdout


def test_a_report_or_a_lock_is_not_the_last_that_was_written(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", age_h=50)
    before_s = look(run_dir).written_s
    (run_dir / "report/data").mkdir(parents=True)
    for name in ("report/data/it_000001.js", *LOCKS):
        (run_dir / name).touch()
    assert look(run_dir).written_s == before_s
