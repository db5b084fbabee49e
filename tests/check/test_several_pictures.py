"""`--check` checks rows with several source pictures before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_config
from PIL import Image
from tiny_edits import write_jsonl
from tiny_faulty_judge import MODEL, FaultyJudge
from tiny_messages import holds

from rl.check import check_report
from rl.config.schema import RunConfig


def config_of(folder: Path, plugin: str, *overrides: str, **changes: Any) -> RunConfig:
    """Of a file with a row of one picture and a row of three."""
    Image.new("RGB", (32, 32)).save(folder / "a.png")
    pictures = ({"image": "a.png"}, {"images": ["a.png"] * 3})
    rows = [{"instruction": "paint it"} | row for row in pictures]
    source = {"type": "edit_jsonl", "path": write_jsonl(folder / "r.jsonl", rows)}
    data = {"train": [source], "validation": [source]}
    renderer = {"type": plugin, "model_path": f"Qwen/{plugin}"}
    values = tiny_config.real(folder, data=data, renderer=renderer, **changes)
    return tiny_config.validated(tiny_config.changed(values, *overrides))


@pytest.mark.parametrize(
    ("plugin", "change", "remedy"),
    [
        ("qwen_image_edit", "seed=1", "1 ... fewer ... choose a renderer"),
        ("qwen_image_edit_plus", "seed=1", "1 ... fewer ... renderer.max_pictures"),
        ("qwen_image_edit_plus", "renderer.max_pictures=2", "2 ... fewer ... renderer.max_pict"),
    ],
)
def test_more_pictures_than_the_renderer_reads_are_a_bad_row(
    tmp_path: Path, plugin: str, change: str, remedy: str
) -> None:
    text, code = check_report.report(config_of(tmp_path, plugin, change), 141)
    [line] = (line for line in text.splitlines() if "- data.train.0: " in line)
    assert code == 1 and holds(line, f"{tmp_path}/r.jsonl, row 2: ... 3 source ... {remedy}"), line
    skipping = config_of(tmp_path, plugin, change, "data.on_bad_row=skip")
    assert check_report.report(skipping, 141)[1] == 0


def test_the_judge_gets_as_many_pictures_as_a_row_has(tmp_path: Path) -> None:
    with FaultyJudge() as judge:
        section = {"api_base": judge.api_base, "model": MODEL, "image_side_px": 64}
        config = config_of(
            tmp_path, "qwen_image_edit_plus", "renderer.max_pictures=4", judge=section
        )
        check_report.report(config, 141, online=True)
    contents = [request["messages"][0]["content"] for request in judge.requests]
    pictures = [sum("image_url" in part for part in content) for content in contents]
    assert sorted(pictures) == [1, 3 + 1]
