"""Lists of tokenised edits and their files: published layouts, our format, hostile files."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_edits import complaint
from tiny_messages import holds
from tiny_tokens import fields, published, rename_globals, save_published, write_list

from rl.api.data import RowRules
from rl.data import emu3_tokens
from rl.data.emu3_tokens import TokenisedEdit
from rl.data.rows import UnusableError

SKIP = RowRules("skip")


def load(
    path: str | Path, rules: RowRules | None = None, **more: str
) -> emu3_tokens.TokenisedEdits:
    config = emu3_tokens.Config(type="emu3_tokens", path=str(path), **more)
    return emu3_tokens.TokenisedEdits(config, rules or RowRules())


# --- one file ----------------------------------------------------------------------------------


@pytest.mark.parametrize("numpy", [b"numpy._core", b"numpy.core"])
@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint16])
def test_a_published_file_is_read(tmp_path: Path, dtype: Any, numpy: bytes) -> None:
    stored = fields(7, original_image=fields(7)["original_image"].astype(dtype))
    torch.save(stored, tmp_path / "7.pth")
    rename_globals(tmp_path / "7.pth", b"numpy._core.multiarray", numpy + b".multiarray")
    edit = emu3_tokens.read(tmp_path / "7.pth")
    assert (edit.id, edit.instruction) == ("7", "make it 7")
    assert edit.thoughts == {"thinking": "thought 7"}
    assert edit.source_codes.dtype == edit.target_codes.dtype == np.int32
    np.testing.assert_array_equal(edit.source_codes, stored["original_image"])
    np.testing.assert_array_equal(edit.target_codes, stored["edited_image"])


class Bomb:
    """A pickle that makes a folder when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("style", ["zip", "legacy", "bare pickle"])
def test_a_pickle_that_runs_code_is_refused_and_not_run(tmp_path: Path, style: str) -> None:
    file, mark = tmp_path / "1.pth", tmp_path / "mark"
    hostile = fields(1, CoT={"thinking": Bomb(mark)})
    if style == "bare pickle":
        file.write_bytes(pickle.dumps(hostile))
    else:
        torch.save(hostile, file, _use_new_zipfile_serialization=style == "zip")
    with pytest.raises(UnusableError, match=r"refused .*nothing is run"):
        emu3_tokens.read(file)
    assert not mark.exists()
    with file.open("rb") as stream:
        pickle.load(stream) if style == "bare pickle" else torch.load(file, weights_only=False)
    assert mark.is_dir()  # plain loading does run the code


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"original_image": np.zeros((2, 3, 4), int)}, r"int64 of shape \[2, 3, 4\]"),
        ({"original_image": np.zeros((2, 3))}, "is refused"),
        ({"original_image": np.ones((2, 3), bool)}, "is refused"),
        ({"edited_image": torch.ones(2, 3)}, r"float32 of shape \[2, 3\]"),
        ({"edited_image": np.full((2, 3), -1)}, r"of shape \[2, 3\], not codes >= 0"),
        ({"edited_image": np.zeros((0, 3), int)}, "is refused"),
        ({"instruction": " "}, "its instruction is ' '"),
        ({"instruction": None}, "its instruction is None"),
    ],
)
def test_bad_fields_are_refused(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    torch.save(fields(1, **changes), tmp_path / "1.pth")
    with pytest.raises(UnusableError, match=complaint):
        emu3_tokens.read(tmp_path / "1.pth")


def test_our_format_round_trips_and_a_cut_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a b.safetensors"
    source = np.arange(6, dtype=np.int64).reshape(2, 3).T  # neither contiguous nor int32
    edit = TokenisedEdit("a/b", "zünde an", source, source + 32000, {"why": "…"})
    emu3_tokens.write(file, edit)
    assert [f.name for f in tmp_path.iterdir()] == [file.name]
    loaded = emu3_tokens.read(file)
    assert (loaded.id, loaded.instruction, loaded.thoughts) == ("a/b", "zünde an", {"why": "…"})
    np.testing.assert_array_equal(loaded.source_codes, source)
    assert loaded.target_codes.dtype == np.int32 and loaded.target_codes.max() == 32005
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UnusableError, match="safetensors"):
        emu3_tokens.read(file)


# --- lists -------------------------------------------------------------------------------------


def test_a_sample_carries_codes_and_not_the_thoughts(tmp_path: Path) -> None:
    path = published(tmp_path / "aurora_ag" / "train_256", 3)
    rows = load(path)
    assert len(rows) == 3 and rows.num_skipped == 0
    sample = rows[1]
    assert sample.id == "aurora_ag/train_256/1"
    assert (sample.instruction, sample.category) == ("make it 1", "aurora_ag")
    np.testing.assert_array_equal(sample.source_codes, fields(1)["original_image"])
    np.testing.assert_array_equal(sample.target_codes, fields(1)["edited_image"])
    assert sample.source is sample.target is sample.reference is None and sample.hidden == {}
    assert rows.provides(rows.config) == {"source_codes", "target_codes", "source", "target"}
    labelled = load(path, category="mine")[1]
    assert (labelled.category, labelled.id) == ("mine", sample.id)


@pytest.mark.parametrize(
    ("files", "file_of_list", "prefix"),
    [
        ("set/feature", "set/list", None),
        ("set/feature", "set/list", "/somewhere/of/theirs/feature"),
        ("set/feature", "set/feature/list", None),
        ("set", "set/list", "nowhere"),
        ("elsewhere", "set/list", "{tmp}/elsewhere"),
        ("elsewhere", "set/list", "elsewhere"),
        ("set/list/beside", "set/list", "beside"),
    ],
)
def test_files_are_found_in_both_layouts_with_any_prefix(
    tmp_path: Path, files: str, file_of_list: str, prefix: Any
) -> None:
    entries = save_published(tmp_path / files, range(2))
    more = {} if prefix is None else {"prefix": prefix.format(tmp=tmp_path)}
    path = write_list(tmp_path / file_of_list / "tokenized_datalist.json", entries, **more)
    assert [sample.instruction for sample in load(path)] == ["make it 0", "make it 1"]


def test_a_list_behind_the_old_setups_broken_link_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "validation_22march_256"
    published(folder, 2)
    link = folder / "feature" / "list"
    link.symlink_to("RL_DATASETS/data/validation_22march_256/list")
    assert not link.exists()
    assert len(load(link / "tokenized_datalist.json")) == 2


def test_missing_entries_are_named_or_skipped(tmp_path: Path) -> None:
    first, second, third = save_published(tmp_path / "set/feature", range(3))
    path = write_list(tmp_path / "set/list/l.json", [first, second, "gone.pth", third])
    for rules in (RowRules(), RowRules(opens=1)):
        message = complaint(load, path, rules)
        assert holds(message, "entry 2 ... gone.pth ... exist ... on_bad_row: 'skip'")
    rows = load(path, SKIP)
    assert rows.num_skipped == 1
    assert [sample.instruction for sample in rows] == ["make it 0", "make it 1", "make it 2"]


def test_files_that_are_missing_list_the_folders_tried(tmp_path: Path) -> None:
    path = write_list(tmp_path / "set/list/l.json", ["1.pth"], prefix="/their/disk")
    tried = f"/their/disk ... {tmp_path / 'set'}, ... {tmp_path / 'set/feature'}"
    assert holds(complaint(load, path, SKIP), f"looked in ... {tried}")


def test_a_file_that_breaks_after_the_check_is_named(tmp_path: Path) -> None:
    path, file = published(tmp_path / "set", 2), tmp_path / "set/feature/1.pth"
    rows = load(path)
    file.write_bytes(b"not a file of torch's")
    for read in (lambda: load(path), lambda: rows[1]):
        assert "feature/1.pth: is refused" in complaint(read)
    assert len(load(path, SKIP)) == 1
    file.unlink()
    assert "feature/1.pth: does not exist" in complaint(lambda: rows[1])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a list {"),
        ('{"path_list": [1]}', "is not a list {"),
        ('{"path_list": []}', "is empty"),
        (None, "does not exist ... setup_datasets.sh"),
    ],
)
def test_a_file_that_is_no_list_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "l.json"
    if content is not None:
        file.write_text(content)
    assert holds(complaint(load, file), f"{file} ... {message}")
