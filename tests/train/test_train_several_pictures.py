"""Edits with one to three source pictures: JSONL file, training, record, page and `rl edit`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_loop
from PIL import Image
from tiny_editor import assert_same_picture
from tiny_edits import write_jsonl
from tiny_messages import holds, refusal
from tiny_pictures import make_picture
from tiny_report import data_of

from rl.record.run_record import PICTURE_NAME
from rl.tools.commands import edit
from rl.tools.editor import OWN_WORDS, Editor, EditRequest
from rl.tools.page import Page

pytestmark = pytest.mark.slow

SIZES = ((96, 64), (64, 96), (80, 80))
INSTRUCTION = "give the square of picture 1 the colour of the circle in picture 2"
NAMES = ["one", "two", "three", "too many"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several")
    for number, size in enumerate(SIZES, 1):
        make_picture(number, *size).save(folder / f"p{number}.png")
    pictures = (
        {"image": "p1.png"},
        {"images": ["p1.png", "p2.png"]},
        {"images": ["p1.png", "p2.png", "p3.png"]},
        {"images": ["p1.png"] * 4},
    )
    rows = [
        row | {"instruction": INSTRUCTION, "id": name}
        for row, name in zip(pictures, NAMES, strict=True)
    ]
    source = {"type": "edit_jsonl", "path": write_jsonl(folder / "edits.jsonl", rows)}
    config = tiny_loop.without_judge(
        tiny_loop.save_models(folder / "models"),
        folder,
        num_iterations=1,
        prompts_per_iteration=3,
        generations_per_prompt=2,
        data={"train": [source], "validation": [source], "on_bad_row": "skip"},
        evaluation={"every_n_iterations": 1, "num_samples": 3},
    )
    plus = {"type": "qwen_image_edit_plus", "max_pictures": 3, "output_area_px": 96 * 96}
    config["renderer"] |= plus
    ended = tiny_loop.run_forked(tiny_loop.write_config(folder / "config", config))
    assert "1 bad rows of data.train are left out" in ended.stdout
    return folder / "tiny"


def test_every_source_is_recorded_and_a_single_one_has_the_usual_file_name(run_dir: Path) -> None:
    episodes = tiny_loop.episodes_of(run_dir)
    assert {row["sample_id"] for row in episodes} == set(NAMES[:3])
    assert tiny_loop.metrics_of(run_dir)[-1]["data/skipped_rows"] == 1
    assert {row["status"] for row in episodes} == {"scored"}
    for row in episodes:
        number = NAMES.index(row["sample_id"]) + 1
        files = [row["source_file"], *row.get("other_source_files", [])]
        assert ("other_source_files" in row) == (number > 1) and len(files) == number
        stem = files[0].removesuffix("_source.png")
        assert files[1:] == [f"{stem}_source{k}.png" for k in range(2, number + 1)]
        for k, file in enumerate(files):
            assert PICTURE_NAME.fullmatch(Path(file).name), "a rewind would not remove the file"
            source = make_picture(k + 1, *SIZES[k])
            assert np.array_equal(np.asarray(source), np.asarray(Image.open(run_dir / file)))
        # The drawn picture has the aspect of the last source: landscape, portrait, square.
        width, height = Image.open(run_dir / row["image_file"]).size
        assert np.sign(width - height) == (1, -1, 0)[number - 1]


def test_the_editor_reproduces_the_held_out_pictures(run_dir: Path) -> None:
    folder = run_dir / "evaluation" / "it_000001"
    rows = tiny_loop.rows_of(folder / "records.jsonl")
    requests = []
    for row in rows:
        files = [row["source_file"], *row.get("other_source_files", [])]
        assert len(files) == NAMES.index(row["id"]) + 1
        requests.append(EditRequest(INSTRUCTION, [folder / file for file in files], id=row["id"]))
    with Editor.from_run(run_dir, device="cpu") as editor:
        results = list(editor.edit_stream(requests, seed=3, variants=True))
        for result, row in zip(results, rows, strict=True):
            assert result.failure is None
            for ours, file in ((result, "image_file"), (result.variants[OWN_WORDS], "bare_file")):
                assert_same_picture(ours.image, Image.open(folder / row[file]))
        with pytest.raises(ValueError, match=r"4 pictures, but this run accepts 3; give fewer"):
            editor.edit([make_picture(0)] * 4, INSTRUCTION)
        first = make_picture(1, *SIZES[0])
        alone, listed = (editor.edit(pictures, INSTRUCTION) for pictures in (first, [first]))
    assert_same_picture(alone.image, listed.image)
    assert len(listed.sources) == 1


def test_the_page_shows_every_source(run_dir: Path) -> None:
    Page(run_dir).write()
    for name in ("it_000001", "eval_000001"):
        for row in data_of(run_dir, name)["rows"]:
            number = NAMES.index(row["id"]) + 1
            assert row["src"].endswith("_source.png") and ("others" in row) == (number > 1)
            ends = [file.rpartition("_")[2] for file in row.get("others", [])]
            assert ends == [f"source{k}.png" for k in range(2, number + 1)]


def test_rl_edit_takes_several_pictures(run_dir: Path, tmp_path: Path, capsys: Any) -> None:
    pictures = [str(run_dir.parent / f"p{k}.png") for k in (1, 2, 3)]
    options = ["--run", str(run_dir), "--out", str(tmp_path), "--device", "cpu"]
    assert edit.main([*options, *pictures, INSTRUCTION]) == 0
    assert f"{' '.join(pictures)}: {INSTRUCTION}" in capsys.readouterr().out
    record = json.loads((tmp_path / "p1-p2-p3.json").read_text())
    assert [image["image"] for image in record["images"]] == pictures
    assert [tuple(image["shown_size_px"]) for image in record["images"]] == list(SIZES)
    one = Image.open(tmp_path / "p1-p2-p3_sheet.png")
    rows = [
        {"images": [Path(file).name for file in pictures[:2]]},
        {"image": "p1.png", "instruction": "make it red"},
    ]
    path = write_jsonl(run_dir.parent / "more.jsonl", rows)
    assert edit.main([*options, path, INSTRUCTION]) == 0
    assert {"p1-p2.png", "p1.png"} <= {file.name for file in tmp_path.iterdir()}
    assert json.loads((tmp_path / "p1.json").read_text())["image"] == pictures[0]
    assert one.width > Image.open(tmp_path / "p1-p2_sheet.png").width


@pytest.mark.parametrize(
    ("edits", "complaint"),
    [
        (["p1.png", ".", "paint it"], "is a folder ... several arguments"),
        (["p1.png", "make", "it", "red"], "make does not exist ... several arguments"),
        (["p1.png", "p2.png", "p3.png"], "say what to do ... instruction comes last"),
        ({"image": "p1.png", "images": ["p2.png"]}, "row 1: ... both 'image' and 'images'"),
        ({"image": 5}, "row 1: holds 5, not the path"),
        ({"images": ["p1.png", 2]}, "row 1: holds 2, not the path"),
    ],
)
def test_an_invalid_edit_is_refused_with_its_cause(
    run_dir: Path, edits: Any, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_dir.parent)
    if isinstance(edits, dict):
        edits = [write_jsonl(run_dir.parent / "bad.jsonl", [{"instruction": "x"} | edits])]
    assert holds(refusal(edit.main, ["--run", str(run_dir), *edits]), complaint)
