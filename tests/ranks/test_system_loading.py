"""While a run loads, the place that it is at is printed; nothing afterwards."""

from __future__ import annotations

import re
import threading
import time

import pytest

from rl.ranks import heartbeat


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(heartbeat, "LOADING_EVERY_S", 0.02)
    monkeypatch.setattr(heartbeat, "SAME_S", 0.2)
    yield
    heartbeat.stop_loading()


def test_lines_are_printed_while_loading_until_stop(capsys) -> None:
    heartbeat.start_loading()
    heartbeat.start_loading()  # the second call does nothing
    assert [thread.name for thread in threading.enumerate()].count("loading") == 1
    time.sleep(1.0)
    heartbeat.stop_loading()
    lines = capsys.readouterr().out.splitlines()
    assert 2 <= len(lines) <= 6, "the same place is printed after a while only"
    assert all(re.fullmatch(r"\[  \d s\] loading: .+", line) for line in lines)
    time.sleep(0.15)
    assert capsys.readouterr().out == ""
    heartbeat.start_loading()  # it can start again
    time.sleep(0.15)
    heartbeat.stop_loading()
    assert capsys.readouterr().out
