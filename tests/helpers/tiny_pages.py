"""What README.md and docs/*.md print, and a server that runs their `rl` commands."""

from __future__ import annotations

import os
import re
import runpy
import sys
import textwrap
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tiny_config import REPO

import rl.__main__

PROGRAM = (
    r"(?:[A-Z_]+=\S+ )*(?:rl|python|hf|docker|kubectl|ray|sudo|pip|torchrun|tensorboard|wandb|"
    r"trackio|export|source|mkdir|sed|(?:\./|\.venv/)?(?:scripts|bin)/\S+)(?=\s|$)"
)
"""How a command begins."""


@cache
def printed(page: str) -> list[str]:
    """Commands of its blocks and, with an argument, of its sentences, one per line and without
    comments; its other blocks verbatim, divided where a config has a comment or key after a gap."""
    found: list[str] = []
    text = (REPO / page).read_text(encoding="utf-8")
    for match in re.finditer(r"(?:^    .*\n|^\n)+|`([^`]+)`", text, re.M):
        block = textwrap.dedent(match[0]).strip()
        commands = re.sub(r"(^|[^\S\n]+)# .*", "", re.sub(r" *\\\n *", " ", block), flags=re.M)
        if match[1]:
            found += re.findall(rf"^(?:{PROGRAM}(?<!\brl)|rl \S+) .+", words(match[1]))
        elif re.match(PROGRAM, commands.strip()):
            found += filter(None, commands.split("\n"))
        elif block:
            found += re.split(r"\n\n+(?=// |[a-z_]+\+?: )", block)
    return list(dict.fromkeys(found))


def words(text: str) -> str:
    return " ".join(text.split())


def save_files(page: str, folder: Path) -> None:
    """Writes the blocks that begin with a comment `my_plugins/name.py` or `name.jsonnet`."""
    (folder / "my_plugins").mkdir(exist_ok=True)
    for block in printed(page):
        if match := re.match(r"(?:#|//) (\S+\.\w+)\n", block):
            (folder / match[1]).write_text(block + "\n")


def serve(folder: Path) -> None:
    """Runs the commands that `rl` of `printed.sh` asks for, each in a fork of this process, which
    has imported torch: in new interpreters the imports would take half of the time."""
    os.chdir(folder)
    for pipe in ("asked", "answered"):
        os.mkfifo(pipe)
    while True:
        shell, count, *rest = Path("asked").read_text(encoding="utf-8").split("\0")
        if os.fork() == 0:
            _run(shell, rest[: int(count)], rest[int(count) : -1])
        status = os.waitstatus_to_exitcode(os.wait()[1])
        Path("answered").write_text(f"{status}\n", encoding="utf-8")


def _run(shell: str, arguments: Sequence[str], environment: Sequence[str]) -> None:
    for number in (1, 2):
        os.dup2(os.open(f"/proc/{shell}/fd/{number}", os.O_WRONLY), number)
    os.environ.clear()
    os.environ.update(line.split("=", 1) for line in environment)
    os.execv = _run_module  # type: ignore[assignment]
    sys.argv = ["rl", *arguments]
    rl.__main__.main()


def _run_module(_: str, command: Sequence[str]) -> None:
    sys.path[:0] = [] if "-P" in command else [os.getcwd()]
    sys.argv = list(command[command.index("-m") + 1 :])
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
