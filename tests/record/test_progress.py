"""Progress lines of long operations: their text, rate and place; short operations print none."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator

import pytest

from rl.progress import Console, PhaseTimer, counted, shown_on, weights_counted


@pytest.fixture
def log(stream: io.StringIO) -> Iterator[io.StringIO]:
    with shown_on(Console(True, stream)):
        yield stream


def count(num: int, each_s: float, clock: list[float], unit: str = "pictures") -> None:
    with counted(unit, num) as counter:
        for _ in range(num):
            clock[0] += each_s
            counter.step()


def test_a_log_gets_lines_at_growing_intervals(clock, log) -> None:
    count(90, 0.1, clock)
    assert log.getvalue() == "", "an operation of a few seconds prints nothing"
    with PhaseTimer().phase("render"):
        count(128, 1.0, clock)
    assert log.getvalue().split("\n") == [
        "  10 of 128 pictures, 1 min 58 s left",
        "  20 of 128 pictures, 1 min 48 s left",
        "  40 of 128 pictures, 88.0 s left",
        "  80 of 128 pictures, 48.0 s left",
        "",
    ]


def test_what_was_done_before_is_no_part_of_the_rate(clock, log) -> None:
    with counted("verdicts", 128, done=28) as counter:
        clock[0] += 20.0
        counter.at(28)
        clock[0] += 30.0
        counter.step(50)
    assert log.getvalue() == "  28 of 128 verdicts\n  78 of 128 verdicts, 50.0 s left\n"


def test_without_a_run_progress_goes_to_standard_error(clock, capsys) -> None:
    count(12, 1.0, clock)
    assert capsys.readouterr() == ("", "  10 of 12 pictures, 2.0 s left\n")


def test_on_a_terminal_progress_is_a_line_below_that_of_the_phase(clock, terminal) -> None:
    console = Console(True, terminal)
    with shown_on(console), PhaseTimer(console).phase("render"), counted("[red]", 8) as counter:
        for _ in range(4):
            clock[0] += 1.0
            counter.step()
        console.say("a line")
        threading.Event().wait(0.6)  # rich redraws four times per second
        shown = terminal.getvalue().rpartition("a line")[2]
    assert "render" in shown and "4 of 8 [red], 4.0 s left" in shown
    assert shown.index("render") < shown.index("4 of 8")


def test_loading_weights_is_counted_and_the_hook_of_transformers_is_restored(clock, log) -> None:
    from transformers.utils import logging

    before = logging.set_tqdm_hook(None)
    logging.set_tqdm_hook(before)
    with weights_counted():
        for _ in logging.tqdm({n: n for n in range(40)}.items(), desc="Loading weights"):
            clock[0] += 1.0
        logging.tqdm(total=3).update(1)  # a bar without an iterable prints nothing
    assert "10 of 40 weights, 30.0 s left" in log.getvalue()
    assert logging.set_tqdm_hook(before) is before
