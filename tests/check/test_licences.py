"""Which licences `rl check` prints, and which models `license: 'commercial'` refuses."""

from __future__ import annotations

import re
import shutil
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path

import pytest
import tiny_config
from tiny_config import REPO, WEIGHTS, shipped
from tiny_messages import holds

from rl import build
from rl.check import check_report
from rl.check.compatibility import compatibility_problems, known_models
from rl.config.schema import RunConfig

EDIT, IMAGE_21 = "qwen_image_edit_plus", "qwen_image_21_fewstep"
OTHERS_JUDGE = 'rewards.viescore.judge={"api_base": "http://h:2", "model": "someones/judge"}'
SERVER = 'renderer={"type": "images_api", "api_base": "http://h:1", "model": "someones/editor"}'
ADAPTER = "renderer.lora_path=someones/adapter"


def refused(config: RunConfig) -> list[str]:
    return [text for text in compatibility_problems(build.resolve(config)) if "licence" in text]


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        (EDIT, [], []),
        (EDIT, [OTHERS_JUDGE], ["rewards.viescore.judge.model: ... 'someones/judge' ... see its"]),
        (EDIT, [SERVER], ["renderer.model: ... 'someones/editor' ... see its"]),
        (EDIT, [ADAPTER], ["renderer.lora_path: ... 'someones/adapter' ... licensed_models"]),
        (EDIT, [ADAPTER, 'licensed_models=["someones/adapter"]'], []),
        (EDIT, [ADAPTER, "license=any"], []),
        (IMAGE_21, [], [
            "policy.init_text_encoder_from: ... Turbo",
            "renderer.model_path: ... Qwen Research License, not for commercial use ... models.md",
        ]),
        ("tiny_stock_editor", ['licensed_models=["pkg://tiny_world/weights/klein"]'], [
            "policy.model_path: ... see its card", "judge.model: ... see its card",
        ]),
        ("vlm_reasoning", [], ["policy.model_path: ... 3B-Instruct' ... not for commercial use"]),
        ("prompt_enhancement", [], [
            "renderer.model_path: ... Stability AI Community License, see its card",
            "rewards.clip.model_path: ... see its card",
        ]),
    ],
)  # fmt: skip
def test_a_commercial_run_refuses_each_model_that_is_not_known_to_allow_it(
    name: str, changes: list[str], expected: list[str]
) -> None:
    found = refused(shipped(name, "license=commercial", *changes))
    assert len(found) == len(expected)
    assert all(holds(*pair) for pair in zip(found, expected, strict=True)), found


@pytest.mark.parametrize(
    ("card", "changes", "expected"),
    [
        (None, [], "policy.model_path: ... see its card"),
        ("---\nlicense: apache-2.0\n---\n", [], ""),
        (
            "---\nlicense: other\nlicense_name: mine\n---\n",
            [],
            "policy.model_path: ... mine, see its",
        ),
        ("# license: apache-2.0\n", ['licensed_models=["{}"]'], ""),
    ],
)
def test_a_folder_states_its_licence_in_its_readme_or_the_config_names_it(
    tmp_path: Path, card: str | None, changes: list[str], expected: str
) -> None:
    folder = Path(shutil.copytree(WEIGHTS / "policy", tmp_path / "own"))
    if card is not None:
        (folder / "README.md").write_text(card)
    changes = [f"policy.model_path={folder}", *(change.format(folder) for change in changes)]
    found = refused(shipped("tiny_reasoning", "license=commercial", *changes))
    assert len(found) == bool(expected) and holds(found, expected)


def test_a_plugin_that_names_no_model_is_refused_by_its_type(tmp_path: Path) -> None:
    [found] = refused(tiny_config.validated(tiny_config.nothing(tmp_path, license="commercial")))
    assert holds(found, "policy.type: ... 'tiny_plugins.nothing'")


@pytest.mark.parametrize("name", [EDIT, "prompt_enhancement", "sft_s__rl_s"])
def test_the_report_has_a_line_of_80_columns_for_each_licence(name: str) -> None:
    lines = check_report.report(shipped(name), 80)[0].split("\n")
    start = lines.index("licences") + 1
    block = lines[start : lines.index("placement")]
    assert len(block) >= 3 and max(map(len, block)) <= 80
    assert block[0].split()[0] == "policy.model_path"


def test_the_documents_table_is_the_file_that_is_checked_against() -> None:
    expected = []
    for part, group in groupby(known_models(), itemgetter("part")):
        rows = [{name: cell for name, cell in row.items() if name != "part"} for row in group]
        expected += [" | ".join(rows[0]), *(" | ".join(row.values()) for row in rows)]
        types = {*chain(*build.SHIPPED.values()), "any with pictures"}
        assert all(row["type"] in types for row in rows), part
    shown = re.findall(r"^\| (.*) \|$", (REPO / "docs/models.md").read_text("utf-8"), re.MULTILINE)
    plain = [re.sub(r"^`(\S+)`|(?<= \| )`(\w+)`(?= \|)", r"\1\2", line) for line in shown]
    assert plain == expected
