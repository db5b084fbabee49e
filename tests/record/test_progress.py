"""Progress lines of long operations: their text, rate and place; short operations print none."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator

import pytest

from rl import progress
from rl.console import Console
from rl.progress import PhaseTimer, counted, shown_on, weights_counted
from rl.ranks import heartbeat


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """clock[0] is the time, in s."""
    now = [100.0]
    monkeypatch.setattr(progress, "_first_line_s", {})
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    with shown_on(Console(True, stream)):
        yield stream


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def count(num: int, each_s: float, clock: list[float], unit: str = "pictures") -> None:
    with counted(unit, num) as counter:
        for _ in range(num):
            clock[0] += each_s
            counter.step()


def test_a_log_gets_lines_at_growing_intervals_and_a_last_one(clock, log) -> None:
    count(90, 0.1, clock)
    assert log.getvalue() == "", "an operation of a few seconds prints nothing"
    count(128, 1.0, clock)
    assert log.getvalue().split("\n") == [
        "10 of 128 pictures, 1.0/s, 1 min 58 s left",
        "20 of 128 pictures, 1.0/s, 1 min 48 s left",
        "40 of 128 pictures, 1.0/s, 88.0 s left",
        "80 of 128 pictures, 1.0/s, 48.0 s left",
        "128 of 128 pictures after 2 min 08 s",
        "",
    ]


def test_a_line_names_the_phase_even_of_a_timer_without_console(clock, log) -> None:
    timer = PhaseTimer()
    with timer.phase("evaluate"), PhaseTimer().phase("render"):
        count(12, 1.0, clock)
    assert log.getvalue() == "  evaluate / render: 10 of 12 pictures, 1.0/s, 2.0 s left\n"


def test_an_operation_of_every_iteration_prints_its_first_line_later_each_time(clock, log) -> None:
    num_lines = []
    for _ in range(6):
        with PhaseTimer().phase("render"):
            count(90, 1.0, clock)
        num_lines.append(log.getvalue().count("\n"))
        log.truncate(0)
        log.seek(0)
    assert num_lines == [4, 3, 2, 1, 0, 0]
    with PhaseTimer().phase("render"):
        count(90, 9.0, clock)  # slower than before
    assert log.getvalue().split("\n")[0].startswith("  render: 18 of 90 pictures")


def test_without_a_run_progress_goes_to_standard_error(clock, capsys) -> None:
    count(12, 1.0, clock)
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("10 of 12 pictures, ")


def test_on_a_terminal_progress_is_shown_in_the_line_of_the_phase(clock) -> None:
    console = Console(True, Terminal())
    live_texts = []
    with shown_on(console), PhaseTimer(console).phase("render"):
        with counted("[red]", 8) as counter:
            for _ in range(4):
                clock[0] += 1.0
                counter.step()
                live_texts.append(console.live_text)
        live_texts.append(console.live_text)
    third, last = (
        "render: 3 of 8 [red], 1.0/s, 5.0 s left",
        "render: 4 of 8 [red], 1.0/s, 4.0 s left",
    )
    assert live_texts == ["render", "render", third, last, "render"]


def test_while_a_run_loads_its_lines_have_the_progress(clock, log, capsys, monkeypatch) -> None:
    monkeypatch.setattr(heartbeat, "LOADING_EVERY_S", 0.02)
    heartbeat.start_loading()
    try:
        with counted("rows of a.jsonl", 100) as counter:
            for _ in range(20):
                clock[0] += 1.0
                counter.step()
            threading.Event().wait(0.2)
        during = capsys.readouterr().out
        threading.Event().wait(0.1)
        after = capsys.readouterr().out.rstrip("\n").split("\n")[-1]
    finally:
        heartbeat.stop_loading()
    assert ": 20 of 100 rows of a.jsonl, 1.0/s, 80.0 s left\n" in during
    assert "rows of" not in after and log.getvalue() == ""


def test_loading_weights_is_counted_and_the_hook_of_transformers_is_restored(clock, log) -> None:
    from transformers.utils import logging

    before = logging.set_tqdm_hook(None)
    logging.set_tqdm_hook(before)
    with weights_counted():
        for _ in logging.tqdm({n: n for n in range(40)}.items(), desc="Loading weights"):
            clock[0] += 1.0
        logging.tqdm(total=3).update(1)  # a bar without an iterable prints nothing
    assert "10 of 40 weights, 1.0/s, 30.0 s left" in log.getvalue()
    assert logging.set_tqdm_hook(before) is before
