"""Runs `judge.start_command`: a judge that the run itself starts, one process a node."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from rl.config.schema import JudgeConfig
from rl.files import private, write_atomically
from rl.judge.client import JudgeClient, JudgeEndedError, JudgeError, JudgeUnreachableError
from rl.judge.guard import GRACE_S
from rl.judge.http import MAX_FILE_BYTES, is_loopback, resolve_api_base
from rl.printing import environment_without, excerpt
from rl.ranks.dist import INIT_METHOD

POLL_S = 0.05
WATCH_S = 1.0
"""How often a judge that has answered is looked after, and how long a connection may take."""
COMPLETE_S = 1.0
"""A URL without a line end counts after so long without a change of its file."""
LOG_END_BYTES = 2000
"""How much of the end of the log is read to find the last line of a failed judge."""
SHOWN_CHARS = 400
URL_FILE = "{url_file}"
ENDED = ".ended"
"""Suffix of the file beside the log that says why the judge has ended."""
NOT_OURS = (
    "another process answers, such as another run's judge: give each run's judge a port of its "
    "own, or share one that no run starts (judge.start_command: [], judge.api_base)"
)
IMPORT_ROOT = Path(__file__).resolve().parents[2]
"""The folder that `rl` is imported from."""

NEEDED_SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
"""Passed to the judge, which may download its model. `judge.api_key_env` is passed, too."""
RANK_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", INIT_METHOD),
)
"""Variables that would make an engine in the judge's process join the run's process group."""


def start_problems(config: JudgeConfig) -> Iterator[str]:
    """Problems of a non-empty `start_command`, each with its key and remedy."""
    command = _command(config, Path())
    if shutil.which(command[0]) is None:
        yield (
            f"judge.start_command: there is no program {command[0]!r} on this machine's PATH or in "
            f"{Path.cwd()}; '{{python}}' stands for this Python"
        )
    if any(URL_FILE in each for each in config.start_command) == bool(config.api_base):
        yield (
            f"judge.start_command: give the judge's URL in exactly one way: '{URL_FILE}' in the "
            "command (a file to which the judge writes its URL), or judge.api_base, which is "
            f"{'set' if config.api_base else 'empty'}"
        )
    elif config.api_base:
        try:
            resolve_api_base(config.api_base)
        except ValueError as error:
            yield str(error)


class StartedJudge(AbstractContextManager["StartedJudge"]):
    """Runs `judge.start_command` until `close()`, or until this process ends."""

    def __init__(self, config: JudgeConfig, log: Path) -> None:
        """`log`: file to which its output is appended; its URL file is in the same folder. Raises
        JudgeError if another process answers at its address."""
        self._config = config
        self._log = log
        self._is_closing = False
        self._deadline_s = time.monotonic() + config.start_timeout_s
        self._url_file = log.with_suffix(".url").absolute()
        log.parent.mkdir(parents=True, exist_ok=True)
        for suffix in (".url", ENDED):
            log.with_suffix(suffix).unlink(missing_ok=True)  # another start leaves its files behind
        # The judge of a killed run may still be ending.
        wait_ends_s = time.monotonic() + 2 * GRACE_S
        while config.api_base and _answers(resolve_api_base(config.api_base)):
            if time.monotonic() > wait_ends_s:
                raise JudgeError(f"judge.api_base={config.api_base!r}: {NOT_OURS}")
            time.sleep(POLL_S)
        command = _command(config, self._url_file)
        environment = environment_without(config.api_key_env, *NEEDED_SECRETS)
        with open(log, "ab", opener=private) as output:
            output.write(f"=== {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
            output.flush()
            self._log_start = output.tell()
            self._guard = subprocess.Popen(
                [sys.executable, "-m", "rl.judge.guard", str(os.getpid()), os.getcwd(), *command],
                cwd=IMPORT_ROOT,
                env={key: value for key, value in environment.items() if key not in RANK_VARIABLES},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    async def wait_until_ready(self) -> str:
        """Wait until the judge serves `judge.model`; returns its URL. From then on, this event loop
        watches that it runs.

        Raises JudgeError if the judge ends first, does not answer within `judge.start_timeout_s`,
        or does not match the config.
        """
        ready = asyncio.create_task(self._ready())
        try:
            while not ready.done():
                await asyncio.wait([ready], timeout=POLL_S)
                # Also after an answer, which may have been another process's.
                if (code := self._guard.poll()) is not None:
                    raise self._error(f"ended with exit code {code} before it answered")
            api_base = await ready
        finally:
            ready.cancel()
        self._watch = asyncio.create_task(self._watch_guard(api_base))
        return api_base

    async def _ready(self) -> str:
        text, origin = self._config.api_base, ""
        while not text:
            if time.monotonic() > self._deadline_s:
                raise self._too_slow(f"the judge wrote no URL into '{URL_FILE}'")
            await asyncio.sleep(POLL_S)
            text, origin = self._first_line(), f"judge.start_command wrote into '{URL_FILE}': "
        try:
            api_base = resolve_api_base(text)
        except ValueError as error:
            raise JudgeError(f"{origin}{error}") from None
        client = JudgeClient(self._config, api_base)
        try:
            await client.check_health(max(0.0, self._deadline_s - time.monotonic()))
        except JudgeUnreachableError:
            raise self._too_slow(f"no judge answers at {api_base}") from None
        finally:
            await client.aclose()
        return api_base

    def _first_line(self) -> str:
        """First line of the URL file; '' while it may hold half a port: it has no line end, and
        was written a moment ago."""
        if not self._url_file.is_file():
            return ""
        line, end, _ = self._url_file.read_bytes()[:MAX_FILE_BYTES].partition(b"\n")
        is_whole = end or time.time() - self._url_file.stat().st_mtime > COMPLETE_S
        return line.decode("utf-8", "replace").strip() if is_whole else ""

    async def _watch_guard(self, api_base: str) -> None:
        """Once the judge has ended, write why into a file, for `raise_if_ended`."""
        while (code := self._guard.poll()) is None:
            await asyncio.sleep(WATCH_S)
        if not self._is_closing:
            other = f"; at {api_base} {NOT_OURS}" if _answers(api_base) else ""
            why = self._error(f"the judge ended with exit code {code}{other}")
            write_atomically(
                self._log.with_suffix(ENDED),
                f"{why}\nThe same command starts it again, and resumes after the last finished "
                "iteration.",
                private,
            )

    def _too_slow(self, problem: str) -> JudgeError:
        return self._error(
            f"{problem} after {self._config.start_timeout_s:g} s (judge.start_timeout_s)"
        )

    def _error(self, problem: str) -> JudgeError:
        """An error with `problem` and the last line that the judge printed."""
        with self._log.open("rb") as file:
            file.seek(max(self._log_start, self._log.stat().st_size - LOG_END_BYTES))
            line = file.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
        last_line = f": {excerpt(line, SHOWN_CHARS)}" if line else ""
        return JudgeError(f"judge.start_command: {problem}{last_line}\nIts output: {self._log}")

    def close(self) -> None:
        self._is_closing = True
        self._guard.terminate()
        self._guard.send_signal(signal.SIGCONT)  # it may have been stopped
        try:
            self._guard.wait(2 * GRACE_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()  # Linux then ends the judge
            self._guard.wait()
        self._url_file.unlink(missing_ok=True)

    def __exit__(self, *_: object) -> None:
        self.close()


def raise_if_ended(config: JudgeConfig, log: Path) -> None:
    """Raise JudgeEndedError if the started judge with this log has answered and then ended. Any
    process of its machine may ask."""
    if config.start_command and log.with_suffix(ENDED).is_file():
        raise JudgeEndedError(log.with_suffix(ENDED).read_text(encoding="utf-8"))


def _answers(api_base: str) -> bool:
    """Whether a process of this machine accepts a connection at this address. (Elsewhere a gateway
    may accept one for it.)"""
    url = urlsplit(api_base)
    with suppress(OSError), socket.create_connection((url.hostname, url.port or 80), WATCH_S):
        return is_loopback(api_base)
    return False


def _command(config: JudgeConfig, url_file: Path) -> list[str]:
    """The command with its placeholders replaced. Other braces stay: an argument may be JSON."""
    values = {"{python}": sys.executable, "{model}": config.model, URL_FILE: str(url_file)}
    command = list(config.start_command)
    for name, value in values.items():
        command = [argument.replace(name, value) for argument in command]
    return command
