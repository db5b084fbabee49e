"""Runs mypy on third-party files, strictly and with the repository on its path."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tiny_config import REPO


def typing_errors(files: Sequence[Path], root: Path) -> list[str]:
    """The errors, one per line; `root`: the parent of the files' packages."""
    command = [sys.executable, "-m", "mypy", "--no-error-summary"]
    command += ["--namespace-packages", "--explicit-package-bases"]
    command += [
        "--config-file",
        str(REPO / "pyproject.toml"),
        "--cache-dir",
        str(REPO / ".mypy_cache"),
    ]
    done = subprocess.run(
        [*command, *map(str, files)],
        cwd=REPO,
        env={"MYPYPATH": f"{REPO}:{root}", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = (done.stdout + done.stderr).split("\n")
    return [line for line in lines if "error" in line.lower() and ": note: " not in line]
