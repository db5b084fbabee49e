"""Whatever a plugin of the user's raises becomes a sentence that names the plugin."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import tiny_config
from tiny_messages import holds

from rl import build
from rl.api import find
from rl.api.data import read_row
from rl.ranks import signals
from rl.rollout import episodes

CODE = """
import os
from tiny_plugins import nothing

def helper(error):
    raise error

class Wishes(nothing.Nix):
    def __getitem__(self, error):
        if error == 0:
            os._exit(7)
        helper(error)

class Base(nothing.Nobody):
    def build_prompt(self, error):
        helper(error)

class Mine(Base):
    pass

class Poster(nothing.Nil):
    def render(self, jobs):
        for job in jobs:
            helper(job)

def loss(error):
    helper(error)
"""
ERRORS = [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError]


@pytest.fixture
def resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> build.Resolved:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "outsider", raising=False)
    (tmp_path / "outsider.py").write_text(CODE)
    source = {"type": "outsider.Wishes"}
    values = tiny_config.nothing(
        tmp_path,
        policy={"type": "outsider.Mine"},
        renderer={"type": "outsider.Poster"},
        data={"train": [source], "validation": [source]},
        algorithm={"loss": "outsider.loss"},
    )
    return build.resolve(tiny_config.validated(values))


CALLS: dict[str, Callable[[Any, BaseException], object]] = {
    "policy: outsider.Mine": lambda outsider, e: outsider.Mine.build_prompt(None, e),
    # A renderer pulls its jobs from a generator of the loop, which calls the policy.
    "policy: outsider.Mine raises": lambda outsider, e: next(
        outsider.Poster.render(None, (outsider.Mine.build_prompt(None, e) for _ in "a"))
    ),
    "renderer: outsider.Poster": lambda outsider, e: next(outsider.Poster.render(None, [e])),
    "data.train.0: outsider.Wishes or data.validation.0: outsider.Wishes": (
        lambda outsider, e: outsider.Wishes.__getitem__(None, e)
    ),
    "algorithm.loss: outsider.loss": lambda outsider, e: outsider.loss(e),
}
"""What the message begins with -> has that plugin raise an error."""


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("name", CALLS)
def test_a_plugins_error_names_the_plugin_the_exception_and_the_line(
    resolved: build.Resolved, capsys: Any, name: str, kind: type[BaseException]
) -> None:
    with pytest.raises(RuntimeError) as raised, build.naming_plugins(resolved):
        CALLS[name](sys.modules["outsider"], kind("boom"))
    message = str(raised.value)
    assert message.startswith(name)
    assert holds(message, f"{kind.__name__} ... boom ... outsider.py, line ")
    assert ("no memory left" in message) == (kind is MemoryError)
    assert signals.sentence(raised.value) == f"this run cannot go on:\n  {message}"
    assert "in helper" in capsys.readouterr().err, "the whole traceback"


def test_errors_of_the_loop_below_a_plugin_are_not_the_plugins(resolved: build.Resolved) -> None:
    """A renderer pulls its jobs, which runs the loop and the policy."""

    def jobs() -> Iterator[Any]:
        yield episodes.raise_if_interrupted(Mock(any=Mock(side_effect=AssertionError("ours"))))

    with pytest.raises(AssertionError, match="ours"), build.naming_plugins(resolved):
        list(sys.modules["outsider"].Poster.render(None, jobs()))


def test_a_message_of_this_package_stays_what_it_is(resolved: build.Resolved) -> None:
    rows: Any = ["no sample"]
    with pytest.raises(ValueError, match=r"^data.train.0: row 0"), build.naming_plugins(resolved):
        read_row(rows, 0, "data.train.0")


def test_ctrl_c_is_no_error_of_a_plugin() -> None:
    with pytest.raises(KeyboardInterrupt):
        find.attempt("a plugin", lambda: signal.default_int_handler(2, None))
