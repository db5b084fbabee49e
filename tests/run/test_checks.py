"""A run checks each rollout for renderer failures and for training samples that are held out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from PIL import Image
from tiny_messages import raising
from tiny_run import episode, run_config

from rl.algorithm.metrics import Metrics
from rl.api.reward import NO_VALUE
from rl.api.types import Prompt, Sample, Status
from rl.ranks.dist import Dist
from rl.rollout.stream import Rollout
from rl.run.alarms import LEARNING, Watch
from rl.run.checks import Checks, TooManyFailuresError, require_grades


def make_checks(held_out: list[Sample] | None = None, **changes: Any) -> Checks:
    plugin_metrics = MagicMock(take=lambda reported: Metrics())
    return Checks(run_config(**changes), Dist(), held_out or [], plugin_metrics, Watch(LEARNING))


def rollout_of(num_drawn: int, num_lost: int = 0) -> Rollout:
    return Rollout([], [], {}, num_drawn, ["exception: RuntimeError: no kernel"] * num_lost)


@pytest.mark.parametrize(
    ("limit", "iterations", "figures"),
    [
        (0.05, [(1, 1)], ""),  # half of a tiny iteration
        (0.05, [(90, 8)] + [(98, 0)] * 9, ""),  # a batch of eight that broke once
        (0.05, [(96, 4)] * 20, ""),  # always 4 %
        (0.05, [(4, 1), *[(5, 0)] * 3] * 40, ""),  # always 5 %
        (0.05, [(190, 10), (100, 0), (100, 0), (90, 10)], ""),  # old failures do not count
        (0.05, [(0, 0)] * 9, ""),
        (0.05, [(0, 8)] * 2, "16 of the last 16"),  # 8 alone are below 10, 5 % of 200
        (0.05, [(8, 2)] * 6, "12 of the last 60"),
        (0.05, [(90, 10)] * 2, "20 of the last 200"),
        (0.05, [(940, 60)], "60 of the last 1000"),
        (0.0, [(99, 1)], "1 of the last 100"),
    ],
)
def test_a_renderer_that_keeps_failing_stops_the_run(
    limit: float, iterations: list[tuple[int, int]], figures: str
) -> None:
    checks = make_checks(max_render_failure_rate=limit)
    *before, last = iterations
    for iteration in before:
        checks.check_failures(rollout_of(*iteration))
    parts = figures and f"{figures} ... RuntimeError ... max_render_failure_rate"
    with raising(TooManyFailuresError, parts):
        checks.check_failures(rollout_of(*last))


def test_the_share_of_failed_renders_is_logged() -> None:
    assert Dist().reduce(make_checks().metrics(rollout_of(3, 1)))["pictures/not_drawn"] == 0.25
    assert "pictures/not_drawn" not in Dist().reduce(make_checks().metrics(rollout_of(0)))


def plain(grey: int, size: tuple[int, int] = (4, 2)) -> Image.Image:
    return Image.new("RGB", size, (grey, grey, grey))


CODES = np.arange(4, dtype=np.int32).reshape(2, 2)
HELD_OUT = [
    Sample("h0", "paint it", sources=(plain(7), plain(9))),
    Sample("h1", "a red dog"),
    Sample("h2", "turn it", source_codes=CODES),
]


@pytest.mark.parametrize(
    ("sample", "held_out"),
    [
        (Sample("other words", "erase it", sources=(plain(7),)), "h0"),
        (Sample("other first picture", "join them", sources=(plain(5), plain(9))), "h0"),
        (Sample("other picture", "paint it", sources=(plain(8),)), None),
        (Sample("other shape", "paint it", sources=(plain(7, (2, 4)),)), None),
        (Sample("other case and spaces", " A  Red dog"), "h1"),
        (Sample("other prompt", "a red cat"), None),
        (Sample("same codes", "x", source_codes=CODES.astype(np.int64)), "h2"),
        (Sample("other grid", "turn it", source_codes=CODES.reshape(1, 4)), None),
    ],
    ids=lambda value: getattr(value, "id", None),
)
def test_a_training_sample_with_held_out_contents_is_warned_of_once(
    sample: Sample, held_out: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = make_checks(HELD_OUT)
    rollout = Rollout([[episode(prompt=Prompt(sample, (1,)))]], [None])
    for _ in range(2):
        metrics = Dist().reduce(checks.metrics(rollout))
        assert metrics["data/held_out_prompts"] == (held_out is not None)
    stderr = capsys.readouterr().err
    assert stderr.count(f"held-out sample {held_out} has") == (held_out is not None)


@pytest.mark.parametrize(
    ("num_lost", "failure", "is_finished"),
    [
        (1, "mine: outage: no answer for 600 s", True),
        (2, "mine: outage: no answer for 600 s", False),
        (2, "renderer: exception: RuntimeError: no kernel", False),
        (2, "mine: raised ConnectionError: gone", False),
        (2, "mine: unreadable: prose", True),  # a judge that refuses would refuse again
        (2, f"mine: {NO_VALUE}", True),  # nothing to compare it with
    ],
)
def test_an_evaluation_without_most_grades_is_not_finished(
    num_lost: int, failure: str, is_finished: bool
) -> None:
    lost = episode(
        status=Status.UNGRADED, reward=None, failure=failure, unreadable="unreadable" in failure
    )
    context = SimpleNamespace(config=run_config(), compares_pictures=NO_VALUE in failure)
    parts = f"2 of 3 ... evaluation ... {failure[:20]} ... repeats this"
    with raising(TooManyFailuresError, "" if is_finished else parts):
        require_grades(context, [*[lost] * num_lost, episode()], Dist())
