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

INSTRUCTION = {"instruction": "paint it"}
ONE, THREE = {"image": "a.png"}, {"images": ["a.png"] * 3}


def config_of(folder: Path, plugin: str, *rows: dict[str, Any], **changes: Any) -> RunConfig:
    Image.new("RGB", (32, 32)).save(folder / "a.png")
    source = {
        "type": "edit_jsonl",
        "path": write_jsonl(folder / "r.jsonl", [INSTRUCTION | r for r in rows]),
    }
    data = {"train": [source], "validation": [source]} | changes.pop("data", {})
    renderer = {"type": plugin, "model_path": f"Qwen/{plugin}"} | changes.pop("renderer", {})
    config = tiny_config.real(folder, data=data, renderer=renderer, **changes)
    return tiny_config.validated(config)


@pytest.mark.parametrize(
    ("plugin", "renderer", "remedy"),
    [
        ("qwen_image_edit", {}, "1 ... fewer ... choose a renderer"),
        ("qwen_image_edit_plus", {}, "1 ... fewer ... renderer.max_pictures"),
        ("qwen_image_edit_plus", {"max_pictures": 2}, "2 ... fewer ... renderer.max_pictures"),
    ],
)
def test_more_pictures_than_the_renderer_reads_are_a_bad_row(
    tmp_path: Path, plugin: str, renderer: dict[str, Any], remedy: str
) -> None:
    text, code = check_report.report(
        config_of(tmp_path, plugin, ONE, THREE, renderer=renderer), 141
    )
    [line] = (line for line in text.splitlines() if "- data.train.0: " in line)
    assert code == 1 and holds(line, f"{tmp_path}/r.jsonl, row 2: ... 3 source ... {remedy}"), line
    skipping = config_of(
        tmp_path, plugin, ONE, THREE, renderer=renderer, data={"on_bad_row": "skip"}
    )
    assert check_report.report(skipping, 141)[1] == 0


def test_the_judge_gets_as_many_pictures_as_a_row_has(tmp_path: Path) -> None:
    with FaultyJudge() as judge:
        config = config_of(
            tmp_path,
            "qwen_image_edit_plus",
            ONE,
            THREE,
            renderer={"max_pictures": 4},
            judge={"api_base": judge.api_base, "model": MODEL, "image_side_px": 64},
        )
        check_report.report(config, 141, online=True)
    contents = [request["messages"][0]["content"] for request in judge.requests]
    pictures = [sum("image_url" in part for part in content) for content in contents]
    assert sorted(pictures) == [1, 3 + 1]
