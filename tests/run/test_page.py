"""A background process refreshes the page, one at a time; its failures are only warnings."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from tiny_messages import holds
from tiny_report import write_run

from rl.run import page_refresh
from rl.run.page_refresh import Page
from rl.tools.commands import report
from rl.tools.report import reading


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replaces Python by a script that records its call and waits until the file `go` exists."""
    script = tmp_path / "python"
    script.write_text(
        f'#!/bin/bash\necho "$*" >>{tmp_path}/calls\n'
        f"while [[ ! -e {tmp_path}/go ]]; do sleep 0.02; done\nexit $(cat {tmp_path}/go)\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return tmp_path


def calls(slow: Path) -> list[str]:
    path = slow / "calls"
    return path.read_text().split("\n")[:-1] if path.exists() else []


def test_a_refresh_does_not_wait_and_only_one_process_runs_at_a_time(slow: Path) -> None:
    page = Page(slow / "run", wanted=True)
    page.refresh()
    while not calls(slow):
        time.sleep(0.01)
    for _ in range(3):
        page.refresh()
    (slow / "go").write_text("0")
    page.close()
    command = f"-m rl.tools.commands.report {slow / 'run'} --refresh"
    assert calls(slow) == [command] * 2, "the process already running, and the last one"


def test_a_run_that_failed_or_was_stopped_does_not_wait_for_the_page(slow: Path) -> None:
    page = Page(slow / "run", wanted=True)
    page.refresh()
    process = page._process
    assert process is not None
    while not calls(slow):
        time.sleep(0.01)
    page.close(finished=False)
    assert process.returncode == -9 and len(calls(slow)) == 1
    unwanted = Page(slow / "run", wanted=False)
    unwanted.refresh()
    unwanted.close()
    assert len(calls(slow)) == 1


@pytest.mark.parametrize(
    ("code", "why"),
    [(1, "exit code 1 ... rl report"), (page_refresh.BUSY, "another report"), (None, "No such")],
)
def test_a_failed_refresh_warns_once(
    slow: Path, monkeypatch, capsys, code: int | None, why: str
) -> None:
    (slow / "go").write_text(str(code))
    if code is None:
        monkeypatch.setattr(sys, "executable", str(slow / "none"))
    page = Page(slow / "run", wanted=True)
    if code is not None:  # `nice` would start, and exit with 127
        page.refresh()
    page.close()
    [warning] = capsys.readouterr().err.splitlines()
    assert holds(warning, f"the page could not be refreshed ... {why}")


def test_a_report_exits_as_busy_while_another_is_written(tmp_path: Path, monkeypatch) -> None:
    run_dir = write_run(tmp_path / "run", num_iterations=1)
    monkeypatch.setattr(reading, "MAX_WAIT_S", 0.1)
    with reading.locked(run_dir / "report"):
        assert report.main([str(run_dir), "--refresh"]) == page_refresh.BUSY


def test_no_process_outlives_the_run(slow: Path, monkeypatch, capsys) -> None:
    """A warning names the command that finishes the page, even after earlier warnings."""
    monkeypatch.setattr(page_refresh, "MAX_WAIT_S", 0.2)
    page = Page(slow / "run", wanted=True)
    page._has_warned = True
    page.close()
    assert page._process is None and len(calls(slow)) == 1
    warning = capsys.readouterr().err
    assert holds(warning, f"0.2 s ... rl report {slow / 'run'}")


def test_a_real_process_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(tmp_path / "run", num_iterations=1)
    page = Page(run_dir, wanted=True)
    page.close()
    assert (run_dir / "report/index.html").is_file()
    assert (run_dir / "logs/report.log").read_text().startswith("  page: ")
    assert capsys.readouterr().err == ""
