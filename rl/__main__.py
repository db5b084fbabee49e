"""Starts `rl <command> ...` as `python -m <module> ...`; imports only the standard library."""

from __future__ import annotations

import difflib
import importlib.metadata
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, NoReturn

DISTRIBUTION = "vlm-edit-rl"
SOURCE_FOLDER = Path(__file__).resolve().parents[1]
"""The folder that contains the package `rl`; it may be the working folder."""


class Command(NamedTuple):
    """A command and its line in `rl --help`."""

    help: str
    module: str
    before: tuple[str, ...] = ()
    """Arguments placed before the user's."""
    after: tuple[str, ...] = ()
    """Arguments placed after the user's."""
    needs_torch: bool = True


_RANK_SCRIPT = str(Path(__file__).with_name("tools") / "commands/check_distributed.py")
COMMANDS = {
    "init": Command(
        "write a config for a system, data, a judge and GPUs",
        "rl.tools.commands.init",
        needs_torch=False,
    ),
    "train": Command("start a run, or resume it", "rl.simple_launch"),
    "check": Command(
        "report what a config would do, and its mistakes",
        "rl.simple_launch",
        before=("--check",),
        needs_torch=False,
    ),
    "plugins": Command(
        "list plugins and the keys of a config, with their meaning",
        "rl.tools.commands.plugins",
        needs_torch=False,
    ),
    "report": Command("report what a run learnt", "rl.tools.commands.report", needs_torch=False),
    "follow": Command(
        "show a run in wandb, TensorBoard, trackio, or on its page",
        "rl.tools.commands.follow",
        needs_torch=False,
    ),
    "edit": Command("edit pictures with a trained policy", "rl.tools.commands.edit"),
    "eval": Command("evaluate a policy on held-out samples", "rl.tools.commands.eval"),
    "score": Command("grade pictures with a config's rewards", "rl.tools.commands.score"),
    "runs": Command("list the runs of a folder", "rl.tools.commands.runs", needs_torch=False),
    "enhance": Command(
        "rewrite prompts with a trained policy", "rl.tools.commands.edit", before=("--only-words",)
    ),
    "launch": Command(
        "print a batch file for Slurm", "rl.tools.commands.launch", needs_torch=False
    ),
    "export": Command(
        "write a trained model as a folder for other tools", "rl.tools.commands.export"
    ),
    "judge": Command("audit a config's judge, or attack it", "rl.tools.commands.audit_judge"),
    "prepare": Command("encode an edit data set as Emu3 codes", "rl.tools.commands.prepare_data"),
    "check-distributed": Command(
        "check that this machine's ranks connect", "rl.simple_launch", after=(_RANK_SCRIPT,)
    ),
    "check-gpu": Command(
        "prove that this machine's GPUs run everything", "rl.tools.commands.check_gpu"
    ),
    "rehearse": Command(
        "run one iteration at real size without a GPU", "rl.tools.commands.rehearse"
    ),
    "bench-gpu": Command("measure real-size models on this GPU", "benchmarks.bench_gpu"),
}


EXAMPLES = """
a first run, on a laptop:
    rl train configs/quickstart.jsonnet
    rl report runs/quickstart
your own:
    rl init my.jsonnet --system edit
    rl check my.jsonnet
    rl train my.jsonnet num_iterations=100 optimizer.learning_rate=2e-5"""


def main() -> NoReturn:
    """Exit code: the command's; 0 for help, 2 for wrong usage, 1 if a package is missing."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name == "help":  # `rl help train` is `rl train --help`
        name, *arguments = [*arguments[:1], "--help"]
    if name in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        lines = [f"  {name:{width}}  {command.help}" for name, command in COMMANDS.items()]
        usage = "usage: rl <command> ...        (rl help <command>: its options, with examples)\n"
        print("\n".join([usage, *lines, EXAMPLES]))
        sys.exit(0)
    if name == "--version":
        print(f"{DISTRIBUTION} {importlib.metadata.version(DISTRIBUTION)}")
        sys.exit(0)
    if name not in COMMANDS:
        matches = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f" (did you mean {matches[0]!r}?)" if matches else ""
        print(f"rl: no command {name!r}{hint}; rl --help lists them", file=sys.stderr)
        sys.exit(2)
    command = COMMANDS[name]
    package = command.module.split(".")[0]
    if find_spec(package) is None:
        sys.exit(f"rl {name}: {package}/ is only in a clone of the repository, not in the wheel")
    if command.needs_torch and find_spec("torch") is None:
        sys.exit(
            f"rl {name}: torch is not installed for this Python ({sys.executable}); pip install "
            f"'{DISTRIBUTION}[cuda]' on a machine with a GPU, '{DISTRIBUTION}[cpu]' on another"
        )
    python_arguments = ["-m", command.module, *command.before, *arguments, *command.after]
    if command.module.startswith("rl.tools.commands.") and not os.path.samefile(".", SOURCE_FOLDER):
        python_arguments.insert(0, "-P")  # they do not import from the working folder
    os.execv(sys.executable, [sys.executable, *python_arguments])


if __name__ == "__main__":
    main()
