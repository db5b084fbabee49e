"""Every promise of `PROMISES.md` names tests that exist."""

from __future__ import annotations

import re

from tiny_config import REPO

TEXT = (REPO / "PROMISES.md").read_text(encoding="utf-8")
ROWS = [
    line.strip("| ").split(" | ")
    for line in TEXT.splitlines()
    if line.startswith("| ") and not line.startswith("| promise |")
]
NOTES = dict(re.findall(r"^\[\^(\d+)\]: (.*)$", TEXT, re.MULTILINE))
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def test_every_promise_names_tests_that_exist() -> None:
    assert len(ROWS) > 30
    functions: dict[str, set[str]] = {}
    for promise, *limits in ROWS:
        [number] = re.findall(r"\[\^(\d+)\]", promise)
        tests = NOTES.pop(number)
        assert NAMED.search(tests), f"no test for {promise!r}"
        for file, name in NAMED.findall(tests + "".join(limits)):
            if file not in functions:
                text = (REPO / file).read_text(encoding="utf-8")
                functions[file] = set(re.findall(r"^def (\w+)", text, re.MULTILINE))
            assert name in functions[file], f"{file}::{name} of {promise!r} does not exist"
            assert name.startswith("test_")
    assert not NOTES, "footnotes without a promise"


def test_the_test_files_named_in_security_exist() -> None:
    files = re.findall(r"tests/[\w/]+\.py", (REPO / "SECURITY.md").read_text(encoding="utf-8"))
    assert files and all((REPO / file).is_file() for file in files)
