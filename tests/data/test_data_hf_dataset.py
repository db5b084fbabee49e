"""Local Hugging Face data sets with real photographs."""

from __future__ import annotations

import subprocess
import sys

import datasets
import pytest
from datasets import Dataset, DatasetDict, Features, Image, Value
from tiny_edits import PHOTO_SIZE, complaint, save_photos
from tiny_messages import holds

from rl.api.data import RowRules
from rl.data.sources import HfDataset

COLUMNS = {"instruction": "edit", "source": "before"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`edits.parquet` with embedded pictures; rows 0 and 2 have complexity 8."""
    folder = tmp_path_factory.mktemp("hf")
    datasets.disable_progress_bars()
    save_photos(folder)
    photos = [str(folder / f"{name}.jpg") for name in ("china", "flower", "flower")]
    columns = {
        "before": (Image(), photos),
        "after": (Image(), photos[::-1]),
        "edit": (Value("string"), ["make it dusk", "colour the petals blue", "add a bee"]),
        "complexity": (Value("int64"), [8, 1, 8]),
        "meta": ({"kind": Value("string")}, [{"kind": k} for k in ("light", "colour", "add")]),
    }
    features = Features({name: feature for name, (feature, _) in columns.items()})
    rows = {name: cells for name, (_, cells) in columns.items()}
    dataset = Dataset.from_dict(rows, features=features)
    dataset.save_to_disk(folder / "saved")
    DatasetDict({"train": dataset, "test": dataset.select([1])}).save_to_disk(folder / "splits")
    for file in ("edits.parquet", "shards/train-00000-of-00001.parquet"):
        dataset.to_parquet(folder / file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        yield folder


def config(path, **more) -> HfDataset.Config:
    values = {"type": "hf_dataset", "path": str(path), "columns": COLUMNS, **more}
    return HfDataset.Config.model_validate(values)


def build(path, on_bad_row="error", **more):
    return HfDataset(config(path, **more), RowRules(on_bad_row))


@pytest.mark.parametrize("name", ["edits.parquet", "saved", "splits", "shards"])
def test_every_local_form_is_read(folder, name):
    source = build(folder / name)
    assert (len(source), source.num_skipped) == (3, 0)
    assert [source[i].instruction for i in (0, 2)] == ["make it dusk", "add a bee"]
    assert source[0].id == f"{name}[train]:0"
    assert source[0].source.size == PHOTO_SIZE
    assert (source[0].source.mode, source[0].target) == ("RGB", None)


def test_columns_and_nested_cells_are_read(folder):
    names = {"target": "after", "category": "meta.kind", "hidden": {"level": "complexity"}}
    source = build(folder / "edits.parquet", columns=COLUMNS | names)
    last = source[2]
    assert last.id == "edits.parquet[train]:2"
    assert (last.category, dict(last.hidden)) == ("add", {"level": 8})
    assert last.target.tobytes() == source[0].source.tobytes()
    assert HfDataset.provides(source.config) == {"source", "target", "hidden:level"}


def test_splits_and_slices_are_read(folder):
    assert len(build(folder / "splits", split="test")) == 1
    assert build(folder / "edits.parquet", split="train[2:]")[0].instruction == "add a bee"
    for name, split, message in (
        ("splits", "val", "'val' ... train, test"),
        ("saved", "train[:1]", "no split 'train[:1]' ... slices"),
        ("shards", "val", "val"),
    ):
        assert holds(complaint(build, folder / name, split=split), message)


def test_a_missing_column_is_named_with_the_existing_ones(folder):
    raised = complaint(build, folder / "edits.parquet", columns={"instruction": "prompt"})
    existing = "before, after, edit, complexity, meta"
    assert holds(raised, f"edits.parquet: ... 'prompt', 'image' ... {existing} ... `columns`")


def test_a_missing_data_set_is_reported(folder, monkeypatch):
    for name, parts in (
        ("notes.txt", ".parquet, .arrow, .csv, .json, .jsonl ... '.txt'"),
        ("fake.parquet", str(folder / "fake.parquet")),
    ):
        (folder / name).write_text("x")
        assert holds(complaint(build, folder / name), parts)
        assert HfDataset.is_here(config(folder / name))
    assert not HfDataset.is_here(config("owner/name"))
    assert holds(complaint(build, "owner/name"), "owner/name: ... file or folder")
    monkeypatch.delattr("rl.data.sources._open")  # it would ask the hub for a file's name
    for path in (folder / "gone.parquet", "owner/gone.jsonl", "./owner/gone"):
        assert HfDataset.is_here(config(path))
        assert "gone" in complaint(build, path)


def test_bad_rows_are_named_or_skipped(folder, tmp_path):
    photo = (folder / "china.jpg").read_bytes()
    contents = [photo, b"<html>", photo, None, photo[: len(photo) // 2]]
    cells = [content and {"bytes": content, "path": None} for content in contents]
    features = Features({"before": Image(decode=False), "edit": Value("string")})
    rows = {"before": cells, "edit": ["a", "b", " ", "d", "e"]}
    path = tmp_path / "bad.parquet"
    Dataset.from_dict(rows, features=features).to_parquet(path)
    raised = complaint(build, path).splitlines()
    for line, parts in zip(
        raised,
        (
            "row 2: source picture ('before') ... 6 B ... none of PNG",
            "row 3: ... 'edit' ... empty",
            "row 4: source picture ('before') ... None",
            "row 5: source picture ('before') ... truncated",
            "data.on_bad_row: 'skip'",
        ),
        strict=True,
    ):
        assert holds(line, parts), line
    kept = build(path, "skip")
    assert (len(kept), kept.num_skipped) == (1, 4)


def test_pictures_may_be_paths_or_bytes(folder, tmp_path):
    (tmp_path / "edits.csv").write_text("before,edit\nchina.jpg,make it dusk\n")
    assert build(tmp_path / "edits.csv", image_folder=str(folder))[0].source.size == PHOTO_SIZE
    photo = (folder / "china.jpg").read_bytes()
    Dataset.from_dict({"before": [photo], "edit": ["x"]}).to_parquet(tmp_path / "bytes.parquet")
    assert build(tmp_path / "bytes.parquet")[0].source.size == PHOTO_SIZE


@pytest.mark.slow
def test_lines_are_read_without_datasets(folder):
    (folder / "edits.jsonl").write_text('{"edit": "make it dusk", "before": "china.jpg"}')
    code = (
        "import sys; from rl.api.data import RowRules; from rl.data import sources as h;"
        f"path, columns = {str(folder / 'edits.jsonl')!r}, {COLUMNS};"
        "c = h.HfDatasetConfig(type='hf_dataset', path=path, columns=columns);"
        "assert len(h.HfDataset(c, RowRules('error', 999))) == 1;"
        "assert not {'datasets', 'torch', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
