"""The launcher on real processes: exit codes, tracebacks, signals, orphans."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest
import tiny_config
import tiny_loop
import tiny_ranks
import torch
from tiny_config import REPO
from tiny_loop import HELPERS, environment, listeners
from tiny_messages import code_of, holds, raising, refusal
from tiny_ranks import held_port
from tiny_waits import is_gone, wait_for

from rl import simple_launch
from rl.ranks import signals, supervision
from rl.ranks.supervision import RendezvousError, on_several_nodes
from rl.simple_launch import main

WORKER = HELPERS / "launch_worker.py"
Launch = Callable[..., BaseProcess]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tiny_config.write(tmp_path, tiny_config.nothing(tmp_path))


@pytest.fixture
def launch(tmp_path: Path, config: Path) -> Iterator[Launch]:
    """Starts launchers: forked ones, as each new interpreter would import torch. Their ranks are
    new interpreters."""
    started = []

    def start(mode: str, *options: str, folder: Path = tmp_path) -> BaseProcess:
        folder.mkdir(exist_ok=True)
        environ = environment(TEST_FOLDER=str(folder), TEST_MODE=mode)
        environ.pop("OMP_NUM_THREADS", None)
        arguments = [*options, str(WORKER), str(config), f"base_exp_dir={folder / 'runs'}"]
        files = [tmp_path / f"{len(started)}.{stream}" for stream in ("stdout", "stderr")]
        to_call = (tiny_loop.launch_here, (environ, *arguments, "seed=0"))
        started.append(tiny_ranks.spawn(tiny_ranks.script_main, files, *to_call))
        started[-1].name = str(files[0].with_suffix(""))
        return started[-1]

    yield start
    for process in started:
        process.terminate()
        process.join(30)


def printed_by(process: BaseProcess, timeout_s: float = 120) -> list[str]:
    """What a launch has printed on stdout and stderr; waits for its end."""
    process.join(timeout_s)
    assert process.exitcode is not None, f"it did not end in {timeout_s} s"
    return [Path(f"{process.name}.{stream}").read_text() for stream in ("stdout", "stderr")]


def errors_of(process: BaseProcess, code: int) -> str:
    """What a launch that ends with this exit code has printed on stderr."""
    _, errors = printed_by(process)
    assert process.exitcode == code, errors
    return errors


def wait_for_notes(folder: Path, name: str) -> None:
    """Waits until both ranks have left this note."""
    wait_for(lambda: all((folder / f"{name}_{rank}").exists() for rank in range(2)))


@pytest.mark.slow
def test_two_simultaneous_launches_do_not_collide(launch: Launch, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    processes = [launch("done", "--nproc", "2", folder=folder) for folder in folders]
    for process, folder in zip(processes, folders, strict=True):
        printed, errors = printed_by(process)
        assert process.exitcode == 0, errors
        assert "rank 0 says hello" in printed and "rank 1" not in printed
        argv = (folder / "argv_1").read_text().split()
        assert argv[1:] == [f"base_exp_dir={folder / 'runs'}", "seed=0", "world_size=2"]
        assert (folder / "threads_0").read_text() == "1" or torch.cuda.is_available()
        for rank in range(2):
            log = folder / f"runs/tiny/logs/rank_{rank}.log"
            assert f"rank {rank} says hello" in log.read_text()
            gathered = (folder / f"met_{rank}").read_text()
            assert gathered == f"['{folder.name} 0', '{folder.name} 1']", "its peers, in rank order"


def listening(pid: int) -> list[list[str]]:
    """The addresses on which a process listens, and those of each of its descendants."""
    process = psutil.Process(pid)
    return [listeners(each) for each in (process, *process.children(recursive=True))]


@pytest.mark.slow
def test_on_one_node_nothing_listens_outside_loopback(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "eth0")  # cluster images set these
    process = launch("listen", "--nproc", "2")
    wait_for_notes(tmp_path, "interfaces")
    launcher, *ranks = listening(process.pid)
    (tmp_path / "seen").touch()
    errors_of(process, 0)
    for rank in range(2):
        assert (tmp_path / f"interfaces_{rank}").read_text() == "lo =lo"
    assert launcher == [], "the launcher does not listen"
    assert len(ranks) == 2 and all(ranks), "gloo listens in both ranks"
    assert {ip for addresses in ranks for ip in addresses} == {"127.0.0.1"}


@pytest.mark.slow
def test_the_failing_rank_is_named_with_its_traceback(launch: Launch, tmp_path: Path) -> None:
    errors = errors_of(launch("raise", "--nproc", "2"), 1)
    first, second, *_, last = errors.splitlines()
    assert holds(first, "rank 1 ... exit code 1 ... logs")
    assert second == "Traceback (most recent call last):" and "in fail_deep_inside" in errors
    assert last == "ValueError: boom on rank 1"
    wait_for(lambda: is_gone(int((tmp_path / "waiting_0").read_text())))


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--nproc", "2")])
def test_an_expected_error_is_a_message_and_its_traceback_is_in_the_log(
    launch: Launch, tmp_path: Path, options: tuple[str, ...]
) -> None:
    errors = errors_of(launch("mistake", *options), 1)
    assert "judge.api_base='/no/such/file'" in errors and "Traceback" not in errors
    log = tmp_path / f"runs/tiny/logs/rank_{1 if options else 0}.log"
    assert holds(log.read_text(), "Traceback ... in resolve_api_base")


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 7])
def test_a_library_that_aborts_at_exit_does_not_change_the_exit_code(
    launch: Launch, tmp_path: Path, code: int
) -> None:
    process = launch(f"aborts at the end {code}")
    output, errors = printed_by(process)
    assert process.exitcode == code, errors
    assert "SIGABRT" not in errors
    assert output.endswith("the last word"), "Python's own exit handlers have run"
    assert (tmp_path / "thread_0").exists() and (tmp_path / "handler_0").exists()


@pytest.mark.slow
def test_a_killed_rank_ends_its_children_and_peers(launch: Launch, tmp_path: Path) -> None:
    errors = errors_of(launch("killed", "--nproc", "2"), 128 + signal.SIGKILL)
    assert holds(errors, "rank 1 ... SIGKILL")
    wait_for(lambda: is_gone(int((tmp_path / "child_1").read_text())))


@pytest.mark.parametrize("num_ranks", ["1", "2"])
def test_a_rank_that_leaves_with_code_0_before_its_script_has_ended_has_failed(
    tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: str
) -> None:
    """Launched by this process: the server that forks others takes seconds to start."""
    os.environ |= environment(TEST_FOLDER=str(tmp_path), TEST_MODE="leaves")
    monkeypatch.chdir(REPO)
    errors = refusal(main, ["--nproc", num_ranks, str(WORKER), str(config)])
    assert f"rank {int(num_ranks) - 1} failed: a library or a plugin ended it (sys.exit" in errors


@pytest.mark.parametrize(
    ("target", "end", "code"),
    [
        ("rl.train", "sys.exit()", 0),  # of a library; the launcher takes 0 for a failure
        ("rl.train", "None", supervision.FINISHED_CODE),
        ("script.py", "sys.exit()", supervision.FINISHED_CODE),
        ("rl.train", "signal.raise_signal(signal.SIGINT)", -signal.SIGINT),  # Ctrl-C in an import
    ],
)
def test_a_run_is_finished_only_if_the_training_returns(
    tmp_path: Path, target: str, end: str, code: int
) -> None:
    program = (
        "import runpy, signal, sys; from rl.ranks import worker; "
        f"runpy.run_module = runpy.run_path = lambda *_, **__: {end}; worker.main()"
    )
    command = [sys.executable, "-c", program, str(tmp_path), str(tmp_path), target]
    assert subprocess.run(command, env={**os.environ, "RANK": "0"}).returncode == code


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, 40])
def test_the_launcher_forwards_a_signal_and_waits_until_all_ranks_have_saved(
    launch: Launch, tmp_path: Path, signum: int
) -> None:
    process = launch("graceful", "--nproc", "2")
    wait_for_notes(tmp_path, "ready")
    os.kill(process.pid, signum)
    os.kill(process.pid, signum)  # a terminal and its shell may both send it; the ranks still save
    assert holds(errors_of(process, 128 + signum), f"{signals.name_of(signum)} ... resumes")
    for rank in range(2):
        assert (tmp_path / f"saved_{rank}").read_text() == signals.name_of(signum)


@pytest.mark.slow
def test_at_a_stop_the_launcher_continues_a_stopped_rank_or_kills_it(
    launch: Launch, tmp_path: Path
) -> None:
    process = launch("frozen", "--nproc", "2")
    wait_for_notes(tmp_path, "began")
    process.terminate()
    _, errors = printed_by(process, supervision.STOPPED_GRACE_S + 10)
    assert process.exitcode == 128 + signal.SIGTERM
    assert holds(errors, "killed ... stopped ... rank 1 ... SIGTERM ... resumes")
    assert (tmp_path / "left_0").exists() and not (tmp_path / "left_1").exists()


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_orphans(launch: Launch, tmp_path: Path) -> None:
    process = launch("graceful", "--nproc", "2")
    wait_for_notes(tmp_path, "ready")
    pids = [int((tmp_path / f"ready_{rank}").read_text()) for rank in range(2)]
    process.kill()
    process.join()
    wait_for(lambda: all(map(is_gone, pids)))
    assert (tmp_path / "saved_0").read_text() == "SIGTERM", "the ranks got SIGTERM and saved"


def test_a_cpu_run_uses_one_thread_even_if_there_is_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    for on_gpu, threads in ((), "1"), (("policy.device=auto",), "8"):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        simple_launch._set_environment(1, tiny_config.shipped("quickstart", *on_gpu))
        assert os.environ["OMP_NUM_THREADS"] == threads


@pytest.fixture
def endpoint() -> Iterator[str]:
    with held_port() as port:
        yield f"127.0.0.1:{port}"


@pytest.mark.slow
def test_two_nodes_meet_on_the_named_address(launch: Launch, tmp_path: Path, endpoint: str) -> None:
    options = ("--nproc", "1", "--nnodes", "2", "--rdzv-endpoint", endpoint, "--node-rank")
    nodes = [launch("listen", *options, str(rank)) for rank in (1, 0)]
    wait_for_notes(tmp_path, "interfaces")
    addresses = [ip for node in nodes for ips in listening(node.pid) for ip in ips]
    (tmp_path / "seen").touch()
    for node in nodes:
        errors_of(node, 0)
    assert addresses and set(addresses) == {"127.0.0.1"}
    assert (tmp_path / "interfaces_0").read_text() == "lo =lo"
    logs = [path.name for path in (tmp_path / "runs/tiny/logs").glob("checked_rows.*")]
    assert sorted(logs) == ["checked_rows.0.json", "checked_rows.1.json"], "nodes share the folder"


@pytest.mark.slow
def test_nodes_with_contradictory_options_stop(launch: Launch, endpoint: str) -> None:
    options = ("--nnodes", "2", "--rdzv-endpoint", endpoint)
    first = launch("done", "--nproc", "1", "--node-rank", "0", *options)
    second = launch("done", "--nproc", "2", "--node-rank", "1", *options)
    assert holds(errors_of(second, 1), "2 nodes of 2 ranks ... 2 nodes of 1 ranks")
    twin = launch("done", "--nproc", "1", "--node-rank", "0", *options)
    assert holds(errors_of(twin, 1), "node 0 ... listen on 127.0.0.1")
    first.terminate()


@pytest.mark.parametrize(
    ("endpoint_", "parts"),
    [
        ("host0", "--rdzv-endpoint 'host0' ... host:port"),
        ("host0:0", "host:port"),
        ("host0:66000", "host:port"),
        ("no-such-host.invalid:29777", "no-such-host.invalid"),
        ("192.0.2.1:29777", "node 0 ... 192.0.2.1:29777 ... Cannot assign requested"),
    ],
)
def test_an_invalid_endpoint_is_refused(endpoint_: str, parts: str) -> None:
    with raising(RendezvousError, parts), on_several_nodes(endpoint_, 0, 2, 1, print):
        pass


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--nproc", "0", "any.jsonnet"], "--nproc 0 ... at least one"),
        (["--nproc", "-2", "any.jsonnet"], "--nproc -2 ... at least one"),
        (["--nnodes", "0", "any.jsonnet"], "--nnodes 0 ... at least one"),
        (["--nnodes", "2", "any.jsonnet"], "--nnodes > 1 ... --rdzv-endpoint"),
        (["--node-rank", "1", "any.jsonnet"], "--node-rank 1 ... --nnodes 1"),
        (["rl/train.py"], "config ... missing"),
        (["nowhere.py", "any.jsonnet"], "nowhere.py ... rl/train.py"),
        (["--retries", "-1", "any.jsonnet"], "--retries -1"),
        (
            ["--nnodes", "2", "--rdzv-endpoint", "a:1", "--retries", "1", "any.jsonnet"],
            "--retries starts one node's",
        ),
        (["--retries", "1", __file__], "no config"),
    ],
)
def test_wrong_options_exit_with_the_reason(monkeypatch, options: list[str], parts) -> None:
    monkeypatch.chdir(REPO)
    assert holds(refusal(main, options, 2), parts)


def test_a_script_without_a_config_runs_on_every_rank(tmp_path: Path) -> None:
    script = tmp_path / "count.py"
    name = "os.environ['RANK'] + 'of' + os.environ['WORLD_SIZE']"
    script.write_text(f"import os, pathlib\npathlib.Path({str(tmp_path)!r}, {name}).touch()\n")
    assert code_of(main, "--nproc", "2", str(script)) == 0
    assert {"0of2", "1of2"} <= {file.name for file in tmp_path.iterdir()}


def test_the_launch_command_of_earl_works(tmp_path: Path, capsys) -> None:
    (tmp_path / "configs").mkdir()
    config = tiny_config.write(tmp_path / "configs", tiny_config.nothing(tmp_path))
    command = ("--check", "--nproc", "2", "rl/nano_aha_moment.py", f"rl/configs/{config.name}")
    assert code_of(main, *command) == 0
    assert "on each of 2 ranks" in capsys.readouterr().out


def test_a_run_folder_that_cannot_be_created_is_named(tmp_path: Path, config: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    errors = refusal(main, [str(WORKER), str(config), f"base_exp_dir={tmp_path / 'file'}"])
    assert f"base_exp_dir: {tmp_path / 'file'}" in errors


def test_another_system_than_linux_is_refused_with_a_message(monkeypatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert holds(refusal(main, [str(WORKER)]), "Linux ... darwin ... WSL 2")
