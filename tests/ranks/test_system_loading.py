"""While a run loads, the launcher prints where its first rank is; nothing afterwards."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rl import simple_launch
from rl.ranks import heartbeat


def test_the_place_is_printed_until_the_run_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "beat.json"
    monkeypatch.setattr(heartbeat, "_heart", heartbeat._Heart())
    with (tmp_path / "log").open("w") as log:
        heartbeat.start(file, log)
        simple_launch._print_loading(4.2, heartbeat.read(file))
        assert re.fullmatch(r"\[  4 s\] loading: \S.*\n", capsys.readouterr().err)
        with heartbeat.phase("generate"):
            simple_launch._print_loading(8.4, heartbeat.read(file))
        simple_launch._print_loading(8.4, heartbeat.read(file))
        simple_launch._print_loading(8.4, heartbeat.read(tmp_path / "none"))
        assert not capsys.readouterr().err
        heartbeat.start(Path("/dev/full"), log)
        assert "WARNING: /dev/full has no room" in capsys.readouterr().err
