"""wandb's own files, and its client against a stand-in for its server: nothing twice, no gap."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_wandb
from tiny_messages import holds
from tiny_report import metrics, write_episodes, write_lines, write_run
from tiny_wandb import KEY, Server, history, serving, values_of

from rl.files import read_rows
from rl.tools.commands.follow import page_id

pytestmark = pytest.mark.slow

KILLS = (
    "Wandb._open: before",
    "Wandb._open: after",
    "Wandb.write: before",
    "Wandb.write: after",
    "Wandb.close: before",
)
"""Where a follower is killed, at the second call of the function if there is one."""


def killing(place: str) -> str:
    """A program that follows a run and kills itself at the place."""
    method, moment = place.split(": ")
    return f"""
import os, signal, sys, time
from rl.tools.commands import follow
inner, calls = follow.{method}, []
def outer(*args, **kw):
    calls.append(1)
    dies = len(calls) == (2 if {method!r} == "Wandb.write" else 1)
    if dies and {moment!r} == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    result = inner(*args, **kw)
    if dies:
        time.sleep(0.5)  # wandb's own process works on
        os.kill(os.getpid(), signal.SIGKILL)
    return result
follow.{method} = outer
follow.main(sys.argv[1:])
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def follow(run_dir: Path, mode: str, program: str = "", **env: str) -> tuple[int, str]:
    """Exit code and stderr of `rl follow --wandb`, in an environment without wandb's variables."""
    inherited = {name: v for name, v in os.environ.items() if not name.startswith("WANDB_")}
    start = ["-c", program] if program else ["-m", "rl", "follow"]
    done = subprocess.run(
        [sys.executable, *start, str(run_dir), "--wandb", mode],
        env={**inherited, "NETRC": str(run_dir / "no_netrc"), **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stderr


def iterations_of(run_dir: Path) -> list[int]:
    return [row["iteration"] for row in history(run_dir)]


def online(server: Server) -> dict[str, str]:
    return {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY}


def add_iterations(run_dir: Path, num: int) -> None:
    """Iterations that follow on those of the run."""
    file = run_dir / "metrics.jsonl"
    rows = read_rows(file)[0]
    iterations = range(len(rows), len(rows) + num)
    for iteration in iterations:
        write_episodes(run_dir, iteration)
    write_lines(file, [*rows, *map(metrics, iterations)])


def test_an_offline_run_has_scalars_table_pictures_summary_and_config(run_dir: Path) -> None:
    assert follow(run_dir, "offline", WANDB_API_KEY=KEY) == (0, "")
    rows = history(run_dir)
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[4]["reward/mean"] == rows[4]["0_main/training_reward"] == 1.0
    assert rows[4]["0_main/before_after/count"] == 5 and rows[4]["episodes/nrows"] == 6
    records = tiny_wandb.records(run_dir)
    assert [r.exit.exit_code for r in records if r.HasField("exit")] == [0]
    configs = [values_of(r.config.update) for r in records]
    assert any(config.get("run_name") == "tiny" for config in configs)
    [table] = run_dir.glob("wandb/offline-run-*/files/media/table/episodes_4_*.json")
    assert table.read_text().count('"instruction 1 ') == 2
    staged = [p for p in (run_dir / "wandb/artifacts").rglob("*") if p.is_file()]
    assert any(path.read_bytes().startswith(b"\x89PNG") for path in staged), "for `wandb sync`"
    assert (run_dir / "wandb").stat().st_mode & 0o777 == 0o700, "it holds completions"
    for path in run_dir.rglob("*"):
        assert not (path.is_file() and KEY.encode() in path.read_bytes()), path


def test_each_offline_start_writes_what_the_earlier_ones_lack_and_sync_joins_them(
    run_dir: Path,
) -> None:
    """A resumed run repeats iterations 3 and 4, under another seed."""
    assert follow(run_dir, "offline") == (0, "")
    write_lines(run_dir / "metrics.jsonl", map(metrics, range(3)))
    add_iterations(run_dir, 4)
    assert follow(run_dir, "offline") == (0, "")
    assert follow(run_dir, "offline") == (0, ""), "nothing is left: no folder"
    assert iterations_of(run_dir) == list(range(7))
    parts = list(run_dir.glob("wandb/offline-run-*"))
    assert len(parts) == 2
    with serving() as server:
        sync = [sys.executable, "-m", "wandb", "sync", "--yes", *map(str, parts)]
        subprocess.run(sync, env={**os.environ, **online(server)}, check=True, timeout=300)
    [run] = server.runs.values()
    assert run.iterations == [row["_step"] for row in run.history] == list(range(7))
    assert run.exit_codes == [0, 0]
    assert run.summary["eval/reward"] == 0.8, "of a folder before the last"


def test_online_the_same_run_goes_on_after_a_resume_with_its_new_config(run_dir: Path) -> None:
    with serving() as server:
        assert follow(run_dir, "online", **online(server)) == (0, "")
        add_iterations(run_dir, 2)
        config = (run_dir / "config.json").read_text().replace('"tiny"', '"tiny", "seed": 3')
        (run_dir / "config.json").write_text(config)
        assert follow(run_dir, "online", **online(server)) == (0, "")
    [(name, run)] = server.runs.items()
    assert name == page_id(run_dir)
    assert run.iterations == list(range(7)) and run.exit_codes == [0, 0]
    assert run.config["seed"]["value"] == 3
    for media in ("table/episodes", "images/0_main/before_after"):
        assert any(file.startswith(f"media/{media}") for file in run.files), media


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_a_follower_killed_at_any_instant_goes_on_without_gap_or_double(
    tmp_path: Path, mode: str
) -> None:
    run_dir = write_run(tmp_path / "run", num_iterations=2)
    with serving() as server:
        for place in KILLS:
            assert follow(run_dir, mode, killing(place), **online(server))[0] == -9, place
            time.sleep(1.0)  # as long as wandb's own process outlives it
            add_iterations(run_dir, 2)
        assert follow(run_dir, mode, **online(server)) == (0, "")
    if mode == "offline":
        assert server.runs == {}
        assert iterations_of(run_dir) == list(range(13))
    else:
        [run] = server.runs.values()
        assert run.iterations == list(range(13)) and run.exit_codes[-1] == 0


def test_a_service_that_is_down_costs_nothing_and_gets_everything_later(run_dir: Path) -> None:
    hasty = "import sys; from rl.tools.commands import follow; follow.WANDB_INIT_S = 4.0; "
    hasty += "follow.main(sys.argv[1:])"
    for env, why in (
        ({}, "API key"),
        ({"WANDB_API_KEY": KEY, "WANDB_BASE_URL": "http://127.0.0.1:9"}, "connection refused"),
    ):
        code, errors = follow(run_dir, "online", hasty, **env)
        assert code == 1 and errors.count("WARNING") == 1
        command = f"rl follow {run_dir} --wandb online sends"
        assert holds(errors, f"wandb stopped ... {why} ... {command}")
    with serving() as server:
        assert follow(run_dir, "online", **online(server)) == (0, "")
    [run] = server.runs.values()
    assert run.iterations == [0, 1, 2, 3, 4]


def test_wandb_run_id_names_the_page_of_a_new_run(run_dir: Path) -> None:
    for name in ("sft_s__rl_sc", "of_another_run"):
        assert follow(run_dir, "offline", WANDB_RUN_ID=name) == (0, "")
        add_iterations(run_dir, 1)
    names = [path.name for path in run_dir.glob("wandb/offline-run-*/run-*.wandb")]
    assert names == ["run-sft_s__rl_sc.wandb"] * 2


def test_a_wandb_run_id_that_wandb_refuses_gives_a_warning_and_is_not_kept(run_dir: Path) -> None:
    code, errors = follow(run_dir, "offline", WANDB_RUN_ID="sft/s:1")
    assert code == 1 and holds(errors, "wandb stopped ... rl follow")
    assert follow(run_dir, "offline") == (0, "")
