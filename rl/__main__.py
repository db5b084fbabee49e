"""Starts a command: `rl <command> ...` becomes the process `python -m <module> ...`.

Only the standard library is imported here, and only `train` and `check` import from the working
folder.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, NoReturn

DISTRIBUTION = "vlm-edit-rl"
HOME = Path(__file__).resolve().parents[1]
"""Where `rl` is imported from, which may be the working folder."""


class Command(NamedTuple):
    """One of `rl --help`'s lines."""

    help: str
    module: str
    before: tuple[str, ...] = ()
    """Arguments that stand before the user's."""
    after: tuple[str, ...] = ()
    """Arguments that stand behind the user's."""
    needs_torch: bool = True


_RANK_SCRIPT = str(Path(__file__).with_name("commands") / "check_distributed.py")
COMMANDS = {
    "train": Command("start a run, or go on with it", "rl.simple_launch"),
    "check": Command(
        "what a config would do, and what is wrong with it",
        "rl.simple_launch",
        before=("--check",),
        needs_torch=False,
    ),
    "report": Command("what a run learnt", "rl.commands.report", needs_torch=False),
    "edit": Command("edit pictures with what was trained", "rl.commands.edit"),
    "runs": Command("what runs there are", "rl.commands.runs", needs_torch=False),
    "enhance": Command(
        "better prompts from a trained rewriter", "rl.commands.edit", before=("--only-words",)
    ),
    "export": Command("what a run trained, as a folder for other tools", "rl.commands.export"),
    "prepare": Command("edit sets as Emu3's codes", "rl.commands.prepare_data"),
    "check-distributed": Command(
        "do the ranks of this machine hear each other?", "rl.simple_launch", after=(_RANK_SCRIPT,)
    ),
    "check-gpu": Command(
        "do the GPUs of this machine run everything? ten minutes", "rl.commands.check_gpu"
    ),
    "bench-gpu": Command("times at real size on this GPU", "benchmarks.bench_gpu"),
}


def main() -> NoReturn:
    """Exit code: the command's own; 0 for help, 2 for wrong usage, 1 for what is not installed."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print("usage: rl <command> ...        (rl <command> --help, rl --version)\n")
        width = max(map(len, COMMANDS))
        for name, command in COMMANDS.items():
            print(f"  {name:{width}}  {command.help}")
        sys.exit(0)
    if name == "--version":
        print(f"{DISTRIBUTION} {importlib.metadata.version(DISTRIBUTION)}")
        sys.exit(0)
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        _fail(2, f"rl: no command {name!r}{hint}; rl --help lists them")
    command = COMMANDS[name]
    package = command.module.split(".")[0]
    if find_spec(package) is None:
        _fail(1, f"rl {name}: {package}/ comes with a clone, not with the wheel")
    if command.needs_torch and find_spec("torch") is None:
        _fail(
            1,
            f"rl {name}: torch is not installed beside this Python ({sys.executable}); pip install "
            f"'{DISTRIBUTION}[cuda]' on a machine with a GPU, '{DISTRIBUTION}[cpu]' on another",
        )
    words = ["-m", command.module, *command.before, *arguments, *command.after]
    if command.module.startswith("rl.commands.") and not os.path.samefile(".", HOME):
        words.insert(0, "-P")
    os.execv(sys.executable, [sys.executable, *words])


def _fail(code: int, sentence: str) -> NoReturn:
    print(sentence, file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
