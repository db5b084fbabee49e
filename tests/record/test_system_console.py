"""Console output: phases, the summary line, the closing table; the table of metric names."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from PIL import Image, PngImagePlugin

from rl.files import downscale, png_bytes
from rl.progress import SUMMARY, Console, PhaseTimer, duration
from rl.run.metric_table import METRICS, doc_of, markdown_table


def words(stream: io.StringIO) -> list[list[str]]:
    return [line.split() for line in stream.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (8.25, "8.2 s"),
        (99.9, "99.9 s"),
        (100, "1 min 40 s"),
        (245.4, "4 min 05 s"),
        (3599.9, "1 h 00 min"),
        (11220, "3 h 07 min"),
    ],
)
def test_durations_have_suitable_units(seconds, text):
    assert duration(seconds) == text


def test_phases_are_printed_summed_and_reset_with_each_lap(clock, stream):
    timer = PhaseTimer(Console(True, stream))
    for seconds in (2.0, 3.0):
        with timer.phase("render") as phase:
            phase.note("1/4 pictures")
            clock[0] += seconds
            phase.note("4 pictures [p50 1.2 s]")
    clock[0] += 1.0
    assert timer.lap() == {"time/render_s": 5.0, "time/iteration_s": 6.0}
    with timer.phase("learn"):
        clock[0] += 4.0
    assert timer.lap() == {"time/learn_s": 4.0, "time/iteration_s": 4.0}
    assert words(stream) == [
        ["render", "5.0", "s", "4", "pictures", "[p50", "1.2", "s]"],
        ["learn", "4.0", "s"],
    ]


def test_a_nested_phase_pauses_the_outer_one_and_has_one_line(clock, stream):
    timer = PhaseTimer(Console(True, stream))
    with timer.phase("render") as render:
        clock[0] += 1.0
        for group in (1, 2):
            with timer.phase("condition") as condition:
                condition.note(f"{group} groups")
                clock[0] += 0.5
            clock[0] += 2.0
        render.note("2 pictures")
    assert stream.getvalue() == ""
    assert timer.lap() == {"time/render_s": 5.0, "time/condition_s": 1.0, "time/iteration_s": 6.0}
    assert words(stream) == [
        ["render", "5.0", "s", "2", "pictures"],
        ["condition", "1.0", "s", "2", "groups"],
    ]


class Event:
    """As `torch.cuda.Event` of a GPU with one queue; passed when that is done with earlier work."""

    free_s, num_waits = 0.0, 0

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock

    def record(self, stream: object) -> None:
        self.passed_s = max(Event.free_s, self.clock[0])

    def query(self) -> bool:
        return self.passed_s <= self.clock[0]

    def synchronize(self) -> None:
        Event.num_waits += not self.query()
        self.clock[0] = max(self.clock[0], self.passed_s)

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.passed_s - self.passed_s)


def test_on_a_gpu_a_phase_lasts_as_long_as_its_work(clock, stream, monkeypatch) -> None:
    """The host queues 'condition' and the backward in no time, and never waits inside a phase."""
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(clock))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    timer = PhaseTimer(Console(True, stream), None, "cuda:0")
    with timer.phase("render"):
        with timer.phase("condition"):
            Event.free_s = clock[0] + 3.0
        Event.free_s += 5.0
        clock[0] += 8.0  # the host fetches the picture
    with timer.phase("learn"):
        Event.free_s = clock[0] + 4.0
    with timer.phase("record"):
        clock[0] += 1.0
    assert Event.num_waits == 0 and not stream.getvalue()
    assert timer.lap() == {
        "time/condition_s": 3.0,
        "time/render_s": 5.0,
        "time/learn_s": 4.0,
        "time/record_s": 0.0,
        "time/iteration_s": 12.0,
    }
    printed = [line[:2] for line in words(stream)]
    assert printed == [["render", "5.0"], ["condition", "3.0"], ["learn", "4.0"], ["record", "0.0"]]


def test_the_summary_line_has_reward_speed_and_eta(stream):
    rank_console = Console(True, stream)
    rank_console.iteration(0, 101, {"eval/reward": 0.4, "time/iteration_s": 99.0})
    rank_console.iteration(1, 101, {"time/iteration_s": 10.0})
    rank_console.iteration(
        2,
        101,
        {
            "reward/mean": 0.41234,
            "eval/reward": 0.5,
            "optimizer/grad_norm": 1e-05,
            "status/ungraded": 0.03125,
            "eval/ungraded": 0.0,
            "time/iteration_s": 20.0,
            "renderer/pool_restarts": 1,
        },
    )
    assert stream.getvalue().splitlines() == [
        "[0/101]  held-out 0.4",  # no time of an iteration is known yet
        "[1/101]  10.0 s/it  ETA 16 min 40 s",
        "[2/101]  reward 0.412  held-out 0.5  grad 1e-05  ungraded 3.1%  restarts 1  15.0 s/it  "
        "ETA 24 min 45 s",
    ]


def test_a_lap_has_the_seconds_of_each_phase_and_one_mfu(clock):
    timer = PhaseTimer(flops_per_s=1e12)
    with timer.phase("render"):
        clock[0] += 9.0
    timer.model_flops += 3e12
    clock[0] += 3.0
    metrics = timer.lap()
    assert all(map(doc_of, metrics))
    assert metrics == {"time/render_s": 9.0, "time/iteration_s": 12.0, "work/mfu": 0.25}
    clock[0] += 1.0
    assert timer.lap() == {"time/iteration_s": 1.0}


def test_a_disabled_console_prints_nothing(stream):
    rank_console = Console(False, stream)
    timer = PhaseTimer(rank_console)
    with timer.phase("learn"):
        rank_console.say("hello")
    rank_console.iteration(1, 2, timer.lap())
    assert stream.getvalue() == ""


def test_every_metric_of_the_summary_line_has_a_row():
    assert all(map(doc_of, SUMMARY))


def test_a_metric_name_matches_its_row():
    for name, row in (
        ("reward/mean", "reward/mean"),
        ("reward/part/judge/edit_success", "reward/part/<name>"),
        ("eval/reward/colour", "eval/reward/<category>"),
        ("time/iteration_s", "time/iteration_s"),
        ("time/render_s", "time/<phase>_s"),
    ):
        assert doc_of(name) is METRICS[row]
    assert doc_of("time/_s") is None and doc_of("reward/part/") is None


def test_metrics_md_shows_every_metric() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    fixed = page.partition("## What plugins")[0]
    shown = markdown_table(METRICS).split("\n")[2:]
    assert [row for row in fixed.split("\n") if row.startswith("| `")] == shown[:-1] != []
    assert METRICS["sync/mean_abs_dlogp"].meaning.startswith("mean |log pi_sampler - ")
    assert r"mean \|log pi" in markdown_table(METRICS), "a bar in a cell is escaped"


def test_pictures_are_only_made_smaller_and_keep_their_aspect_ratio():
    assert downscale(Image.new("RGB", (400, 100)), 200).size == (200, 50)
    assert downscale(Image.new("RGB", (3, 1000)), 100).size == (1, 100)
    small = Image.new("RGB", (20, 10))
    assert downscale(small, 200) is small


def test_an_encoded_picture_contains_only_its_pixels(tmp_path):
    image = Image.effect_noise((16, 16), 50).convert("RGBA")
    text = PngImagePlugin.PngInfo()
    text.add_text("owner", "somebody")
    exif = Image.Exif()
    exif[0x010E] = "taken at home"
    image.save(tmp_path / "photo.png", pnginfo=text, icc_profile=b"profile", exif=exif)
    data = png_bytes(Image.open(tmp_path / "photo.png"))
    read = Image.open(io.BytesIO(data))
    assert read.mode == "RGB" and read.tobytes() == image.convert("RGB").tobytes()
    assert read.info == {}
    assert not any(word in data for word in (b"somebody", b"profile", b"home"))
