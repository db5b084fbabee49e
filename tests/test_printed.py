"""README.md and docs/*.md print nothing that no test runs or reads.

`printed.tsv` has a row for each of their commands, code blocks and commands within sentences: the
page, its first words, its fate, and where or how that comes about. A page's rows are in the order
in which they are run.

    run      it is run as it stands; a block on the standard input of the command in the last column
    parsed   the same, by a command that only reads it
    gpu, network   it needs these: the command in the last column gets it as its arguments; -: none
    shell    cd, export, mkdir: run, for the lines after it
    test     the named test runs or reads it
    named    a sentence names a command or an option
    shown    a drawing
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from tiny_config import REPO
from tiny_loop import environment, made_once
from tiny_pages import printed, serve, words
from tiny_ranks import held_port, spawn

HERE = Path(__file__).parent
FATES = ("run", "parsed", "gpu", "network", "shell", "test", "named", "shown")
PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in (REPO / "docs").glob("*.md"))]


class Row(NamedTuple):
    page: str
    begins: str
    fate: str
    where: str


ROWS = [Row(*line.split("\t"))
        for line in (HERE / "printed.tsv").read_text("utf-8").split("\n") if line]  # fmt: skip


def row_of(page: str, item: str) -> Row:
    matches = [r for r in ROWS if r.page == page and words(item).startswith(r.begins)]
    assert matches, f"no row of printed.tsv for {page}: {item}"
    return max(matches, key=lambda row: len(row.begins))


@pytest.mark.parametrize("page", PAGES)
def test_each_printed_command_and_block_has_one_row(page: str) -> None:
    rows = [row for row in ROWS if row.page == page]
    assert sorted(row_of(page, item) for item in printed(page)) == sorted(rows)
    for row in rows:
        file, _, name = row.where.partition("::")
        is_there = row.fate != "test" or re.search(rf"def {name}\b", (REPO / file).read_text())
        assert row.fate in FATES and is_there, row


def bash(folder: Path, script: str) -> None:
    """Runs it after `printed.sh` in the folder, until the first command that fails."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        ["bash", "-exc", f"source {HERE}/printed.sh\n{script}"], cwd=folder, text=True,
        env=environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}"),
        capture_output=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]


def executed(row: Row, text: str) -> str:
    """The line or lines of bash."""
    return row.where + (f"<'END'\n{text}\nEND" if row.where.endswith("<") else f" {text}")


EXECUTED = [row for row in ROWS
            if row.fate not in ("test", "named", "shown") and row.where != "-"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("page", dict.fromkeys(row.page for row in EXECUTED))
def test_what_a_page_prints_runs_as_it_stands(
    page: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sandbox = made_once(tmp_path_factory, "printed", partial(bash, script=f"make_sandbox {REPO}"))
    shutil.copytree(sandbox, tmp_path, symlinks=True, dirs_exist_ok=True)
    texts = {row_of(page, item): item for item in printed(page)}
    script = "\n".join(executed(row, texts[row]) for row in EXECUTED if row.page == page)
    server = spawn(serve, tmp_path)
    try:
        with held_port() as port:
            bash(tmp_path, script.replace("4878", str(port)).replace(" URL", " http://judge:4877"))
    finally:
        server.kill()
