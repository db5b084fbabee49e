"""A hostile row affects no other row: named under 'error', left out and counted under 'skip'."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet
from tiny_edits import complaint, write_jsonl
from tiny_messages import holds

from rl.api.data import RowRules
from rl.api.types import UnusableSampleError
from rl.data.sources import EditJsonl, HfDataset, Prompts

DEEP = "[" * 100_000 + "]" * 100_000
GOOD = {"image": "ok.png", "instruction": "make it dusk"}
HOSTILE: dict[str, tuple[bytes, str]] = {
    "half a character": (rb'{"image":"ok.png","instruction":"\ud800"}', "half a character"),
    "half an id": (rb'{"image":"ok.png","instruction":"x","id":"\udfff"}', "half a character"),
    "half a label": (rb'{"image":"ok.png","instruction":"x","category":"\ud800"}', "half a char"),
    "half a key": (rb'{"\ud800":1}', r"has no 'instruction'; it has \ud800"),
    "half a path": (rb'{"image":"\ud800","instruction":"x"}', "is not a name that a file can have"),
    "NUL in a path": (rb'{"image":"a\u0000b","instruction":"x"}', "not a name that a file can"),
    "long path": (json.dumps(GOOD | {"image": "p" * 5000}).encode(), "(File name too long)"),
    "long folders": (json.dumps(GOOD | {"image": "p/" * 2500}).encode(), "(File name too long)"),
    "deep": (f'{{"image":{DEEP},"instruction":"x"}}'.encode(), "is not JSON"),
    "long number": (b'{"image":"ok.png","instruction":"x","id":' + b"9" * 5000 + b"}", "5000 digi"),
    "a folder": (b'{"image":".","instruction":"x"}', "is a folder, not a file"),
    "a pipe": (b'{"image":"pipe.png","instruction":"x"}', "is a device or a pipe, not a file"),
    "a device": (b'{"image":"/dev/zero","instruction":"x"}', "is a device or a pipe, not a file"),
    "PostScript": (b'{"image":"a.eps","instruction":"x"}', "is none of PNG, JPEG"),
    "no picture": (b'{"image":"text.png","instruction":"x"}', "is none of PNG, JPEG"),
    "empty file": (b'{"image":"empty.png","instruction":"x"}', "is none of PNG, JPEG"),
    "key twice": (
        b'{"image":"ok.png","image":"no.png","instruction":"x"}',
        "no.png does not exist",
    ),
    "bytes": (b'{"image":"ok.png","instruction":"\xff"}', "is not UTF-8"),
    "NULs": (b"\0\0\0", "is not JSON"),
    "UTF-16": ('{"image":"ok.png","instruction":"x"}'.encode("utf-16"), "is not UTF-8"),
    "no object": (b"[]", "is not an object"),
    "wrong types": (b'{"image":{"a":[1]},"instruction":["x"]}', "not text; put it in quotes"),
    "a terminal's": (rb'{"\u001b[2J":1}', r"it has \x1b[2J"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    Image.new("RGB", (32, 32), "red").save(folder / "ok.png")
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\n%%EndComments\n"
    files = {"text.png": b"<html>", "empty.png": b"", "empty.jsonl": b"", "a.eps": eps}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    for name in ("pipe.png", "pipe.jsonl"):
        os.mkfifo(folder / name)
    return folder


def sources(path: Path) -> list[Callable[..., Any]]:
    """(rules) -> each source that reads lines."""
    prompt = {"prompt_key": "instruction", "picture_key": "image"}
    sections = {
        EditJsonl: {"type": "edit_jsonl"},
        HfDataset: {"type": "hf_dataset"},
        Prompts: {"type": "prompts", **(prompt if path.suffix == ".jsonl" else {})},
    }
    return [
        partial(source, source.Config.model_validate(section | {"path": str(path)}))
        for source, section in sections.items()
    ]


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_line_affects_only_itself(folder: Path, kind: str) -> None:
    row, expected = HOSTILE[kind]
    path = folder / "rows.jsonl"
    good = json.dumps(GOOD).encode()
    path.write_bytes(b"\xef\xbb\xbf" + good + b"\r\n" + row.replace(b"\n", b" ") + b"\r\n" + good)
    for source in sources(path):
        text = complaint(source, RowRules("error"))
        assert f"{path}" in text and "row " in text
        assert expected in text or "'instruction' is empty" in text  # tables have every column
        assert len(text) < 1000 and all(c.isprintable() or c == "\n" for c in text)
        kept = source(RowRules("skip"))
        assert (len(kept), kept.num_skipped) == (2, 1)
        assert [kept[index].instruction for index in range(2)] == [GOOD["instruction"]] * 2


def test_an_instruction_may_contain_line_separators(folder: Path) -> None:
    instruction = "a\u2028b\x85c\rd\0e"
    path = write_jsonl(folder / "words.jsonl", [GOOD | {"instruction": instruction}])
    for source in sources(Path(path)):
        assert source(RowRules())[0].instruction == instruction


def test_a_hostile_cell_of_a_table_affects_only_its_row(folder: Path) -> None:
    ends = struct.pack("<4i", 0, 1, 2, 3)
    buffers = [None, pyarrow.py_buffer(ends), pyarrow.py_buffer(b"a\xffb")]
    cells = pyarrow.Array.from_buffers(pyarrow.string(), 3, buffers)
    path = folder / "cells.parquet"
    parquet.write_table(pyarrow.table({"image": ["ok.png"] * 3, "instruction": cells}), path)
    config = HfDataset.Config(type="hf_dataset", path=str(path))
    assert holds(complaint(HfDataset, config, RowRules()), "row 2: ... UnicodeDecodeError")
    kept = HfDataset(config, RowRules("skip"))
    assert [kept[index].instruction for index in range(len(kept))] == ["a", "b"]


@pytest.mark.parametrize(
    "path", ["pipe.jsonl", "x" * 300 + ".jsonl", "p/" * 3000 + ".jsonl", "empty.jsonl"]
)
def test_an_unusable_file_of_rows_is_refused(folder: Path, path: str) -> None:
    for source in sources(folder / path):
        for on_bad_row in ("error", "skip"):
            with pytest.raises(UnusableSampleError):
                source(RowRules(on_bad_row))
