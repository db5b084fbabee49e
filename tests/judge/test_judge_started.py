"""A judge that the run starts (judge.start_command): its start, its failures and its end."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest
import tiny_loop
from tiny_messages import holds, raising
from tiny_programs import write_programs
from tiny_waits import is_gone, wait_for

from rl.api.judge import Question
from rl.config.schema import JudgeConfig
from rl.judge import server
from rl.judge.client import JudgeClient, JudgeEndedError, JudgeError
from rl.judge.http import is_loopback
from rl.judge.server import StartedJudge, raise_if_ended, start_problems

pytestmark = pytest.mark.slow

MODEL = "tiny-judge"


def config_of(*command: str, start_timeout_s: float = 60.0, api_base: str = "") -> JudgeConfig:
    return JudgeConfig(
        model=MODEL, start_command=list(command), start_timeout_s=start_timeout_s, api_base=api_base
    )


def python(script: str) -> list[str]:
    """The command of a judge that runs `script`; its argument is the file for the URL."""
    return ["{python}", "-u", "-c", script, "{url_file}"]


def refusal_of(config: JudgeConfig, log: Path) -> str:
    with StartedJudge(config, log) as started, pytest.raises(JudgeError) as error:
        asyncio.run(started.wait_until_ready())
    return str(error.value)


def test_a_started_judge_answers_on_loopback_until_it_is_closed(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "judge_0.log"
    log.parent.mkdir()
    log.with_suffix(".url").write_text("http://127.0.0.1:1\n")  # left by a killed run
    others = set(psutil.Process().children(recursive=True))  # fork servers of other tests
    with StartedJudge(config_of(*tiny_loop.JUDGE), log) as started:
        assert is_loopback(asyncio.run(started.wait_until_ready()))
        processes = [p for p in psutil.Process().children(recursive=True) if p not in others]
        sockets = [s for p in processes for s in p.net_connections() if s.status == "LISTEN"]
        assert {socket.laddr.ip for socket in sockets} == {"127.0.0.1"}
        assert any("tiny_world.judge_server" in process.cmdline() for process in processes)
        assert os.getsid(processes[-1].pid) != os.getsid(0), "Ctrl-C would reach it"
    assert all(is_gone(process.pid) for process in processes)
    assert log.read_text().startswith("=== ")


VLLM = f"""#!{sys.executable}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Models(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({{"data": [{{"id": sys.argv[2]}}]}}).encode())
HTTPServer.allow_reuse_port = True
HTTPServer((sys.argv[4], int(sys.argv[6])), Models).serve_forever()
"""
"""What scripts/serve_judge.sh calls: serve <model> --host <host> --port <port> ..."""


@contextmanager
def free_port() -> Iterator[str]:
    """A port that nobody else gets and on which nobody listens."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield str(holder.getsockname()[1])


LATE = "echo http://127.0.0.1:$1 >$0; until [ -e $0.end ]; do sleep 0.1; done; echo in use; exit 1"
"""Ends when a file is there; its arguments are the file for the URL and the port."""


@pytest.mark.parametrize("knows_its_port", [True, False])
def test_another_runs_judge_is_not_taken_for_its_own(
    knows_its_port: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs start a judge on one port: the second one's judge ends."""
    monkeypatch.setattr(server, "GRACE_S", 0.1)
    log = tmp_path / "b.log"

    async def start_both(port: str) -> None:
        serve = ["{python}", "-c", VLLM, "serve", MODEL, "--host", "127.0.0.1", "--port", port]
        own = config_of(*serve, api_base=f"http://127.0.0.1:{port}")
        second = own if knows_its_port else config_of("bash", "-c", LATE, "{url_file}", port)
        with StartedJudge(own, tmp_path / "a.log") as first:
            address = await first.wait_until_ready()
            with StartedJudge(second, log) as judge:
                assert await judge.wait_until_ready() == address
                log.with_suffix(".url.end").touch()
                while True:
                    raise_if_ended(second, log)
                    await asyncio.sleep(0.05)

    parts = "another process answers ... a port of its own"
    parts += "" if knows_its_port else " ... ended with exit code 1 ... own, ... : in use"
    with free_port() as port, raising(JudgeError, f"{port} ... {parts}"):
        asyncio.run(start_both(port))


DIES = """
import os, tiny_world.judge_server as judge
judge.JudgeHandler.complete = lambda *_: (print("no memory left"), os.kill(os.getpid(), 9))
judge.main()
"""
"""A judge that dies of its first question."""


def test_a_judge_that_ends_in_mid_run_is_noticed_at_once(tmp_path: Path) -> None:
    """Its questions do not wait for `judge.max_outage_s`, 600 s."""
    log = tmp_path / "log"
    config = config_of("{python}", "-u", "-c", DIES, *tiny_loop.JUDGE[3:])

    async def ask() -> None:
        with StartedJudge(config, log) as started:
            check = partial(raise_if_ended, config, log)
            client = JudgeClient(config, await started.wait_until_ready(), check=check)
            await client.ask(Question(("How good?",), {}), str)

    parts = f"ended with exit code 137: no memory left\n ... {log}\nThe same command"
    with raising(JudgeEndedError, parts):
        asyncio.run(asyncio.wait_for(ask(), 100))
    with StartedJudge(config, log):
        raise_if_ended(config, log)


def test_the_shipped_script_is_started_as_the_readme_says(tmp_path, monkeypatch) -> None:
    path = write_programs(tmp_path, {"vllm": VLLM})
    monkeypatch.setenv("PATH", f"{path}:{os.environ['PATH']}")
    monkeypatch.chdir(tiny_loop.REPO)
    [line] = re.findall(
        r"^ +start_command: (.*?) }",
        (tiny_loop.REPO / "docs/judge.md").read_text(),
        re.DOTALL | re.M,
    )
    config = config_of(*ast.literal_eval(line))
    assert list(start_problems(config)) == []
    with free_port() as port:
        monkeypatch.setenv("JUDGE_PORT", port)
        with StartedJudge(config, tmp_path / "log") as started:
            address = asyncio.run(started.wait_until_ready())
    assert is_loopback(address), (tmp_path / "log").read_text()


def test_a_started_judge_inherits_no_rank_variables_and_no_unneeded_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("KEPT", "WANDB_API_KEY", "DB_PASS", "HF_TOKEN", "MY_JUDGE_KEY"):
        monkeypatch.setenv(name, "of-" + "1234567890")
    listing = "[n for n in sorted(os.environ) if os.environ[n].startswith('of-12')]"
    script = f"import os; print(os.environ.get('WORLD_SIZE'), {listing})"
    config = config_of(*python(script)).model_copy(update={"api_key_env": "MY_JUDGE_KEY"})
    message = refusal_of(config, tmp_path / "l")
    assert ": None ['HF_TOKEN', 'KEPT', 'MY_JUDGE_KEY']\n" in message, message


def test_a_judge_that_exits_is_reported_with_its_last_output(tmp_path: Path) -> None:
    log = tmp_path / "judge_0.log"
    log.write_text("of another run\n")
    command = python("import sys; print('no weights:\x1b[1m /m'); sys.exit(3)")
    message = refusal_of(config_of(*command), log)
    assert holds(message, f"judge.start_command ... code 3 ... no weights:\\x1b[1m /m\n ... {log}")
    assert "of another run" not in message
    assert "exit code 137" in refusal_of(config_of("bash", "-c", "kill -9 $$ {url_file}"), log)
    file = tmp_path / "not_executable"
    file.write_text("")
    assert "exit code 127" in refusal_of(config_of(str(file), "{url_file}"), log)


@pytest.mark.parametrize(
    ("written", "parts"),
    [
        ("", "'{url_file}' after 3 s (judge.start_timeout_s)\n"),
        ("http://127.0.0.1:1", "http://127.0.0.1:1/v1 after 3 s"),  # no line end
        ("http://127.0.0.1:1\n", "http://127.0.0.1:1/v1 after 3 s (judge.start_timeout_s)"),
        ("here!\n", "judge.start_command ... '{url_file}' ... judge.api_base='here!'"),
    ],
)
def test_a_judge_silent_at_its_address_is_reported(written: str, parts: str, tmp_path) -> None:
    script = f"import sys, time; open(sys.argv[1], 'w').write({written!r}); time.sleep(1000)"
    message = refusal_of(config_of(*python(script), start_timeout_s=3.0), tmp_path / "log")
    assert holds(message, parts)


def test_a_stopped_guard_ends_with_its_judge(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    started = StartedJudge(
        config_of("{python}", "-c", JUDGE, str(pids), "docile"), tmp_path / "log"
    )
    wait_for(pids.is_file)
    os.kill(started._guard.pid, signal.SIGSTOP)
    began_s = time.monotonic()
    started.close()
    assert time.monotonic() - began_s < 30
    wait_for(lambda: all(map(is_gone, json.loads(pids.read_text()))))


JUDGE = """
import json, os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[2] == "stubborn" else signal.SIG_DFL)
child = subprocess.Popen(["sleep", "1000"])
open(sys.argv[1] + ".part", "w").write(json.dumps([os.getpid(), child.pid]))
os.replace(sys.argv[1] + ".part", sys.argv[1])
time.sleep(1000)
"""
"""A judge with a child process; a stubborn one ignores SIGTERM."""

RUN = """
import sys, time
from pathlib import Path
from rl.api.judge import Question
from rl.config.schema import JudgeConfig
from rl.judge.server import StartedJudge
folder, script, kind = sys.argv[1:]
command = ["{python}", "-c", script, folder + "/pids", kind]
with StartedJudge(JudgeConfig(start_command=command), Path(folder) / "log"):
    while not Path(folder, "enough").exists():
        time.sleep(0.02)
"""


@pytest.mark.parametrize(("end", "kind"), [("its own", "docile"), ("SIGKILL", "stubborn")])
def test_no_judge_process_survives_the_run(end: str, kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, str(tmp_path), JUDGE, kind]
    run = subprocess.Popen(command, cwd=tiny_loop.REPO)
    pids = tmp_path / "pids"
    wait_for(pids.is_file)
    started = json.loads(pids.read_text())
    assert not any(map(is_gone, started))
    if end == "SIGKILL":
        run.kill()
    else:
        (tmp_path / "enough").touch()
    run.wait(60)
    wait_for(lambda: all(map(is_gone, started)))
