"""While a run loads there is a line every few seconds, and none afterwards."""

from __future__ import annotations

import importlib.util
import re
import sys
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


def test_the_line_names_our_module_and_the_package_it_waits_for(tmp_path, monkeypatch) -> None:
    """`rl.try_me` imports `heavy`, which imports `inner`."""
    (tmp_path / "heavy.py").write_text("import inner")
    (tmp_path / "inner.py").write_text(
        "from rl.ranks import main_thread, under_way as loading\n"
        "seen = loading.under_way(main_thread.calls())"
    )
    ours = tmp_path / "rl" / "try_me.py"
    ours.parent.mkdir()
    ours.write_text("import importlib\nimportlib.import_module('heavy')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("rl.__path__", [*importlib.import_module("rl").__path__, str(ours.parent)])
    importlib.import_module("rl.try_me")
    assert sys.modules["inner"].seen == "rl.try_me, in heavy"
    for name in ("rl.try_me", "heavy", "inner"):
        del sys.modules[name]
