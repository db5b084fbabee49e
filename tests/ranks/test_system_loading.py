"""While a run loads there is a line every few seconds, and none afterwards."""

from __future__ import annotations

import re
import threading
import time

import pytest

from rl.ranks import under_way


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(under_way, "EVERY_S", 0.05)
    yield
    under_way.stop()


def test_lines_come_while_something_loads_and_stop_when_asked(capsys) -> None:
    under_way.start()
    under_way.start()  # twice is once
    assert [thread.name for thread in threading.enumerate()].count("loading") == 1
    time.sleep(0.3)
    under_way.stop()
    lines = capsys.readouterr().out.splitlines()
    assert 3 <= len(lines) <= 7
    assert all(re.fullmatch(r"\[  0 s\] loading: .+", line) for line in lines)
    time.sleep(0.15)
    assert capsys.readouterr().out == ""
    under_way.start()  # and again
    time.sleep(0.15)
    under_way.stop()
    assert capsys.readouterr().out
