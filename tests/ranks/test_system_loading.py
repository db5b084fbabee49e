"""While a run loads, a line is printed every few seconds; none afterwards."""

from __future__ import annotations

import re
import threading
import time

import pytest

from rl.ranks import loading_progress


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loading_progress, "EVERY_S", 0.05)
    yield
    loading_progress.stop()


def test_lines_are_printed_while_loading_until_stop(capsys) -> None:
    loading_progress.start()
    loading_progress.start()  # the second call does nothing
    assert [thread.name for thread in threading.enumerate()].count("loading") == 1
    time.sleep(0.3)
    loading_progress.stop()
    lines = capsys.readouterr().out.splitlines()
    assert 3 <= len(lines) <= 7
    assert all(re.fullmatch(r"\[  0 s\] loading: .+", line) for line in lines)
    time.sleep(0.15)
    assert capsys.readouterr().out == ""
    loading_progress.start()  # it can start again
    time.sleep(0.15)
    loading_progress.stop()
    assert capsys.readouterr().out
