"""A Jsonnet file and the command line become a `RunConfig`, or a list of everything wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import tiny_config

from rl.config.messages import validate
from rl.config.schema import ConfigError, load_config
from rl.rewards import viescore


def problems_of(path: Path, *overrides: str, env: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, env or {})
    return list(caught.value.problems)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return tiny_config.write(tmp_path, tiny_config.nothing(tmp_path))


def test_environment_variables_with_the_prefix_are_read(tmp_path: Path, plain: Path) -> None:
    path = tmp_path / "env.jsonnet"
    path.write_text("(import 'run.jsonnet') + { run_name: std.extVar('APP__RUN_NAME') }")
    assert load_config(path, env={"APP__RUN_NAME": "mine"}).run_name == "mine"


def test_every_missing_variable_is_named_with_its_place(tmp_path: Path, plain: Path) -> None:
    path = tmp_path / "env.jsonnet"
    path.write_text(
        "(import 'run.jsonnet') + {\n"
        "  run_name: std.extVar('APP__RUN_NAME'),\n"
        "  judge: { api_base: std.extVar('APP__JUDGE') },\n"
        "  seed: -1,\n"
        "  base_exp_dir: std.extVar('HOME'),\n"
        "}"
    )
    found = problems_of(path, env={"HOME": "/home/me"})
    place = f"(used at {path}:"
    assert f"set the environment variable APP__RUN_NAME {place}2)" in found
    assert f"set the environment variable APP__JUDGE {place}3)" in found
    assert (
        f"std.extVar('HOME') {place}5): only environment variables named APP__... can be read"
        in found
    )
    assert any("seed: -1 given" in problem for problem in found), "the rest is checked as well"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("APP__RUN-NAME", "no shell sets a variable of that name; use letters, digits and "
         "underscores, std.extVar('APP__RUN_NAME'), and set that"),
        ("APP__R\u00dcN", "underscores, std.extVar('APP__R_N'), and set that"),
        ("APP__A B", "underscores, std.extVar('APP__A_B'), and set that"),
        ("APP__A\nB", "underscores, std.extVar('APP__A_B'), and set that"),
        ("APP__A: B", "underscores, std.extVar('APP__A__B'), and set that"),
        ("APP__A\n\tB", "set the environment variable APP__A"),
        ("APP__A\0B", "set the environment variable APP__A"),
        ("HOME-DIR", "only environment variables named APP__... can be read"),
        ("", "only environment variables named APP__... can be read"),
    ],
)  # fmt: skip
def test_a_variable_of_any_name_may_be_missing(
    tmp_path: Path, plain: Path, name: str, sentence: str
) -> None:
    path = tmp_path / "env.jsonnet"
    path.write_text(
        f"(import 'run.jsonnet') + {{ run_name: std.extVar({json.dumps(name)}), "
        "base_exp_dir: std.extVar('APP__DIR') }",
        encoding="utf-8",
    )
    found = problems_of(path)
    assert f"set the environment variable APP__DIR (used at {path}:1)" in found
    assert any(sentence in problem for problem in found), found
    if sentence.startswith("no shell"):
        assert load_config(path, env={name: "mine", "APP__DIR": "d"}).run_name == "mine"


def test_looking_for_missing_variables_comes_to_an_end(tmp_path: Path) -> None:
    path = tmp_path / "endless.jsonnet"
    path.write_text("local f(n) = f(std.extVar(n) + '1') tailstrict; { a: f('APP__A') }")
    assert f"set the environment variable APP__A (used at {path}:1)" in problems_of(path)
    path.write_text("{ a: error 'undefined external variable: APP__A' }")
    assert problems_of(path) == [f"set the environment variable APP__A (used at {path}:1)"]


def test_bytes_that_are_not_utf_8_are_named(tmp_path: Path, plain: Path) -> None:
    broken = os.fsdecode(b"mine\xff")
    assert load_config(plain, env={"APP__OTHER": broken}).run_name, "one that nobody reads"
    path = tmp_path / "env.jsonnet"
    path.write_text("(import 'run.jsonnet') + { run_name: std.extVar('APP__RUN_NAME') }")
    assert problems_of(path, env={"APP__RUN_NAME": broken})[0] == (
        f"the environment variable APP__RUN_NAME (used at {path}:1) is not UTF-8; set it anew"
    )
    for override in (f"run_name={broken}", f"{broken}=1"):
        assert problems_of(plain, override) == [
            f"override {override!r}: is not UTF-8; write it as UTF-8"
        ]
    path = path.rename(tmp_path / os.fsdecode(b"env\xff.jsonnet"))
    [problem] = problems_of(path)
    assert problem.endswith("a config's path has to be UTF-8; rename the file or folder")


def test_overrides_are_jsonnet_and_bare_words_are_strings(plain: Path) -> None:
    config = load_config(
        plain,
        [
            "num_iterations=2 * 10",
            "optimizer.learning_rate=1e-4",
            "optimizer.gradient_checkpointing=true",
            "judge.api_base=http://host:4877/v1",
            "run_name=second",
            "final_reward.weights={one: 2}",
            "data.train.0.type=elsewhere",
        ],
        {},
    )
    assert config.num_iterations == 20
    assert config.optimizer.learning_rate == 1e-4
    assert config.optimizer.gradient_checkpointing is True
    assert config.judge.api_base == "http://host:4877/v1"
    assert config.run_name == "second"
    assert config.final_reward.weights == {"one": 2.0}
    assert config.data.train == [{"type": "elsewhere"}]


def test_what_the_file_derives_follows_an_override(tmp_path: Path, plain: Path) -> None:
    path = tmp_path / "derived.jsonnet"
    path.write_text(
        "(import 'run.jsonnet') + { size:: 1, prompts_per_iteration: 4 * $.size, "
        "checkpoint: { push_to_hub_repo_id: 'me/' + $.run_name } }"
    )
    config = load_config(path, ["run_name=other", "size=3"], {})
    assert config.checkpoint.push_to_hub_repo_id == "me/other"
    assert config.prompts_per_iteration == 12


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("num_iterations", "override 'num_iterations': write key.sub=value"),
        ("seed=[1", "override seed: [1 is not Jsonnet"),
        ("data.train.1.type=x", "override data.train.1.type: no entry 1; the list's 1 entries"),
        ("run_name=std.extVar('APP__NONE')", "run_name: set the environment variable APP__NONE"),
        ("run_name.first=3", "override run_name.first: first lies in a plain value"),
        ("optimizer.learning_rat=1", "unknown key; did you mean 'learning_rate'?"),
        ("sampling.kl_coeff=1", "unknown key; did you mean 'algorithm.kl_coeff'?"),
        ("run_name=2024", "run_name: 2024 given, must be a string"),
        ("run_name=a/b", 'run_name: "a/b" given, must match'),
        ("num_iterations=1.5", "num_iterations: 1.5 given, must be a whole number >= 1"),
        ("num_iterations='3'", "strings are not taken for numbers: drop the quotes"),
        ("optimizer.zero_stage=4", "must be a whole number >= 0 and <= 3"),
        ("evaluation.reference_drift=1", "1 given, must be true or false"),
        ("algorithm.loss=ppo", "must be 'grpo' or 'dapo' or 'dr_grpo' or 'gspo' or 'cispo'"),
    ],
)
def test_a_wrong_override_is_explained(plain: Path, override: str, message: str) -> None:
    found = problems_of(plain, override)
    assert len(found) == 1 and message in found[0], found


def test_all_problems_come_at_once_and_name_the_file(tmp_path: Path) -> None:
    values = tiny_config.nothing(tmp_path, seed="0", optimiser={"learning_rate": 1}, world_size=0)
    del values["generations_per_prompt"]
    path = tiny_config.write(tmp_path, values)
    found = problems_of(path)
    assert all(problem.startswith(f"{path}: ") for problem in found)
    for expected in (
        "seed: ",
        "optimiser: unknown key; did you mean 'optimizer'?",
        "world_size: 0 given",
        "generations_per_prompt: missing (G, completions per prompt (a group).)",
    ):
        assert any(expected in problem for problem in found), (expected, found)
    assert len(found) == 4


def test_files_that_are_no_config(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere.jsonnet"
    assert problems_of(missing)[0].startswith(f"{missing}: no such config file")
    broken = tmp_path / "broken.jsonnet"
    broken.write_text("{\n  a: 1,\n  a: 2 }")
    assert problems_of(broken) == [f"{broken}:3:3: duplicate field: a"]
    listed = tmp_path / "list.jsonnet"
    listed.write_text("[1]")
    assert "this is a list" in problems_of(listed)[0]
    asserted = tmp_path / "assert.jsonnet"
    asserted.write_text("{ assert false : 'use two ranks', a: 1 }")
    assert problems_of(asserted)[0].startswith("use two ranks")
    asserted.write_text("{ assert false : 'use two ranks,\\nor one', a: 1 }")
    assert problems_of(asserted)[0].startswith("use two ranks,\nor one (at ")


def test_a_section_speaks_for_itself() -> None:
    values = {"type": "viescore", "semantics_prompt": "/none.txt"}
    _, [problem] = validate(viescore.Config, values, at="rewards.vie")
    assert problem.startswith("rewards.vie: semantics_prompt: the prompt file /none.txt does")
