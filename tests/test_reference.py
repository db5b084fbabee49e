"""`rl plugins` and docs/reference.md list every key of plugins and sections, with its meaning."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tiny_config import REPO
from tiny_messages import holds

from rl.build import SHIPPED
from rl.tools.commands.plugins import groups, main

ENTRIES = {name: entry for entries in groups().values() for name, entry in entries.items()}
PLUGIN = '''"""A reward with a key."""
from pydantic import Field
from rl.api.plugin import PluginConfig
from rl.api.reward import Reward

class Config(PluginConfig):
    power: float = Field(1.0, gt=0, le=4)

class Mine(Reward[Config]):
    """Grades nothing. At all."""
    needs = {"answer", "image"}

    def grade(self, reward_input):
        return 0.0

def plain(x):
    """A function."""
    return 0.0
'''


def test_the_page_of_reference_is_what_rl_plugins_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (REPO / "docs/reference.md").read_text(encoding="utf-8")
    assert main(["--markdown"]) == 0
    assert page == capsys.readouterr().out, "rl plugins --markdown > docs/reference.md"
    for line in page.split("\n"):
        if line.startswith("|"):
            assert len(re.split(r"(?<!\\)\|", line)) in (4, 6), f"a broken table: {line}"
        assert "<" not in re.sub("`[^`]*`", "", line), f"a tag: {line}"
    repeated = [name for name in ENTRIES if f"The keys of [`{name}`]" in page]
    assert repeated == ["qwen2_5_vl", "qwen_image_edit", "spatial_reward", "edit_jsonl"]


def test_every_plugin_key_and_field_has_a_sentence() -> None:
    assert {name for names in SHIPPED.values() for name in names} <= set(ENTRIES)
    for name, (text, rows) in ENTRIES.items():
        assert len(text.split()) >= 3, name
        assert not [row for row in rows if len(row[3].split()) < 2], name


def test_a_row_has_type_range_and_default_also_within_sections() -> None:
    keys = {f"{name}.{row[0]}": row[1:3] for name, (_, rows) in ENTRIES.items() for row in rows}
    assert keys["rubric.prompt"] == ("string", "")
    assert keys["rubric.scores.<name>.low"] == ("number from -1e6 to 1e6", "0.0")
    assert keys["qwen3_vl.lora.init_seed"][0].startswith("integer from 0 below ")
    assert keys["vllm.gpu_memory_utilization"] == ("number above 0 to 1 or 'auto'", "'auto'")
    assert keys["run.max_staleness"] == ("0 or 1", "0") and "run.judge" not in keys
    assert keys["Sample.target"] == ("Image | None", "None")


def test_a_terminal_shows_an_entry_within_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], *([name] for name in ENTRIES)):
        assert main(arguments) == 0
        shown = capsys.readouterr().out
        assert max(map(len, shown.split("\n"))) <= 80, shown
        assert holds(shown, " ... ".join(arguments or ENTRIES))


def test_a_plugin_of_the_working_folder_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_explained.py").write_text(PLUGIN)
    for name, code, parts in (
        ("my_explained", 1, "there is no 'my_explained'"),
        ("judg", 1, "did you mean 'judge'"),
        ("judge.timeout_s", 0, "judge ... timeout_s: number above 0"),
        ("my_explained.Mine", 0, "At all ... answer, image ... above 0 to 4; default 1.0"),
        ("my_explained.plain", 0, "A function."),
        ("my_explained.Config", 1, "holds no plugin"),
        ("my_explained.py", 1, "drop '.py'"),
    ):  # fmt: skip
        assert main([name]) == code
        assert holds("".join(capsys.readouterr()), parts), name
