"""Measures which test catches each of the faults that it plants in `rl/`, one at a time.

    python -m benchmarks.planted_faults [ID ...] [--tests CHECKOUT] [--jobs 2] [--fast]

Runs the test directories whose files import the changed module, until the first failure: fast tests
first, then (without `--fast`) slow ones. `--tests` uses the tests of another checkout.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FAULTS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
LIMIT_S = 2400
"""Time limit of one pytest process."""


class Outcome(NamedTuple):
    fault: dict[str, Any]
    caught_by: str
    """The id of the first test that failed; '' if none did."""
    seconds: float


def plant(fault: dict[str, Any], tests: Path, folder: Path) -> None:
    """Copies this checkout with one fault, and the tests of the checkout `tests`, into `folder`."""
    tracked = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    for source, has_tests in ((ROOT, False), (tests, True)):
        names = subprocess.run(tracked, cwd=source, capture_output=True, check=True).stdout
        for name in names.decode().split("\0"):
            if name.startswith("tests/") == has_tests and (source / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source / name, folder / name)
    file = folder / fault["file"]
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(fault["old"], fault["new"]), encoding="utf-8")


def test_files_of(fault: dict[str, Any], tests: Path) -> list[str]:
    """Test files that import the faulty module, then the other files of their directories and of
    the directory that tests the module's package."""
    module = fault["file"].removesuffix(".py").replace("/", ".")
    package, _, name = module.rpartition(".")
    imports = re.compile(
        rf"{re.escape(module)}\b|from {re.escape(package)} import [^\n]*\b{name}\b"
    )
    users = [file for file in sorted(tests.rglob("*.py")) if imports.search(file.read_text())]
    helpers = [file.stem for file in users if file.parent.name == "helpers"]
    indirect = re.compile(
        rf"^(?:import|from) (?:{'|'.join(helpers)})\b" if helpers else r"(?!)", re.M
    )
    direct = [file for file in users if file.name.startswith("test_")]
    folders = {file.parent for file in direct} | {tests / fault["file"].split("/")[1]}
    for file in sorted(tests.rglob("test_*.py")):
        if indirect.search(file.read_text()):
            folders.add(file.parent)
    nearest = sorted(folders - {tests}, key=lambda folder: folder.name != fault["folder"])
    others = [file for folder in nearest for file in sorted(folder.glob("test_*.py"))]
    return [str(file.relative_to(tests.parent)) for file in dict.fromkeys([*direct, *others])]


def run_tests(fault: dict[str, Any], tests: Path, tiers: tuple[str, ...]) -> Outcome:
    started = time.monotonic()
    with TemporaryDirectory() as name:
        folder = Path(name)
        plant(fault, tests, folder)
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
                return Outcome(fault, f"nothing in {LIMIT_S} s", time.monotonic() - started)
            failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
            if done.returncode not in (0, 5):
                caught = failed[1] if failed else f"exit status {done.returncode}"
                return Outcome(fault, caught, time.monotonic() - started)
    return Outcome(fault, "", time.monotonic() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description="Which test catches each planted fault.")
    parser.add_argument("ids", nargs="*")
    parser.add_argument("--tests", type=Path, default=ROOT, help="another checkout, for its tests")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--fast", action="store_true", help="without the slow tests")
    args = parser.parse_args()
    tiers = ("not slow",) if args.fast else ("not slow", "slow")
    tests = args.tests.resolve()
    faults = [fault for fault in FAULTS if not args.ids or fault["id"] in args.ids]
    for fault in faults:
        if (ROOT / fault["file"]).read_text(encoding="utf-8").count(fault["old"]) != 1:
            raise SystemExit(f"{fault['id']}: {fault['file']} must contain its 'old' text once")
    print("| fault | in | caught by | s |\n|---|---|---|---|")
    with ThreadPoolExecutor(args.jobs) as pool:
        for fault, caught, seconds in pool.map(lambda f: run_tests(f, tests, tiers), faults):
            where = fault["file"].removeprefix("rl/")
            caught = f"`{caught.removeprefix('tests/')}`" if caught else "**nothing**"
            print(
                f"| {fault['id']}: {fault['what']} | {where} | {caught} | {seconds:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
