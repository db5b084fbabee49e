"""Rows with several source pictures in a list or in several columns, and messages for bad rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import tiny_config
from datasets import Dataset, Features, List, Value
from PIL import Image
from tiny_edits import complaint, edits
from tiny_messages import holds

from rl import build
from rl.api.data import RowRules
from rl.api.types import Sample
from rl.data.sources import EditJsonl, HfDataset

INSTRUCTION = {"instruction": "paint it"}
COLOURS = {"a": (255, 0, 0), "b": (0, 255, 0), "c": (0, 0, 255)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`a.png` red, `b.png` green, `c.png` blue and of another size, `clear.png` transparent."""
    folder = tmp_path_factory.mktemp("pictures")
    for name, colour in COLOURS.items():
        Image.new("RGB", (48, 16) if name == "c" else (32, 32), colour).save(folder / f"{name}.png")
    Image.new("RGBA", (32, 32), (255, 0, 0, 0)).save(folder / "clear.png")
    Image.new("RGB", (4, 4)).save(folder / "small.png")
    (folder / "text.png").write_bytes(b"<html>")
    return folder


def load(folder: Path, *rows: Any, rules: RowRules | None = None, **config: Any) -> EditJsonl:
    return edits(folder, [INSTRUCTION | row for row in rows], rules, **config)


def colours(sample: Sample) -> list[Any]:
    return [picture.getpixel((0, 0)) for picture in sample.sources]


def numbers(source: EditJsonl) -> list[int]:
    """Of the pictures of each row."""
    return [len(source[index].sources) for index in range(len(source))]


def test_sources_stay_transparent_if_the_renderer_reads_transparency(folder: Path) -> None:
    row = {"images": ["clear.png", "a.png"], "target_image": "clear.png"}
    kept = load(folder, row, rules=RowRules(keeps_transparency=True))[0]
    assert colours(kept) == [(255, 0, 0, 0), (255, 0, 0)]
    assert kept.target is not None and kept.target.getpixel((0, 0)) == (255, 255, 255)
    assert colours(load(folder, row)[0]) == [(255, 255, 255), (255, 0, 0)]
    for config, reads in (("tiny_qwen_image_21", True), ("quickstart", False)):
        resolved = build.resolve(tiny_config.evaluated(config))
        assert build.row_rules(resolved).keeps_transparency == reads


def test_the_pictures_of_a_list_keep_their_order(folder: Path) -> None:
    rows = [{"images": ["b.png", "a.png", "c.png"]}, {"image": "a.png"}, {"images": ["c.png"]}]
    source = load(folder, *rows, {"image": ["a.png", "b.png"], "images": None})
    for index, names in enumerate(("bac", "a", "c", "ab")):
        assert colours(source[index]) == [COLOURS[name] for name in names]
    assert [picture.size for picture in source[0].sources] == [(32, 32), (32, 32), (48, 16)]
    assert "source" in EditJsonl.provides(source.config)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "both": ({"image": "a.png", "images": ["b.png"]},
             "has both 'image' and 'images'; keep one ... `columns`"),
    "second gone": ({"images": ["a.png", "no.png"]}, "source picture 2 ('images') ... no.png"),
    "third no picture": ({"images": ["a.png", "b.png", "text.png"]},
                         "source picture 3 ('images') ... is none of PNG"),
    "second too small": ({"images": ["a.png", "small.png"]}, "source picture 2 ... 4x4 px"),
    "second no path": ({"images": ["a.png", None]}, "source picture 2 ... None, not a picture"),
    "second a list": ({"images": ["a.png", ["b.png"]]}, "source picture 2 ... not a picture"),
    "second a URL": ({"images": ["a.png", "https://x/y.png"]}, "source picture 2 ... is a URL"),
    "second hostile": ({"images": ["a.png", "\x1b[2J"]}, r"source picture 2 ... \x1b[2J"),
    "empty": ({"images": []}, "source picture ('images'): holds [], not a picture"),
    "null": ({"images": None}, "source picture ('images'): holds None, not a picture"),
    "none": ({}, "has no 'image'; it has"),
    "four": ({"images": ["a.png"] * 4},
             "has 4 source pictures, but this run accepts 3; give fewer"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_names_the_row_and_which_picture(folder: Path, case: str) -> None:
    row, complaints = BAD[case]
    good = {"images": ["a.png", "b.png", "c.png"]}
    message = complaint(load, folder, good, row, rules=RowRules(max_pictures=3))
    expected = f"{folder / 'edits.jsonl'}, row 2: ... data.on_bad_row: 'skip' ... {complaints}"
    assert holds(message, expected), message
    kept = load(folder, good, row, good, rules=RowRules("skip", max_pictures=3))
    assert (len(kept), kept.num_skipped) == (2, 1)


def test_the_config_may_name_one_or_several_columns(folder: Path) -> None:
    row = {"scene": "a.png", "object": "b.png", "more": {"all": ["c.png", "a.png"]}}
    listed = load(folder, row, columns={"source": "more.all"})
    assert colours(listed[0]) == [COLOURS["c"], COLOURS["a"]]
    columns = {"source": ["scene", "object"]}
    two = load(folder, row, row | {"object": None}, row | {"object": []}, columns=columns)
    assert numbers(two) == [2, 1, 1]
    assert "source" in EditJsonl.provides(two.config)
    assert "row 1: has no 'object'" in complaint(load, folder, {"scene": "a.png"}, columns=columns)
    null = complaint(load, folder, row | {"scene": None}, columns={"source": ["scene"]})
    assert holds(null, "row 1: source picture ('scene') ... None")
    # A column that the config names wins over the default columns.
    chosen = load(folder, {"image": "a.png", "images": ["b.png"]}, columns={"source": "image"})
    assert colours(chosen[0]) == [COLOURS["a"]]


def test_rows_may_lack_pictures_that_are_optional(folder: Path) -> None:
    columns = {"source": "images", "source_optional": True}
    source = load(folder, {}, {"images": []}, {"images": ["a.png", "b.png"]}, columns=columns)
    assert numbers(source) == [0, 0, 2]
    assert "source" not in EditJsonl.provides(source.config)
    rows = [{"scene": None, "object": None}, {"scene": None, "object": "b.png"}]
    source = load(folder, *rows, columns=columns | {"source": ["scene", "object"]})
    assert [colours(source[index]) for index in range(2)] == [[], [COLOURS["b"]]]


def test_a_column_that_the_policy_reads_cannot_be_hidden() -> None:
    columns = {"source": ["a", "b"], "hidden": {"answer": "b"}}
    with pytest.raises(ValueError, match="policy reads"):
        EditJsonl.Config.model_validate({"type": "edit_jsonl", "path": "x", "columns": columns})


SOURCES = ["images", ["first", "second"], "large", "more.all", ["more.one", "more.last"], "fixed"]


@pytest.mark.parametrize("name", ["edits.parquet", "saved"])
@pytest.mark.parametrize("columns", [{}, *({"source": source} for source in SOURCES)])
def test_pictures_of_a_data_set_may_be_listed_and_nested(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, columns: Any
) -> None:
    """Cells are read as bytes or paths: `datasets` would decode pictures without our checks."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    picture = datasets.Image()
    both = green, blue = [str(folder / f"{letter}.png") for letter in "bc"]
    cells = {
        "images": (List(picture), both),
        "first": (picture, green),
        "second": (picture, blue),
        "large": (datasets.LargeList(picture), both),
        "more": (
            {"all": List(picture), "one": picture, "last": List(picture)},
            {"all": both, "one": green, "last": [blue]},
        ),
        "fixed": (List(picture, length=2), both),
        "instruction": (Value("string"), "paint it"),
    }
    features = Features({key: feature for key, (feature, _) in cells.items()})
    dataset = Dataset.from_dict({key: [cell] for key, (_, cell) in cells.items()}, features)
    dataset.to_parquet(tmp_path / "edits.parquet")
    dataset.save_to_disk(tmp_path / "saved")
    config = HfDataset.Config.model_validate(
        {"type": "hf_dataset", "path": str(tmp_path / name), "columns": columns}
    )
    assert colours(HfDataset(config, RowRules())[0]) == [COLOURS["b"], COLOURS["c"]]
    refused = complaint(HfDataset, config, RowRules(max_pictures=1))
    assert "2 source pictures, but this run accepts 1" in refused
