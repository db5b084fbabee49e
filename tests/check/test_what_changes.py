"""`rl check` shows what a config drops by mistake of the file that it imports."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_config
from tiny_messages import code_of, holds

from rl.build import resolve
from rl.check.check_report import dropped
from rl.config.schema import load_config
from rl.simple_launch import main

BASE = """{
  run_name: error 'name the run', base_exp_dir: 'runs', num_iterations: 3,
  prompts_per_iteration: 2 * $.world_size, generations_per_prompt: 2, world_size: 4,
  policy: { type: 'qwen2_5_vl', model_path: 'a/b', lora: { r: 8, alpha: 16 } },
  engine: { type: 'transformers' }, renderer: { type: 'qwen_image_edit', num_steps: 5 },
  rewards: { vie: { type: 'viescore', judge: { model: 'm', api_base: 'http://h:1' } } },
  data: { train: [{ type: 'prompts', path: 'a.txt' }], on_bad_row: 'skip' },
  optimizer: { betas: [0.5, 0.9] } + if $.world_size > 1 then { zero_stage: 1 } else {},
}"""
NAMED = "(import 'base.jsonnet') + { run_name: 'mine' } + "


def drops_of(folder: Path, text: str, *overrides: str) -> list[str]:
    """'section: what it drops' of a config `text`."""
    (folder / "base.jsonnet").write_text(BASE)
    (file := folder / "mine.jsonnet").write_text(text)
    return list(dropped(file, overrides, resolve(load_config(file, overrides))))


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("{}", ["seed=1"]),
        ("{ world_size: 1 }", []),  # which the base derives other values from
        ("{ optimizer+: { betas: [0.5, 0.8] } }", []),
        ("{}", ["optimizer.betas.1=0.8"]),
        ("{ renderer: { type: 'none' }, rewards: { acc: { type: 'accuracy' } } }", []),
    ],
)
def test_what_is_changed_by_intention_is_not_dropped(tmp_path, text, overrides):
    assert drops_of(tmp_path, NAMED + text, *overrides) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{ optimizer: { zero_stage: 1 } }",
         "optimizer: drops betas of base.jsonnet; write optimizer+: { ... }"),
        ("{ policy+: { lora: { r: 16 } } }",
         "policy.lora: drops alpha of base.jsonnet; write policy+: { lora+: { ... } }"),
        ("{ policy: { type: 'qwen2_5_vl', model_path: 'c/d' } }",
         'policy: drops lora of base.jsonnet; write policy+'),
        ("{ data: { train: [{ type: 'prompts', path: 'a.txt' }] } }",
         'data: drops on_bad_row of'),
        ("{ rewards+: { vie: { type: 'viescore' } } }", "rewards.vie: drops judge of"),
    ],
)  # fmt: skip
def test_a_section_replaced_without_plus_says_what_it_drops(tmp_path, text, expected):
    [line] = drops_of(tmp_path, NAMED + text)
    assert holds(line, expected), line


def test_only_what_the_file_begins_with_counts_as_imported(tmp_path: Path) -> None:
    base = "local base = import 'base.jsonnet';\n"
    own = BASE.replace("error 'name the run'", "'x'").replace("num_iterations: 3", "num_epochs: 3")
    assert not drops_of(tmp_path, base + own.replace("a/b", "' + base.policy.model_path + '"))


def test_check_prints_it_without_secrets(tmp_path, monkeypatch, capsys) -> None:
    (file := tmp_path / "mine.jsonnet").write_text(
        "(import 'tiny_prompts.jsonnet') + { optimizer: { learning_rate: 1e-3 }, "
        "policy+: { system_prompt: std.extVar('APP__WORDS') } }"
    )
    for name in ("APP__WORDS", "MY_TOKEN"):
        monkeypatch.setenv(name, "say s3cret-w0rds!")
    assert code_of(main, "--check", str(file)) == 0
    report = capsys.readouterr().out
    assert holds(report, "replaced without +, ... \n  optimizer: drops ... ; write optimizer+: {")
    assert "s3cret" not in report


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "policy: { lora: { r: 8 } }",
            "policy.type: missing ... policy: drops ... write policy+: { ... } to keep",
        ),
        (
            "data: { validation: [] }",
            "data.train: missing ... data: drops on_bad_row, train of tiny_prompts.jsonnet",
        ),
    ],
)
def test_a_missing_key_says_which_imported_file_has_it(tmp_path, capsys, text, parts) -> None:
    (file := tmp_path / "mine.jsonnet").write_text(
        f"(import 'tiny_prompts.jsonnet') + {{ {text} }}"
    )
    assert code_of(main, "--check", str(file)) == 1
    assert holds("".join(capsys.readouterr()), parts)


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny_config.DISTINCT)
def test_no_shipped_config_drops_what_it_imports(name: str, monkeypatch) -> None:
    for variable, value in tiny_config.ENVIRONMENT.items():
        monkeypatch.setenv(variable, value)
    file, config = f"configs/{name}.jsonnet", tiny_config.shipped(name)
    assert not list(dropped(file, [], resolve(config)))
