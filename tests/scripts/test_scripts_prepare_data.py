"""`rl prepare` tokenizes every row exactly once and leaves no half-written file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_emu3_vq
from tiny_edits import write_jsonl
from tiny_messages import holds
from tiny_pictures import make_picture
from tiny_tokens import save_published

from rl.api.data import RowRules
from rl.data import emu3_tokens
from rl.data.emu3_tokens import read
from rl.renderers.emu3_vq_loop import Emu3Codec
from rl.tools.commands import prepare_data

LIST = "list/tokenized_datalist.json"


@pytest.fixture(scope="module")
def vq_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vq")
    tiny_emu3_vq.make_vq().save_pretrained(folder)
    return folder


def write_edits(folder: Path, num: int, **changes: Any) -> str:
    """Writes `edits.jsonl`: two pictures per row, two sizes; `changes`: 'row1' -> its new keys."""
    folder.mkdir(exist_ok=True)
    rows = []
    for number in range(num):
        for name, seed in (("before", number), ("after", 1000 + number)):
            size = (64, 64) if number % 3 else (96, 48)
            make_picture(seed, *size).save(folder / f"{name}{number}.png")
        rows.append(
            {
                "source": f"before{number}.png",
                "edited": f"after{number}.png",
                "words": f"make it {number}",
                "name": f"edit/{number}",
                "why": f"the box [0, 16, {number}, 24.9] moves",
                "note": None,
            }
            | changes.get(f"row{number}", {})
        )
    return write_jsonl(folder / "edits.jsonl", rows)


def arguments(data: str, vq: str | Path, output: Path, *more: str) -> list[str]:
    return [
        "tokenize",
        *("--dataset-name", data, "--output-path", str(output), "--model-path", str(vq)),
        *("--original-image-key", "source", "--edited-image-key", "edited"),
        *("--edit-instruction-key", "words", "--image-area", "4096"),
        *("--device", "cpu", "--batch-size", "2", *more),
    ]


@pytest.mark.slow
def test_a_tokenised_set_is_read_back_as_a_data_source(vq_folder: Path, tmp_path, capsys) -> None:
    data, output = write_edits(tmp_path / "raw", 5), tmp_path / "mine" / "train"
    more = ("--CoT-keys", "why", "note", "--id-key", "name")
    assert prepare_data.main(arguments(data, vq_folder, output, *more)) == 0
    assert f"{output / LIST}: 5 edits, 0 left out" in capsys.readouterr().out
    config = emu3_tokens.Config(type="emu3_tokens", path=str(output / LIST))
    rows = emu3_tokens.TokenisedEdits(config, RowRules("error", 4096))
    assert [row.id for row in rows] == [f"mine/train/edit/{n}" for n in range(5)]
    assert [row.instruction for row in rows] == [f"make it {n}" for n in range(5)]
    codec = Emu3Codec(tiny_emu3_vq.make_vq())
    for number, row in enumerate(rows):
        size = (64, 64) if number % 3 else (96, 48)
        pictures = [make_picture(seed, *size) for seed in (number, 1000 + number)]
        source, target = codec.encode(pictures, area_px=4096, batch_size=1)
        assert source.shape == ((8, 8) if number % 3 else (5, 11))
        np.testing.assert_array_equal(row.source_codes, source)
        np.testing.assert_array_equal(row.target_codes, target)
    files = json.loads((output / LIST).read_text())
    assert files["path_list"][1] == "edit%2F1.safetensors"
    thoughts = [read(output / "feature" / name).thoughts for name in files["path_list"][:2]]
    # The first picture went from 96x48 to 88x40 px, the second stayed.
    assert thoughts[0] == {"why": "the box [0, 13, 0, 21] moves"}
    assert thoughts[1] == {"why": "the box [0, 16, 1, 25] moves"}


def test_rows_without_ids_are_numbered_and_a_second_start_does_only_what_is_missing(
    vq_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, output = write_edits(tmp_path / "raw", 3), tmp_path / "set" / "train"
    assert prepare_data.main(arguments(data, vq_folder, output)) == 0
    files = json.loads((output / LIST).read_text())
    assert files["path_list"] == [f"{n:08d}.safetensors" for n in range(3)]
    assert files["prefix"] == str(output / "feature")
    (output / LIST).unlink()
    (output / "feature" / "00000001.safetensors").unlink()
    encoded: list[int] = []
    encode = prepare_data.encode
    monkeypatch.setattr(
        prepare_data, "encode", lambda *args: encoded.extend(args[-1]) or encode(*args)
    )
    assert prepare_data.main(arguments(data, vq_folder, output)) == 0
    assert encoded == [1]
    assert json.loads((output / LIST).read_text()) == files


def test_bad_rows_are_an_error_or_left_out(vq_folder: Path, tmp_path, capsys) -> None:
    data = write_edits(tmp_path / "raw", 5, row1={"edited": "gone.png"}, row2={"words": ""})
    cut = tmp_path / "raw" / "after4.png"  # an error only when the file is decoded
    content = cut.read_bytes()
    middle = len(content) // 2
    cut.write_bytes(content[:middle] + bytes(40) + content[middle + 40 :])
    command = arguments(data, vq_folder, tmp_path / "out")
    assert prepare_data.main(command) == 1
    error = capsys.readouterr().err
    assert holds(error, "row 2: target picture ... gone.png does not exist ... --on-bad-row skip")
    assert not (tmp_path / "out" / LIST).exists()
    assert prepare_data.main([*command, "--on-bad-row", "skip"]) == 0
    parts = "left out: ... row 2: ... gone.png ... row 3: ... after4.png ... corrupt ... 2 edits, 3"
    assert holds(capsys.readouterr().out, parts)
    entries = json.loads((tmp_path / "out" / LIST).read_text())["path_list"]
    assert entries == ["00000000.safetensors", "00000003.safetensors"]


def test_a_refused_tokenisation_names_its_cause(vq_folder: Path, tmp_path, capsys) -> None:
    data, output = write_edits(tmp_path / "raw", 3, row2={"name": "edit/0"}), tmp_path / "out"
    vq, foreign = str(vq_folder), tmp_path / "foreign"
    save_published(foreign / "feature", range(1))
    assert prepare_data.main(arguments(data, vq_folder, output)) == 0
    for command, parts in (
        (arguments(data, vq, output, "--image-area", "1024"), "4096 ... 'image_area': 1024"),
        (arguments(data, vq, foreign), "holds other files"),
        (arguments(data, vq, tmp_path, "--id-key", "name"), "row 3 ... 'edit/0' ... row 1"),
        (arguments(str(tmp_path / "no.jsonl"), vq, tmp_path), "no.jsonl ... neither a file or"),
        (arguments(data, str(tmp_path / "raw"), tmp_path), "--model-path: "),
    ):
        assert prepare_data.main(command) == 1
        assert holds(capsys.readouterr().err, parts)
