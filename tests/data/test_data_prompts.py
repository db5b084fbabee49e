"""The built-in prompts, and a user's own prompts from text and JSONL files."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image
from pydantic import ValidationError

from rl.api.data import RowRules
from rl.api.types import Sample
from rl.check.check_report import unread
from rl.data.rows import BadRowError
from rl.data.sources import Prompts

MAX_SIDE_PX = 8192


def config(**settings: object) -> Prompts.Config:
    return Prompts.Config.model_validate({"type": "prompts", **settings})


def samples(settings: Prompts.Config, on_bad_row: str = "error") -> list[Sample]:
    source = Prompts(settings, RowRules(on_bad_row, MAX_SIDE_PX))
    return [source[index] for index in range(len(source))]


def test_the_built_in_set_is_large_and_balanced() -> None:
    train, held_out, both = (samples(config(split=s)) for s in ("train", "held_out", "all"))
    assert samples(config())[0].id == train[0].id, "the default is the training split"
    assert [sample.id for sample in both] == [sample.id for sample in train + held_out]
    categories = {sample.category for sample in train}
    assert len(categories) == 8 and "unusual_colours" in categories
    for part, per_category in ((train, 24), (held_out, 8)):
        assert len(part) == 8 * per_category
        assert set(Counter(sample.category for sample in part).values()) == {per_category}
        # The first 8 have one prompt of each category, so a short evaluation is balanced.
        assert {sample.category for sample in part[:8]} == categories
        assert all(sample.source is None and sample.reference is None for sample in part)
    assert Prompts.provides(config()) == frozenset()


def test_a_text_file_is_a_prompt_per_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_bytes("\ufeffa cat\r\n\r\n  ein grüner Hund \n".encode())
    loaded = samples(config(path=str(file)))
    assert [sample.instruction for sample in loaded] == ["a cat", "ein grüner Hund"]
    assert len(samples(config(path=str(file), prompt_key="text"))) == 2, "a text file has no keys"
    assert [sample.id for sample in loaded] == ["mine.txt:1", "mine.txt:3"]


def test_a_jsonl_file_may_bring_pictures_and_labels(tmp_path: Path) -> None:
    Image.new("RGB", (32, 24), "red").save(tmp_path / "red.png")
    rows = [
        {"text": "like this, but blue", "photo": "red.png", "id": "p", "category": "colour"},
        {"text": "a cat", "photo": None},
        {"text": "a dog"},
    ]
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    settings = config(path=str(file), prompt_key="text", picture_key="photo")
    first, second, third = samples(settings)
    assert first.source is not None and first.source.size == (32, 24)
    assert (first.id, first.category) == ("p", "colour")
    assert second.source is None and third.source is None
    assert third.id == "mine.jsonl:3"
    without = samples(config(path=str(file), prompt_key="text"))
    assert all(sample.source is None for sample in without)


def test_bad_rows_are_named_or_left_out(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_bytes(b'{"prompt": "a cat"}\n{"promt": "a dog"}\nnot json\n{"prompt": " "}\n')
    settings = config(path=str(file))
    with pytest.raises(BadRowError, match=r"no 'prompt'.* promt") as error:
        samples(settings)
    lines = str(error.value).split("\n")[:-1]
    assert [line.split(", ")[1][:6] for line in lines] == ["row 2:", "row 3:", "row 4:"]
    source = Prompts(settings, RowRules("skip", MAX_SIDE_PX))
    assert (len(source), source.num_skipped) == (1, 3)
    text = tmp_path / "mine.txt"
    text.write_bytes(b"a cat\n\xff\xfe\n")
    with pytest.raises(BadRowError, match="row 2: is not UTF-8"):
        samples(config(path=str(text)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"path": "a.csv"}, "neither .txt nor .jsonl"), ({"split": "test"}, "held_out")],
)
def test_wrong_values_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**settings)


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("split", {"path": "a.txt", "split": "all"}),
        ("prompt_key", {"path": "a.txt", "prompt_key": "text"}),
        ("picture_key", {"picture_key": "photo"}),
    ],
)
def test_keys_without_an_effect_are_named(key: str, settings: dict[str, object]) -> None:
    [problem] = unread(config(**settings), {})
    assert problem.startswith(f"{key}: path is ")
