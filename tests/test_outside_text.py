"""Any text from outside is read, or refused with a message that is safe to print (hypothesis)."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny_config
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rl.api.data import RowRules
from rl.config.schema import ConfigError, load_config
from rl.data.rows import BadRowError
from rl.data.sources import EditJsonl
from rl.files import json_line, read_rows, row_of
from rl.judge import reply
from rl.judge.http import RETRY_AFTER_CAP_S, retry_after_s
from rl.printing import excerpt, plain, scrub
from rl.record import checkpoint
from rl.tools.reading import read_named

few = settings(
    max_examples=30,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
KEY = "sk-0123/456789+ab"
NASTY = ["\x1b[2J", "\u202e", "\u2028", "\x85", "\ud800", "\0", "\r", "\n", "NaN", "[" * 2000, KEY]
LONG = ["9" * 5000, "x" * 5000, "a" * 300, "[" * 300 + "]" * 300]
words = st.one_of(
    st.text(st.characters(codec=None), max_size=20),
    st.sampled_from([*NASTY, *LONG, "/", "..", "-0", "1e999"]),
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), words),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=3)),
    max_leaves=6,
)


def json_like(key: str) -> st.SearchStrategy[str]:
    """JSON with `key`, complete or damaged, or any text."""
    complete = st.builds(lambda value, row: json.dumps({**row, key: value}), values, objects)
    cut = st.builds(lambda text, at: text[: at % (len(text) + 1)], complete, st.integers(0, 200))
    return st.one_of(complete, cut, words, st.builds(lambda a, b: a + b, words, complete))


objects = st.dictionaries(words, values, max_size=3)
bodies = st.one_of(
    st.binary(max_size=60), json_like("score").map(lambda text: text.encode("utf-8", "replace"))
)


@pytest.fixture(autouse=True)
def a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", KEY)


def assert_printable(message: str) -> None:
    """Line feeds are allowed, as messages have several lines."""
    assert all(line.isprintable() for line in message.split("\n")), repr(message)
    assert KEY not in message and len(message) < 20_000


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.mark.slow
@few
@given(json_like("score"), st.integers(1, 3))
def test_a_judges_reply_is_numbers_in_range_or_unreadable(text: str, count: int) -> None:
    readers: list[Callable[[], tuple[float, ...]]] = [
        lambda: reply.read_scores(text, count, 0, 10),
        lambda: reply.read_fields(text, {"score": (0, 10)}),
    ]
    for read in readers:
        try:
            scores = read()
        except reply.UnreadableReplyError as error:
            assert_printable(str(error))
        else:
            assert all(0 <= score <= 10 for score in scores)


@few
@given(bodies, values, words)
def test_a_judges_body_and_headers_are_read_or_refused(
    body: bytes, value: Any, header: str
) -> None:
    chat = json.dumps({"choices": [{"message": {"content": value}}], "data": [{"id": value}]})
    for received in (body, chat.encode()):
        names = reply.served_models(received)
        assert names is None or all(isinstance(name, str) for name in names)
        try:
            reply.read_chat(received)[0].encode()
        except reply.UnreadableReplyError as error:
            assert_printable(str(error))
    seconds = retry_after_s(header)
    assert seconds is None or 0 <= seconds <= RETRY_AFTER_CAP_S


@few
@given(words, words, st.sampled_from([KEY, KEY.replace("/", "\\/"), "sk-0123%2f456789%2bab"]))
def test_any_text_is_shown_and_printed_without_commands_and_keys(a: str, b: str, key: str) -> None:
    line = excerpt(a + key + b, 100)
    assert line.isprintable() and len(line) <= 103
    assert_printable(plain(a + " " + key + " " + b).replace("\t", ""))
    assert key not in scrub(a + key + b)
    assert json.loads(scrub(json.dumps({"said": a + key + b})))


@few
@given(st.lists(st.one_of(objects.map(json.dumps), json_like("instruction")), max_size=3))
def test_rows_become_samples_or_sentences(rows: list[str]) -> None:
    with folder() as directory:
        path = directory / "rows.jsonl"
        path.write_bytes("\n".join(rows).encode("utf-8", "surrogatepass"))
        columns = {"source": "", "target": ""}
        config = EditJsonl.Config.model_validate(
            {"type": "edit_jsonl", "path": str(path), "columns": columns}
        )
        for on_bad_row in ("error", "skip"):
            try:
                kept = EditJsonl(config, RowRules(on_bad_row, 64))
            except BadRowError as error:
                assert_printable(str(error).replace("\n", ""))
            else:
                assert all(kept[index].instruction.strip() for index in range(len(kept)))


sections = ["judge.api_base", "lora.r", "optimizer.betas", "data.train", "policy", "", "run_name"]


@pytest.mark.slow
@settings(few, max_examples=6)
@example("data.train", "[" * 300 + "]" * 300)
@given(st.sampled_from(sections), json_like("type"))
def test_a_config_and_its_overrides_are_a_run_or_problems(key: str, value: str) -> None:
    with folder() as directory:
        good, odd = directory / "good.jsonnet", directory / "odd.jsonnet"
        good.write_text(json.dumps(tiny_config.nothing(directory)))
        text = f"(import 'good.jsonnet') + {{ '{key}': {value} }}"
        odd.write_bytes(text.encode("utf-8", "surrogatepass"))
        for config, overrides in ((odd, []), (good, [f"{key}={value}"])):
            try:
                load_config(config, overrides, {})
            except ConfigError as error:
                assert error.problems


@few
@given(json_like("model.safetensors"), values, words)
def test_a_manifest_is_true_or_the_checkpoint_is_damaged(text: str, size: Any, name: str) -> None:
    with folder() as directory:
        (directory / "model.safetensors").write_bytes(b"1")
        forged = json.dumps(
            {name: {"size": size, "sha256": size}, "lost": {"size": 1, "sha256": 1}}
        )
        for manifest in (text, forged):
            (directory / "manifest.json").write_bytes(manifest.encode("utf-8", "surrogatepass"))
            problem = checkpoint.problem_of(directory)
            if manifest is forged:
                assert problem
            if problem:
                assert_printable(problem)


@few
@given(st.lists(st.one_of(bodies, objects.map(lambda row: json_line(row).encode())), max_size=4))
def test_lines_of_metrics_are_rows_or_named(lines: list[bytes]) -> None:
    good = json_line({"iteration": 7, "reward/mean": 0.5, "said": "".join(NASTY)}).encode()
    with folder() as directory:
        path = directory / "metrics.jsonl"
        path.write_bytes(b"\n".join([*lines, b""]) + good)
        rows, damaged = read_rows(path)
        assert rows[-1]["iteration"] == 7
        num_lines = path.read_bytes().count(b"\n")
        assert num_lines not in damaged and all(1 <= n < num_lines for n in damaged)
        readable = [row for row in read_named(path, "iteration") if "iteration" in row]
        assert readable[-1]["reward/mean"] == 0.5
        assert all(row_of(json_line(row).encode()) is not None for row in rows)
