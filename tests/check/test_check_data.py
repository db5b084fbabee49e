"""`rl check` and a start read the rows of all sources before any model is loaded."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tiny_config
from datasets import Dataset
from PIL import Image
from tiny_edits import write_jsonl
from tiny_messages import holds

from rl import build
from rl.check import check_report
from rl.check.check_report import DataReport

GOOD = [
    {"id": c, "image": f"{i}.png", "instruction": f"paint {i} red"} for i, c in enumerate("abcd")
]
HELD_OUT = [{"image": "0.png", "instruction": "paint it blue"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(4):
        Image.new("RGB", (32, 32), (60 * i, 0, 0)).save(tmp_path / f"{i}.png")
    content = (tmp_path / "0.png").read_bytes()
    (tmp_path / "half.png").write_bytes(content[: len(content) // 2])
    (tmp_path / "text.png").write_text("<html>")
    return tmp_path


def resolved_of(
    folder: Path,
    rows: Any,
    held_out: Any = HELD_OUT,
    source: Any = None,
    config: str = "quickstart",
    **data: Any,
) -> build.Resolved:
    """A run of a shipped config, with the rows in a file that `source` reads."""
    source = {"type": "edit_jsonl"} | (source or {})
    train = source | {"path": write_jsonl(folder / "train.jsonl", rows)}
    validation = {"type": "edit_jsonl", "path": write_jsonl(folder / "held_out.jsonl", held_out)}
    data = {"train": [train], "validation": [validation]} | data
    return build.resolve(tiny_config.shipped(config, f"data={json.dumps(data)}"))


def report_of(folder: Path, rows: Any, is_start: bool = False, **more: Any) -> DataReport:
    return check_report.check_data(resolved_of(folder, rows, **more), is_start)


BAD = {
    "no picture": ({"image": "gone.png"}, "gone.png ... exist"),
    "cut off": ({"image": "half.png"}, "half.png ... truncated"),
    "no picture's file": ({"image": "text.png"}, "none of PNG"),
    "empty": ({"instruction": " "}, "'instruction' ... empty"),
    "too long": (
        {"instruction": "paint it " * 99},
        "prompt of sample ... tokens ... 256 ... raise",
    ),
    "no row": ("{", "is not JSON"),
    "repeated id": ({"id": "a"}, "id 'a' ... row 1"),
    "null": ({"instruction": None}, "'instruction' is empty"),
    "number": ({"instruction": 7}, "'instruction' is 7, not text"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_is_found_by_check_and_start_whatever_reads_it(folder: Path, case: str) -> None:
    """`hf_dataset` too, which `rl init` writes."""
    changes, parts = BAD[case]
    row = changes if isinstance(changes, str) else GOOD[2] | changes
    rows = [*GOOD[:2], row, GOOD[3]]
    found = set()
    for kind, is_start in product(("edit_jsonl", "hf_dataset"), (False, True)):
        source = {"type": kind}
        [problem] = report_of(folder, rows, is_start, source=source).problems
        assert holds(problem, f"data.train.0: {folder}/train.jsonl ... row 3: ... {parts}")
        found.add(problem.replace("train.jsonl[train]", "train.jsonl"))
        skipped = report_of(folder, rows, is_start, source=source, on_bad_row="skip")
        assert not skipped.problems and "rows: 3; left out as bad: 1" in skipped.lines[0]
        assert holds(skipped.lines[1], f"train.jsonl ... row 3: ... {parts.split(' ... ')[0]}")
    assert len(found) == 1, found


def test_a_source_that_the_renderer_refuses_is_a_bad_row(folder: Path) -> None:
    """FLUX.2 takes sides of at least 64 px."""
    problems = report_of(folder, GOOD, config="tiny_stock_editor").problems
    assert [holds(problem, "row 1: ... (32, 32) px") for problem in problems] == [True, True]


def test_a_missing_column_split_or_file_of_a_local_data_set_is_found(folder: Path) -> None:
    Dataset.from_list(GOOD).to_parquet(folder / "rows.parquet")
    (folder / "shards").mkdir()
    Dataset.from_list([*GOOD, GOOD[0] | {"id": "e", "image": "gone.png"}]).to_parquet(
        folder / "shards" / "train-0.parquet"
    )
    for keys, parts in (
        ({"path": "rows.parquet", "columns": {"source": "photo"}}, "no column 'photo'; ... image"),
        ({"path": "rows.parquet", "split": "train[:0]"}, "no data"),
        ({"path": "shards", "split": "val"}, "val"),
        ({"path": "shards", "image_folder": str(folder)}, "row 5: source picture ... gone.png"),
        ({"path": "none.parquet"}, "none.parquet: neither a file"),
    ):
        source = {"type": "hf_dataset"} | keys | {"path": f"{folder}/{keys['path']}"}
        [problem] = report_of(folder, GOOD, train=[source]).problems
        assert problem.startswith("data.train.0: ") and holds(problem, parts)


def test_columns_that_nothing_reads_are_named(folder: Path) -> None:
    targets = [row | {"target": "0.png"} for row in GOOD]
    assert holds(report_of(folder, targets, held_out=HELD_OUT).lines[0], "not read: columns target")
    text, code = check_report.report(resolved_of(folder, targets, GOOD).config, 80)
    assert code == 0 and text.endswith("nothing is wrong")


def test_what_was_not_read_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = {"type": "hf_dataset", "path": "nobody/rows"}
    bad = [*GOOD[:3], GOOD[3] | {"image": "half.png", "notes": "sunny"}]
    monkeypatch.setattr(check_report, "MAX_OPENED", 3)
    train = {"type": "edit_jsonl", "path": write_jsonl(folder / "mine.jsonl", bad)}
    report = report_of(folder, GOOD, train=[hub, train])
    assert report.problems == []
    first, _, last = report.lines
    assert holds(
        first, "data.train.1: rows: 4; ... not read: columns notes; ... not read: 1 picture"
    )
    assert holds(last, "data.train.0: not read; a start reads it")
    [problem] = report_of(folder, GOOD, is_start=True, train=[hub, train]).problems
    assert holds(problem, "row 4: ... half.png"), "and the hub is not asked"


def test_ranks_take_over_what_the_start_has_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are checked once, unless the file has changed since."""
    rows = [GOOD[0], "{", *GOOD[1:]]
    resolved = resolved_of(folder, rows, on_bad_row="skip")
    file = folder / "checked.json"
    file.write_text(json.dumps(check_report.check_data(resolved, is_start=True).checked))
    (folder / "0.png").unlink()  # which a second check would find
    monkeypatch.setenv(build.CHECKED_ROWS, str(file))
    [source] = build.build_data(resolved, resolved.train)
    assert (len(source), source.num_skipped) == (4, 1)
    assert [source[i].id for i in (1, 2, 3)] == [row["id"] for row in GOOD[1:]]
    write_jsonl(folder / "train.jsonl", [*rows, GOOD[3] | {"id": "e"}])
    [source] = build.build_data(resolved, resolved.train)
    assert (len(source), source.num_skipped) == (4, 2)
