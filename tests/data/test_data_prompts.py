"""The built-in prompts, and a user's own prompts from text and JSONL files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from PIL import Image
from pydantic import ValidationError
from tiny_edits import complaint, write_jsonl
from tiny_messages import holds

from rl.api.data import RowRules
from rl.api.types import Sample
from rl.check.check_report import unread
from rl.data.sources import Prompts


def config(**settings: object) -> Prompts.Config:
    return Prompts.Config.model_validate({"type": "prompts", **settings})


def samples(**settings: object) -> list[Sample]:
    source = Prompts(config(**settings), RowRules())
    return [source[index] for index in range(len(source))]


def test_the_built_in_set_is_large_and_balanced() -> None:
    train, held_out, both = (samples(split=s) for s in ("train", "held_out", "all"))
    assert samples()[0].id == train[0].id, "the default is the training split"
    assert [sample.id for sample in both] == [sample.id for sample in train + held_out]
    categories = {sample.category for sample in train}
    assert len(categories) == 8 and "unusual_colours" in categories
    for part, per_category in ((train, 24), (held_out, 8)):
        assert Counter(sample.category for sample in part) == dict.fromkeys(
            categories, per_category
        )
        # The first 8 have one prompt of each category, so a short evaluation is balanced.
        assert {sample.category for sample in part[:8]} == categories
        assert all(sample.source is None and sample.reference is None for sample in part)
    assert Prompts.provides(config()) == frozenset()


def test_a_text_file_is_a_prompt_per_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_bytes("\ufeffa cat\r\n\r\n  ein grüner Hund \n".encode())
    loaded = [(sample.instruction, sample.id) for sample in samples(path=str(file))]
    assert loaded == [("a cat", "mine.txt:1"), ("ein grüner Hund", "mine.txt:3")]
    assert len(samples(path=str(file), prompt_key="text")) == 2, "a text file has no keys"


def test_a_jsonl_file_may_bring_pictures_and_labels(tmp_path: Path) -> None:
    Image.new("RGB", (32, 24), "red").save(tmp_path / "red.png")
    rows = [
        {"text": "like this, but blue", "photo": "red.png", "id": "p", "category": "colour"},
        {"text": "a cat", "photo": None},
        {"text": "a dog"},
    ]
    path = write_jsonl(tmp_path / "mine.jsonl", rows)
    first, second, third = samples(path=path, prompt_key="text", picture_key="photo")
    assert first.source is not None and first.source.size == (32, 24)
    assert (first.id, first.category) == ("p", "colour")
    assert second.source is None and third.source is None
    assert third.id == "mine.jsonl:3"
    assert all(sample.source is None for sample in samples(path=path, prompt_key="text"))


def test_bad_rows_are_named_or_left_out(tmp_path: Path) -> None:
    rows = [{"prompt": "a cat"}, {"promt": "a dog"}, "not json", {"prompt": " "}]
    settings = {"path": write_jsonl(tmp_path / "mine.jsonl", rows)}
    lines = complaint(samples, **settings).split("\n")[:-1]
    assert holds(lines[0], "no 'prompt' ... promt")
    assert [line.split(", ")[1][:6] for line in lines] == ["row 2:", "row 3:", "row 4:"]
    source = Prompts(config(**settings), RowRules("skip"))
    assert (len(source), source.num_skipped) == (1, 3)
    text = tmp_path / "mine.txt"
    text.write_bytes(b"a cat\n\xff\xfe\n")
    assert "row 2: is not UTF-8" in complaint(samples, path=str(text))


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
