"""Users' edits in a JSONL file with real photographs: accepted rows, and messages for bad ones."""

from __future__ import annotations

import json

import pytest
from PIL import Image
from tiny_edits import PHOTO_SIZE, save_photos, write_jsonl
from tiny_messages import holds

from rl.api.data import RowRules
from rl.data.rows import BadRowError
from rl.data.sources import EditJsonl

GOOD = {"image": "china.jpg", "instruction": "make it dusk"}
FLOWER = {"image": "flower.jpg", "instruction": "colour the petals blue"}
MAX_SIDE_PX = 8192
RULES = RowRules("error", MAX_SIDE_PX)


@pytest.fixture
def folder(tmp_path):
    save_photos(tmp_path)
    return tmp_path


def config(path: str, **more) -> EditJsonl.Config:
    return EditJsonl.Config.model_validate({"type": "edit_jsonl", "path": path, **more})


def outcomes(folder, rows, **more) -> tuple[list[str], str, list[str], int]:
    """(problems, the error that is raised, ids kept under 'skip', number of rows skipped)."""
    settings = config(write_jsonl(folder / "edits.jsonl", rows), **more)
    with pytest.raises(BadRowError) as error:
        EditJsonl(settings, RULES)
    problems = str(error.value).split("\n")[:-1]
    kept = EditJsonl(settings, RowRules("skip", MAX_SIDE_PX))
    ids = [kept[index].id for index in range(len(kept))]
    return problems, str(error.value), ids, kept.num_skipped


def test_photographs_and_instructions_become_samples(folder):
    rows = [
        {**GOOD, "id": "p-1", "category": "light", "target_image": "flower.jpg"},
        {**FLOWER, "instruction": "  mache sie \u2028 blau, 把花变蓝  "},
    ]
    settings = config(write_jsonl(folder / "edits.jsonl", rows))
    source = EditJsonl(settings, RULES)
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
    settings = config(write_jsonl(folder / "edits.jsonl", [row]), columns=columns)
    assert EditJsonl.provides(settings) == {"source", "reference", "hidden:solution"}
    sample = EditJsonl(settings, RULES)[0]
    assert (sample.reference, sample.hidden) == ("the sky turns orange", {"solution": 4})
    assert sample.source.size == PHOTO_SIZE


def test_pictures_may_be_elsewhere_and_text_only_rows_need_none(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    path = write_jsonl(other / "edits.jsonl", [GOOD])
    assert len(EditJsonl(config(path, image_folder=str(folder)), RULES)) == 1
    text = config(write_jsonl(other / "t.jsonl", [{"instruction": "2+2?"}]), columns={"source": ""})
    assert EditJsonl.provides(text) == frozenset()
    assert EditJsonl(text, RULES)[0].source is None


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
    problems, raised, ids, num_skipped = outcomes(folder, [{**GOOD, "id": "a"}, row, FLOWER])
    prefix = f"{folder / 'edits.jsonl'}, row 2: "
    assert len(problems) == 1
    assert problems[0].startswith(prefix) and holds(problems[0], message)
    assert raised.startswith(problems[0]) and "data.on_bad_row: 'skip'" in raised
    assert (ids, num_skipped) == (["a", "edits.jsonl:3"], 1)


@pytest.mark.parametrize(
    ("more", "columns", "message"),
    [
        ({}, {"target": "target_image"}, "row 1: ... 'target_image' ... image, instruction"),
        ({"answer": None}, {"hidden": {"gold": "answer"}}, "row 1: hidden.gold: ... null"),
    ],
)
def test_a_column_that_the_config_names_is_required_of_every_row(folder, more, columns, message):
    rows = [{**GOOD, **more}, {**GOOD, "target_image": "flower.jpg", "answer": 0}]
    problems, _, ids, num_skipped = outcomes(folder, rows, columns=columns)
    assert holds(problems[0], message)
    assert (ids, num_skipped) == (["edits.jsonl:2"], 1)


def test_picture_headers_are_checked_at_start(folder):
    (folder / "fake.jpg").write_text("<html>404</html>")
    rows = [{**GOOD, "image": "fake.jpg"}, GOOD]
    settings = config(write_jsonl(folder / "edits.jsonl", rows))
    with pytest.raises(BadRowError, match=r"row 1: source picture .*PNG or JPEG"):
        EditJsonl(settings, RULES)
    with pytest.raises(BadRowError, match=r"row 2: .*640x427 px.*8 to 500 px"):
        EditJsonl(settings, RowRules("error", 500))


def test_damaged_pictures_are_found_at_start(folder):
    """One that is cut off always, other damage if configured. A picture may be followed by more, as
    phones write it."""
    photo = (folder / "china.jpg").read_bytes()
    Image.open(folder / "china.jpg").save(folder / "china.png")
    drawing = (folder / "china.png").read_bytes()
    broken = bytearray(drawing)
    broken[len(drawing) // 2 : len(drawing) // 2 + 9] = b"no pixels"
    files = {
        "half.jpg": photo[: len(photo) // 2],
        "half.png": drawing[: len(drawing) // 2],
        "longer.jpg": photo + b"a film" * 9000,
        "broken.png": bytes(broken),
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    path = write_jsonl(folder / "edits.jsonl", [{**GOOD, "image": name} for name in files])
    with pytest.raises(BadRowError, match=r"row 1: source picture .*half.jpg .*truncated") as error:
        EditJsonl(config(path), RULES)
    assert [line[: line.index(":")] for line in str(error.value).split("\n")[:-1]] == [
        f"{path}, row {row}" for row in (1, 2)
    ]
    late = EditJsonl(config(path), RowRules("skip", MAX_SIDE_PX))
    assert late[0].id == "edits.jsonl:3"
    with pytest.raises(BadRowError, match=r"row 4: source picture .*broken.png"):
        late[1]
    early = EditJsonl(config(path, picture_check="pixels"), RowRules("skip", MAX_SIDE_PX))
    assert (len(early), early.num_skipped) == (1, 3)


def test_a_file_without_usable_rows_is_reported(folder):
    def problem(path, mode="error"):
        with pytest.raises(BadRowError) as error:
            EditJsonl(config(str(path)), RowRules(mode, MAX_SIDE_PX))
        return str(error.value).split("\n")[0]

    assert holds(problem(folder / "gone.jsonl"), "gone.jsonl ... exist")
    (folder / "empty.jsonl").write_text("\n")
    assert holds(problem(folder / "empty.jsonl"), "empty.jsonl ... is empty")
    (folder / "utf16.jsonl").write_text(json.dumps(GOOD), encoding="utf-16")
    assert holds(problem(folder / "utf16.jsonl"), "row 1: ... UTF-8")
    assert "no row is left" in problem(folder / "utf16.jsonl", "skip")


def test_a_long_list_of_problems_is_cut_short(folder):
    settings = config(write_jsonl(folder / "edits.jsonl", ["{"] * 25))
    with pytest.raises(BadRowError) as error:
        EditJsonl(settings, RULES)
    problems = str(error.value).split("\n")
    assert len(problems) == 12
    assert "15 more" in problems[-2]
