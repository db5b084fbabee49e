"""wandb's own files, and its client against a stand-in for its server: nothing twice, no gap."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_wandb
from tiny_messages import holds
from tiny_report import metrics, write_episodes, write_lines, write_run
from tiny_wandb import KEY, Server, history, serving, values_of

from rl.files import json_line
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
    cls, name = method.split(".")
    return f"""
import os, signal, sys, time
from rl.tools.commands import follow
inner, calls = follow.{method}, []
def outer(*args, **kw):
    calls.append(1)
    dies = len(calls) == (2 if {name!r} == "write" else 1)
    if dies and {moment!r} == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    result = inner(*args, **kw)
    if dies:
        time.sleep(0.5)  # wandb's own process works on
        os.kill(os.getpid(), signal.SIGKILL)
    return result
follow.{cls}.{name} = outer
follow.main(sys.argv[1:])
"""


def follow(run_dir: Path, *options: str, program: str = "", **env: str) -> tuple[int, str]:
    """Exit code and stderr of `rl follow`, in an environment without wandb's variables."""
    inherited = {name: v for name, v in os.environ.items() if not name.startswith("WANDB_")}
    start = ["-c", program] if program else ["-m", "rl", "follow"]
    done = subprocess.run(
        [sys.executable, *start, str(run_dir), *options],
        env={**inherited, "NETRC": str(run_dir / "no_netrc"), **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stderr


def online(server: Server) -> dict[str, str]:
    return {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY}


def add_iterations(run_dir: Path, first: int, last: int, **values: Any) -> None:
    for iteration in range(first, last + 1):
        write_episodes(run_dir, iteration)
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write(json_line(metrics(iteration) | values))


def test_an_offline_run_has_scalars_table_pictures_summary_and_config(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    code, errors = follow(run_dir, "--wandb", "offline", WANDB_API_KEY=KEY)
    assert (code, errors) == (0, "")
    rows = history(run_dir)
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[4]["reward/mean"] == rows[4]["0_main/training_reward"] == 1.0
    assert rows[4]["0_main/before_after/count"] == 5 and rows[4]["episodes/nrows"] == 6
    ends = [record.exit for record in tiny_wandb.records(run_dir) if record.HasField("exit")]
    assert [end.exit_code for end in ends] == [0]
    configs = [values_of(r.config.update) for r in tiny_wandb.records(run_dir)]
    assert any(config.get("run_name") == "tiny" for config in configs)
    [table] = run_dir.glob("wandb/offline-run-*/files/media/table/episodes_4_*.json")
    assert table.read_text().count('"instruction 1 ') == 2
    staged = [p for p in (run_dir / "wandb" / "artifacts").rglob("*") if p.is_file()]
    assert any(path.read_bytes().startswith(b"\x89PNG") for path in staged), "for `wandb sync`"
    assert (run_dir / "wandb").stat().st_mode & 0o777 == 0o700, "it holds completions"
    for path in run_dir.rglob("*"):
        assert not (path.is_file() and KEY.encode() in path.read_bytes()), path


def test_each_offline_start_writes_what_the_earlier_ones_lack_and_sync_joins_them(
    tmp_path: Path,
) -> None:
    """A resumed run repeats iterations 3 and 4, under another seed."""
    run_dir = write_run(tmp_path / "run")
    assert follow(run_dir, "--wandb", "offline") == (0, "")
    rows = [metrics(iteration) for iteration in range(3)]
    write_lines(run_dir / "metrics.jsonl", rows)
    add_iterations(run_dir, 3, 6)
    assert follow(run_dir, "--wandb", "offline") == (0, "")
    assert follow(run_dir, "--wandb", "offline") == (0, ""), "nothing is left: no folder"
    assert [row["iteration"] for row in history(run_dir)] == list(range(7))
    parts = list(run_dir.glob("wandb/offline-run-*"))
    assert len(parts) == 2
    with serving() as server:
        sync = [sys.executable, "-m", "wandb", "sync", "--yes", *map(str, parts)]
        subprocess.run(sync, env={**os.environ, **online(server)}, check=True, timeout=300)
    [run] = server.runs.values()
    assert run.iterations == [row["_step"] for row in run.history] == list(range(7))
    assert run.exit_codes == [0, 0]
    assert run.summary["eval/reward"] == 0.8, "of a folder before the last"


def test_online_the_same_run_goes_on_after_a_resume_with_its_new_config(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    with serving() as server:
        assert follow(run_dir, "--wandb", "online", **online(server)) == (0, "")
        add_iterations(run_dir, 5, 6)
        config = (run_dir / "config.json").read_text().replace('"tiny"', '"tiny", "seed": 3')
        (run_dir / "config.json").write_text(config)
        assert follow(run_dir, "--wandb", "online", **online(server)) == (0, "")
    [run] = server.runs.values()
    assert list(server.runs) == [page_id(run_dir)]
    assert run.iterations == list(range(7)) and run.exit_codes == [0, 0]
    assert run.config["seed"]["value"] == 3
    assert any(name.startswith("media/table/episodes") for name in run.files)
    assert any(name.startswith("media/images/0_main/before_after") for name in run.files)


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_a_follower_killed_at_any_instant_goes_on_without_gap_or_double(
    tmp_path: Path, mode: str
) -> None:
    run_dir = write_run(tmp_path / "run", num_iterations=2)
    with serving() as server:
        for place in KILLS:
            options = ("--wandb", mode)
            code, _ = follow(run_dir, *options, program=killing(place), **online(server))
            assert code == -9, place
            time.sleep(1.0)  # as long as wandb's own process outlives it
            last = len((run_dir / "metrics.jsonl").read_text().split("\n")) - 2
            add_iterations(run_dir, last + 1, last + 2)
        assert follow(run_dir, "--wandb", mode, **online(server)) == (0, "")
        if mode == "offline":
            assert server.runs == {}
            assert [row["iteration"] for row in history(run_dir)] == list(range(13))
        else:
            [run] = server.runs.values()
            assert run.iterations == list(range(13)) and run.exit_codes[-1] == 0


def test_a_service_that_is_down_costs_nothing_and_gets_everything_later(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    for env, why in (
        ({}, "API key"),
        ({"WANDB_API_KEY": KEY, "WANDB_BASE_URL": "http://127.0.0.1:9"}, "connection refused"),
    ):
        hasty = "import sys; from rl.tools.commands import follow; follow.WANDB_INIT_S = 4.0; "
        program = f"{hasty}follow.main(sys.argv[1:])"
        code, errors = follow(run_dir, "--wandb", "online", program=program, **env)
        assert code == 1 and errors.count("WARNING") == 1
        command = f"rl follow {run_dir} --wandb online sends"
        assert holds(errors, f"wandb stopped ... {why} ... {command}")
    with serving() as server:
        assert follow(run_dir, "--wandb", "online", **online(server)) == (0, "")
    [run] = server.runs.values()
    assert run.iterations == [0, 1, 2, 3, 4]


def test_wandb_run_id_names_the_page_of_a_new_run(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", num_iterations=1)
    assert follow(run_dir, "--wandb", "offline", WANDB_RUN_ID="sft_s__rl_sc") == (0, "")
    add_iterations(run_dir, 2, 2)
    assert follow(run_dir, "--wandb", "offline", WANDB_RUN_ID="of_another_run") == (0, "")
    names = [path.name for path in run_dir.glob("wandb/offline-run-*/run-*.wandb")]
    assert names == ["run-sft_s__rl_sc.wandb"] * 2


def test_a_wandb_run_id_that_wandb_refuses_gives_a_warning_and_is_not_kept(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", num_iterations=1)
    code, errors = follow(run_dir, "--wandb", "offline", WANDB_RUN_ID="sft/s:1")
    assert code == 1 and holds(errors, "wandb stopped ... rl follow")
    assert follow(run_dir, "--wandb", "offline") == (0, "")
