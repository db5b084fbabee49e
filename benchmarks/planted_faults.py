"""Measures which test catches each of the faults that it plants in `rl/`, one at a time.

    python -m benchmarks.planted_faults [ID ...] [--jobs 2] [--fast]

Runs the tests that import the changed module, those of its folder and then all others, until the
first failure: fast tests first, then (without `--fast`) slow ones.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FAULTS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
LIMIT_S = 2400
"""Time limit of one pytest process."""


def plant(edits: Sequence[Mapping[str, str]], folder: Path) -> None:
    """Copies this checkout into `folder` and changes it; an 'old' text must be there once."""
    tracked = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(tracked, cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, names.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    for edit in edits:
        text = (folder / edit["file"]).read_text(encoding="utf-8")
        if text.count(edit["old"]) != 1:
            raise SystemExit(f"{edit['file']} must contain this once: {edit['old']}")
        text = text.replace(edit["old"], edit["new"])
        (folder / edit["file"]).write_text(text, encoding="utf-8")


def test_files_of(fault: Mapping[str, str], tests: Path) -> list[str]:
    """Those that import the faulty module, those of the folder that tests it, then all others but
    the tests of benchmarks, which look for faults' places."""
    module = fault["file"].removesuffix(".py").replace("/", ".")
    package, _, name = module.rpartition(".")
    imports = re.compile(
        rf"{re.escape(module)}\b|from {re.escape(package)} import [^\n]*\b{name}\b"
    )

    def distance(file: Path) -> tuple[bool, bool, Path]:
        return not imports.search(file.read_text()), file.parent.name != fault["folder"], file

    files = sorted(tests.rglob("test_*.py"), key=distance)
    return [str(file.relative_to(tests.parent)) for file in files if "benchmarks" not in file.parts]


def run_tests(fault: dict[str, Any], tiers: tuple[str, ...]) -> tuple[str, float]:
    """(id of the first test that failed, '' if none did; seconds)."""
    started = time.monotonic()
    with TemporaryDirectory() as name:
        folder = Path(name)
        plant([fault], folder)
        files = test_files_of(fault, folder / "tests")
        for tier in tiers:
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-m", tier, *files]
            try:
                done = subprocess.run(
                    [*command, "-p", "no:cacheprovider", "-p", "no:randomly"],
                    cwd=folder, capture_output=True, text=True, timeout=LIMIT_S,
                    env={**os.environ, "PYTHONPATH": f"{folder}:{folder}/tests/helpers"},
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return f"nothing in {LIMIT_S} s", time.monotonic() - started
            failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
            if done.returncode not in (0, 5):
                caught = failed[1] if failed else f"exit status {done.returncode}"
                return caught, time.monotonic() - started
    return "", time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description="Which test catches each planted fault.")
    parser.add_argument("ids", nargs="*")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--fast", action="store_true", help="without the slow tests")
    args = parser.parse_args()
    tiers = ("not slow",) if args.fast else ("not slow", "slow")
    faults = [fault for fault in FAULTS if not args.ids or fault["id"] in args.ids]
    print("| fault | in | caught by | s |\n|---|---|---|---|")
    with ThreadPoolExecutor(args.jobs) as pool:
        outcomes = pool.map(lambda fault: run_tests(fault, tiers), faults)
        for fault, (caught, seconds) in zip(faults, outcomes, strict=True):
            where = fault["file"].removeprefix("rl/")
            caught = f"`{caught.removeprefix('tests/')}`" if caught else "**nothing**"
            print(
                f"| {fault['id']}: {fault['what']} | {where} | {caught} | {seconds:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
