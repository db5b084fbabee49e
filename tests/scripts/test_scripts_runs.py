"""`rl runs` lists the runs of a folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from filelock import FileLock
from rich.cells import cell_len
from tiny_checkpoints import checkpoints_in, save
from tiny_config import REPO
from tiny_messages import holds
from tiny_report import held_out, write_episodes, write_held_out
from tiny_run import episode, run_config

from rl.ranks.dist import Dist
from rl.record.run_record import RunRecord
from rl.record.run_summary import summarise
from rl.tools.commands import export, report
from rl.tools.commands.runs import main


def make_run(
    folder: Path,
    steps: tuple[int, ...] = (1, 2),
    rewards: tuple[float | None, ...] = (0.25, 0.75, 0.5),
    age_h: float = 0.0,
) -> Path:
    """Writes the folder of a run of three iterations."""
    config = run_config(
        run_name=folder.name,
        base_exp_dir=str(folder.parent),
        num_iterations=3,
        renderer={"type": "sd3", "model_path": "x"},
    )
    record = RunRecord(folder, config, Dist())
    record.claim()
    record.write_config()
    checkpoints = checkpoints_in(folder, keep_every_n_iterations=1)
    for iteration, reward in enumerate(rewards, start=1):
        record.write_episodes(iteration, [[episode(), episode()]], [[0.5, -0.5]])
        record.write_metrics(iteration, {"eval/reward": reward})
        if iteration in steps:
            save(checkpoints, iteration, reward=reward)
    record.release()
    at_s = time.time() - age_h * 3600
    for path in folder.rglob("*"):
        os.utime(path, (at_s, at_s))
    return folder


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores stdout and stderr, which a command replaces."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))


def test_runs_are_listed_newest_first_with_progress_rewards_and_sizes(
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
    assert re.fullmatch(r"sd3; .+ kB", sizes)
    assert lines[5].startswith("2 runs in ")
    monkeypatch.setenv("APP__BASE_EXP_DIR", str(tmp_path / "none"))
    assert main([]) == 1
    assert "APP__BASE_EXP_DIR" in capsys.readouterr().err
    run = tmp_path / "older"
    main([str(run)])
    assert "1 run in " in capsys.readouterr().out
    (run / "elsewhere").symlink_to("/usr")
    files = [path for path in run.rglob("*") if path.is_file() and not path.is_symlink()]
    assert summarise(run).num_bytes == sum(path.stat().st_size for path in files)


def test_a_run_that_trains_or_saves_is_listed_as_running(tmp_path: Path, capsys) -> None:
    for name, lock in (("loops", ".lock"), ("saves", ".saving.lock"), ("idle", "other.lock")):
        held = FileLock(make_run(tmp_path / name) / lock)
        held.acquire()
        assert summarise(tmp_path / name).is_running == (name != "idle")
        main([str(tmp_path)])
        assert ("RUNNING; sd3" in capsys.readouterr().out) == (name != "idle")
        held.release()
        assert not summarise(tmp_path / name).is_running


def test_damaged_runs_newer_formats_and_other_folders_are_named(tmp_path: Path, capsys) -> None:
    runs = {name: make_run(tmp_path / name) for name in ("config", "future", "lines", "steps")}
    (runs["config"] / "config.json").write_text('{"run_name": ')
    config = json.loads((runs["future"] / "config.json").read_text())
    (runs["future"] / "config.json").write_text(json.dumps(config | {"format": 99}))
    with (runs["lines"] / "metrics.jsonl").open("ab") as file:
        file.write(b'{"iteration": "x"}\n{"iteration": 4, "eval/reward": "high"}\n\xff\n{"iter')
    (runs["steps"] / "checkpoints/step_000002/state.json").write_text("{}")
    (tmp_path / "photos").mkdir()
    (tmp_path / "vlm").mkdir()
    (tmp_path / "vlm/config.json").write_text('{"model_type": "qwen2_5_vl"}')
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/.lock").touch()
    (tmp_path / "a file").touch()
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    parts = "config: ... config.json ... damaged ... format 99 ... photos: no run ... vlm: no run"
    assert holds(" ".join(out.split()), f"{parts} ... begun: ... no config.json")
    assert "a file" not in out
    assert [line.split()[-3] for line in out.split("\n") if line.startswith("steps ")] == ["1"]
    assert "\nlines                    4/3            0.500" in out


def test_names_are_printable_and_every_line_fits(tmp_path: Path, capsys) -> None:
    make_run(tmp_path / "n").rename(tmp_path / ("\x1b[31m\u202e" + "n" * 190))
    run = make_run(tmp_path / "system")
    config = json.loads((run / "config.json").read_text())
    config["renderer"]["type"] = "mine.\x1b[2J" + "w" * 300
    (run / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil\nname\x07").mkdir()
    main([str(tmp_path)])
    lines = capsys.readouterr().out.split("\n")
    assert all(line.isprintable() for line in lines)
    assert max(map(cell_len, lines)) <= 80, max(lines, key=cell_len)


@pytest.mark.slow
def test_listing_runs_needs_no_training_packages(tmp_path: Path) -> None:
    make_run(tmp_path / "a", steps=(1, 2, 3))
    blocked = ("torch", "filelock", "transformers", "safetensors", "huggingface_hub", "wandb")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))\n"
        "from rl.tools.commands.runs import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "1 run in " in done.stdout


def become_odd(path: Path, kind: str) -> None:
    """Put a pipe, a device or a sparse file of 40 GB in the place of a file."""
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 40 * 10**9)


@pytest.mark.parametrize("kind", ["pipe", "device", "sparse"])
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "metrics.jsonl",
        "episodes/it_000001.rank0.jsonl",
        "evaluation/it_000000/records.jsonl",
        "checkpoints/step_000002/manifest.json",
        "checkpoints/step_000002/state.json",
    ],
)
def test_what_is_no_file_is_neither_waited_for_nor_read(tmp_path, name, kind, capsys) -> None:
    run_dir = make_run(tmp_path / "a")
    write_episodes(run_dir, 1)
    write_held_out(run_dir, 0, [held_out(0, 0.5)])
    become_odd(run_dir / name, kind)
    outputs = []
    for command, rest in ((report.main, []), (export.main, [str(tmp_path / "out")]), (main, [])):
        command([str(run_dir), *rest])
        outputs.append("".join(capsys.readouterr()))
    reason = "is longer than" if kind == "sparse" else "is a device or a pipe, not a file"
    if name.endswith("manifest.json"):
        assert re.search(r" 0\.750 +1 20", outputs[2]), "the newest intact one is the first"
    else:
        assert any(holds(out, f"{Path(name).name} ... {reason}") for out in outputs), outputs
