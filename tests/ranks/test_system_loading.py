"""While a run loads, the place that it is at is printed; nothing afterwards."""

from __future__ import annotations

import re
import threading
import time

import pytest

from rl.ranks import loading_progress


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loading_progress, "EVERY_S", 0.02)
    monkeypatch.setattr(loading_progress, "SAME_S", 0.2)
    yield
    loading_progress.stop()


def test_lines_are_printed_while_loading_until_stop(capsys) -> None:
    loading_progress.start()
    loading_progress.start()  # the second call does nothing
    assert [thread.name for thread in threading.enumerate()].count("loading") == 1
    time.sleep(1.0)
    loading_progress.stop()
    lines = capsys.readouterr().out.splitlines()
    assert 2 <= len(lines) <= 6, "the same place is printed after a while only"
    assert all(re.fullmatch(r"\[  \d s\] loading: .+", line) for line in lines)
    time.sleep(0.15)
    assert capsys.readouterr().out == ""
    loading_progress.start()  # it can start again
    time.sleep(0.15)
    loading_progress.stop()
    assert capsys.readouterr().out
