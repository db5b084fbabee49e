"""A user's own photographs, from a JSONL file through the whole loop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_loop
from PIL import Image
from sklearn.datasets import load_sample_images

pytestmark = pytest.mark.slow


def test_photographs_go_through_the_loop(tmp_path: Path) -> None:
    rows = []
    names = ("china", "flower")
    for name, pixels in zip(names, load_sample_images().images, strict=True):
        Image.fromarray(pixels).save(tmp_path / f"{name}.jpg")
        row = {"image": f"{name}.jpg", "instruction": f"make the {name} brighter", "id": name}
        rows.append(json.dumps(row) + "\n")
    rows.append(json.dumps({"image": "lost.jpg", "instruction": "find me"}) + "\n")
    (tmp_path / "edits.jsonl").write_text("".join(rows))
    config = tiny_loop.config_of(
        tiny_loop.save_models(tmp_path / "models"),
        tmp_path,
        num_iterations=1,
        rewards={"brightness": {"type": "tests.brightness_reward"}},
        judge={},
        data={
            "train": [{"type": "edit_jsonl", "path": str(tmp_path / "edits.jsonl")}],
            "on_bad_row": "skip",
        },
        evaluation={},
    )
    config["renderer"] |= {"output_area_px": 128 * 128}
    tiny_loop.run_forked(tiny_loop.write_config(tmp_path / "config", config))
    run_dir = tmp_path / "tiny"
    metrics = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["iteration"] == 1 and metrics["status/scored"] == 1
    assert metrics["data/skipped_rows"] == 1
    lines = (run_dir / "episodes/it_000001.rank0.jsonl").read_text().splitlines()
    episodes = [json.loads(line) for line in lines]
    assert {episode["sample_id"] for episode in episodes} == set(names)
    source = Image.open(run_dir / episodes[0]["source_file"])
    rendered = Image.open(run_dir / episodes[0]["image_file"])
    assert source.size == (640, 427)
    # The photograph's aspect of 1.5 at 128 x 128 px, rounded to multiples of 32.
    assert rendered.size == (160, 96)
