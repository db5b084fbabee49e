"""Users' edits in a JSONL file with real photographs: accepted rows, and messages for bad ones."""

from __future__ import annotations

import json

import pytest
from PIL import Image
from tiny_edits import PHOTO_SIZE, complaint, edits, save_photos
from tiny_messages import holds

from rl.api.data import RowRules
from rl.data.sources import EditJsonl

GOOD = {"image": "china.jpg", "instruction": "make it dusk"}
FLOWER = {"image": "flower.jpg", "instruction": "colour the petals blue"}
SKIP = RowRules("skip")


@pytest.fixture
def folder(tmp_path):
    save_photos(tmp_path)
    return tmp_path


def outcomes(folder, rows, **more) -> tuple[str, list[str], int]:
    """(the error that is raised, ids kept under 'skip', number of rows skipped)."""
    kept = edits(folder, rows, SKIP, **more)
    ids = [kept[index].id for index in range(len(kept))]
    return complaint(edits, folder, rows, **more), ids, kept.num_skipped


def test_photographs_and_instructions_become_samples(folder):
    rows = [
        {**GOOD, "id": "p-1", "category": "light", "target_image": "flower.jpg"},
        {**FLOWER, "instruction": "  mache sie \u2028 blau, 把花变蓝  "},
    ]
    source = edits(folder, rows)
    assert (len(source), source.num_skipped) == (2, 0)
    first, second = source[0], source[1]
    assert (first.id, first.instruction, first.category) == ("p-1", "make it dusk", "light")
    assert first.source.size == first.target.size == PHOTO_SIZE
    assert first.source.tobytes() != first.target.tobytes()
    assert (second.id, second.category, second.target) == ("edits.jsonl:2", "", None)
    assert second.instruction == "mache sie \u2028 blau, 把花变蓝"


def test_columns_can_have_other_names(folder):
    row = {
        "in": {"picture": ["flower.jpg", "china.jpg"]},
        "ask": "make it dusk",
        "right": "the sky turns orange",
        "answer": 4,
    }
    columns = {
        "source": "in.picture.1",
        "instruction": "ask",
        "reference": "right",
        "hidden": {"solution": "answer"},
    }
    source = edits(folder, [row], columns=columns)
    assert EditJsonl.provides(source.config) == {"source", "reference", "hidden:solution"}
    sample = source[0]
    assert (sample.reference, sample.hidden) == ("the sky turns orange", {"solution": 4})
    assert sample.source.size == PHOTO_SIZE


def test_pictures_may_be_elsewhere_and_text_only_rows_need_none(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    assert len(edits(other, [GOOD], image_folder=str(folder))) == 1
    text = edits(other, [{"instruction": "2+2?"}], columns={"source": ""})
    assert EditJsonl.provides(text.config) == frozenset()
    assert text[0].source is None


BAD_ROWS = {
    "no picture": ({"instruction": "x"}, "no 'image' ... instruction"),
    "missing picture": ({**GOOD, "image": "gone.jpg"}, "gone.jpg ... exist ... relative paths"),
    "no instruction": ({"image": "china.jpg"}, "no 'instruction' ... image"),
    "empty instruction": ({**GOOD, "instruction": " \t"}, "'instruction' ... empty"),
    "instruction no text": ({**GOOD, "instruction": 7}, "'instruction' ... 7 ... text"),
    "missing target": ({**GOOD, "target_image": "gone.jpg"}, "target picture ('target_image')"),
    "duplicate id": ({**FLOWER, "id": "a"}, "id 'a' ... row 1"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_named_with_file_row_and_fix_or_skipped(folder, case):
    row, message = BAD_ROWS[case]
    raised, *kept = outcomes(folder, [{**GOOD, "id": "a"}, row, FLOWER])
    [problem, remedy] = raised.split("\n")
    assert problem.startswith(f"{folder / 'edits.jsonl'}, row 2: ") and holds(problem, message)
    assert "data.on_bad_row: 'skip'" in remedy
    assert kept == [["a", "edits.jsonl:3"], 1]


@pytest.mark.parametrize(
    ("more", "columns", "message"),
    [
        ({}, {"target": "target_image"}, "row 1: ... 'target_image' ... image, instruction"),
        ({"answer": None}, {"hidden": {"gold": "answer"}}, "row 1: hidden.gold: ... null"),
    ],
)
def test_a_column_that_the_config_names_is_required_of_every_row(folder, more, columns, message):
    rows = [{**GOOD, **more}, {**GOOD, "target_image": "flower.jpg", "answer": 0}]
    raised, *kept = outcomes(folder, rows, columns=columns)
    assert holds(raised.split("\n")[0], message)
    assert kept == [["edits.jsonl:2"], 1]


def test_picture_sizes_are_checked_at_start(folder):
    message = complaint(edits, folder, [GOOD], RowRules("error", 500))
    assert holds(message, "row 1: ... 640x427 px ... 8 to 500 px")


def test_damaged_pictures_are_found_at_start(folder):
    """One that is cut off always, other damage if configured. A picture may be followed by more, as
    phones write it."""
    photo = (folder / "china.jpg").read_bytes()
    Image.open(folder / "china.jpg").save(folder / "china.png")
    drawing = (folder / "china.png").read_bytes()
    middle = len(drawing) // 2
    files = {
        "half.jpg": photo[: len(photo) // 2],
        "half.png": drawing[:middle],
        "longer.jpg": photo + b"a film" * 9000,
        "broken.png": drawing[:middle] + b"no pixels" + drawing[middle + 9 :],
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    rows = [{**GOOD, "image": name} for name in files]
    first, second, _ = complaint(edits, folder, rows).split("\n")
    assert holds(first, "row 1: source picture ... half.jpg ... truncated")
    assert "row 2: " in second
    late = edits(folder, rows, SKIP)
    assert late[0].id == "edits.jsonl:3"
    assert holds(complaint(lambda: late[1]), "row 4: source picture ... broken.png")
    early = edits(folder, rows, SKIP, picture_check="pixels")
    assert (len(early), early.num_skipped) == (1, 3)


def test_a_file_without_usable_rows_is_reported(folder):
    (folder / "empty.jsonl").write_text("\n")
    (folder / "utf16.jsonl").write_text(json.dumps(GOOD), encoding="utf-16")
    for name, mode, message in (
        ("gone.jsonl", "error", "gone.jsonl ... exist"),
        ("empty.jsonl", "error", "empty.jsonl ... is empty"),
        ("utf16.jsonl", "error", "row 1: ... UTF-8"),
        ("utf16.jsonl", "skip", "no row is left"),
    ):
        config = EditJsonl.Config(type="edit_jsonl", path=str(folder / name))
        raised = complaint(EditJsonl, config, RowRules(mode))
        assert holds(raised.split("\n")[0], message), raised


def test_a_long_list_of_problems_is_cut_short(folder):
    problems = complaint(edits, folder, ["{"] * 25).split("\n")
    assert len(problems) == 12
    assert "15 more" in problems[-2]
