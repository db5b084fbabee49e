"""A config is a program: one that runs away is ended, with a sentence that names it."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
import tiny_config
from tiny_messages import names

from rl.config import limits
from rl.config.schema import ConfigError, load_config

pytestmark = pytest.mark.slow

TOO_LONG = "longer than 0.5 s ... recursion"


def problem_of(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, {})
    [problem] = caught.value.problems
    return problem


@pytest.mark.parametrize(
    "program",
    [
        "local f(x) = f(x + 1) tailstrict; { a: f(1) }",
        "{ a: std.length(std.range(0, 1e12)) }",
        'local g(n) = if n == 0 then "x" else g(n - 1) + g(n - 1); { a: g(60) }',
    ],
)
def test_a_program_without_end_is_ended(tmp_path, monkeypatch, program: str) -> None:
    monkeypatch.setattr(limits, "MAX_S", 0.5)
    path = tmp_path / "run.jsonnet"
    path.write_text(program)
    before = psutil.Process().children()
    began = time.monotonic()
    assert names(problem_of(path), f"{path}: ... {TOO_LONG}")
    assert time.monotonic() - began < 20
    assert set(psutil.Process().children()) <= set(before), "not waited for"


def test_a_disk_that_does_not_answer_has_an_end_and_a_busy_machine_has_time(monkeypatch) -> None:
    def wait() -> str:
        time.sleep(0.7)  # no CPU time
        return "{}"

    monkeypatch.setattr(limits, "MAX_S", 0.3)
    assert limits.within_limits(wait) == "{}"
    monkeypatch.setattr(limits, "MAX_WAIT_S", 0.3)
    with pytest.raises(limits.RunawayError, match=r"gave nothing in 0\.3 s"):
        limits.within_limits(wait)


def test_memory_and_size_have_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.jsonnet"
    monkeypatch.setattr(limits, "MAX_MEMORY_BYTES", 100 << 20)
    path.write_text("local g(s, n) = if n == 0 then s else g(s + s, n - 1); { a: g('x', 34) }")
    assert names(problem_of(path), f"{path}: ... 0 GB of memory ... recursion")
    monkeypatch.setattr(limits, "MAX_MEMORY_BYTES", 2 << 30)
    monkeypatch.setattr(limits, "MAX_RESULT_BYTES", 1000)
    path.write_text("{ a: std.repeat('x', 2000) }")
    assert names(problem_of(path), f"{path}: ... more than 0 MB")


def test_an_override_is_a_program_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_S", 0.5)
    path = tiny_config.write(tmp_path, tiny_config.nothing(tmp_path))
    program = "local f(x) = f(x) tailstrict; f(1)"
    assert names(problem_of(path, f"seed={program}"), f"{path} ... overrides ... {TOO_LONG}")
