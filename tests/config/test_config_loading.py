"""A Jsonnet file and the command line become a `RunConfig`, or a list of all problems."""

from __future__ import annotations

import math
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import tiny_config
from tiny_config import problems_of
from tiny_messages import holds

from rl.config import loading
from rl.config.loading import validate
from rl.config.schema import load_config
from rl.renderers.images_api import ImagesApi
from rl.renderers.stock_pipeline import StockPipeline
from rl.rewards.judged import VieScore


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return tiny_config.write(tmp_path, tiny_config.nothing(tmp_path))


def test_every_missing_variable_is_named_with_its_line(tmp_path: Path, run_file: Path) -> None:
    path = tmp_path / "env.jsonnet"
    path.write_text(
        "(import 'run.jsonnet') + {\n"
        "  run_name: std.extVar('APP__RUN_NAME'),\n"
        "  judge: { api_base: std.extVar('APP__JUDGE') },\n"
        "  seed: -1,\n"
        "  base_exp_dir: std.extVar('HOME'),\n"
        "}"
    )
    problems = problems_of(path, env={"HOME": "/home/me"})
    assert load_config(path, ["base_exp_dir=x", "seed=1"], {"APP__RUN_NAME": "a", "APP__JUDGE": ""})
    for parts in (
        f"set ... APP__RUN_NAME ... {path.name}:2",
        f"set ... APP__JUDGE ... {path.name}:3",
        f"set ... HOME ... {path.name}:5 ... only",
        "seed: -1",  # the rest is checked as well
    ):
        assert any(holds(problem, parts) for problem in problems), parts


@pytest.mark.slow
def test_the_search_for_missing_variables_ends(tmp_path: Path) -> None:
    path = tmp_path / "endless.jsonnet"
    path.write_text("local f(n) = f(std.extVar(n) + '1') tailstrict; { a: f('APP__A') }")
    assert any(holds(problem, f"set ... APP__A ... {path.name}:1") for problem in problems_of(path))


ENDLESS = "local f(n) = f(n + 1) tailstrict; f(0)"
DEEP = "std.parseJson(std.repeat('[', 200000))"
"""Jsonnet parses it recursively, until its stack is full."""


@pytest.mark.parametrize(
    ("text", "override", "max_s", "parts"),
    [
        (f"{{ a: {ENDLESS} }}", "seed=1", 0.5, "longer than 0.5 s ... recursion"),
        ("{}", f"seed={ENDLESS}", 0.5, "longer than 0.5 s ... recursion"),
        (f"{{ a: {DEEP} }}", "seed=1", loading.MAX_S, "crashed ... nested"),
    ],
)
def test_an_endless_program_is_stopped(
    run_file: Path, monkeypatch, text: str, override: str, max_s: float, parts: str
) -> None:
    monkeypatch.setattr(loading, "MAX_S", max_s)
    run_file.write_text(text)
    [problem] = problems_of(run_file, override)
    assert holds(problem, f"{run_file} ... {parts}")
    assert not multiprocessing.active_children()


def test_bytes_that_are_not_utf_8_are_refused(tmp_path: Path, run_file: Path) -> None:
    broken = os.fsdecode(b"mine\xff")
    assert "UTF-8" in problems_of(run_file, env={"APP__RUN_NAME": broken})[0]
    for override in (f"run_name={broken}", f"{broken}=1"):
        assert problems_of(run_file, override)
    assert problems_of(run_file.rename(tmp_path / os.fsdecode(b"env\xff.jsonnet")))


def test_overrides_are_jsonnet_and_bare_text_is_a_string(run_file: Path) -> None:
    config = load_config(
        run_file,
        [
            "num_iterations=2 * 10",
            "optimizer.learning_rate=1e-4",
            "optimizer.gradient_checkpointing=true",
            "judge.api_base=http://host:4877/v1",
            "run_name=second",
            "judge.revision=2026-11-26",
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
    assert config.judge.revision == "2026-11-26"
    assert config.final_reward.weights == {"one": 2.0}
    assert config.data.train == [{"type": "elsewhere"}]


def test_a_word_is_a_string_unless_jsonnet_knows_it(tmp_path: Path) -> None:
    path = tiny_config.write(tmp_path, {})
    known = {"a": ("std.pi", math.pi), "b": ("true", True), "c": ("null", None)}
    known |= {"j": ("-0.5e2", -50), "k": ("'a b'", "a b"), "l": ("'a' + 'b'", "ab")}
    words = {"d": "cuda:0", "e": "true/b", "f": "stdx", "g": "self.a", "h": "local", "i": "~std.pi"}
    overrides = [f"{key}={text}" for key, (text, _) in known.items()]
    overrides += [f"{key}={text}" for key, text in words.items()]
    values, problems = loading.evaluate(path, overrides, {})
    assert problems == [] and values is not None
    assert values == {key: value for key, (_, value) in known.items()} | words | {"i": -4}


def test_values_that_the_file_derives_follow_an_override(tmp_path: Path, run_file: Path) -> None:
    path = tmp_path / "derived.jsonnet"
    path.write_text(
        "(import 'run.jsonnet') + { size:: 1, prompts_per_iteration: 4 * $.size, "
        "checkpoint: { push_to_hub_repo_id: 'me/' + $.run_name } }"
    )
    config = load_config(path, ["run_name=other", "size=3"], {})
    assert config.checkpoint.push_to_hub_repo_id == "me/other"
    assert config.prompts_per_iteration == 12


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("num_iterations", "override 'num_iterations' ... key.sub=value"),
        ("seed=[1", "override seed: [1 ... evaluated"),
        ("data.train.1.type=x", "override data.train.1.type: ... no entry 1"),
        ("run_name=std.extVar('APP__NONE')", "run_name: ... APP__NONE"),
        ("run_name.first=3", "override run_name.first: first"),
        ("optimizer.learning_rat=1", "unknown ... 'learning_rate'"),
        ("sampling.kl_coeff=1", "unknown ... 'algorithm.kl_coeff'"),
        ("run_name=2024", "run_name: 2024 ... string ... \"run_name='2024'\""),
        ("judge.revision=[2026-11-26]", "judge.revision: [1989] ... string"),
        ("learning_rate=1", "unknown ... 'optimizer.learning_rate'"),
        ("weights={one: 1}", "unknown ... 'final_reward.weights'"),
        ("path=x", "path: unknown key; known: "),
        ("seed=2 * std.extVar('APP__SEED')", "seed: ... matching types, got number and string"),
        (
            "seed=std.extVar('APP__SEED')",
            'seed: "7" ... integer; ... write std.parseJson(std.extVar(',
        ),
        ("optimizer.betas='[0, 0]'", "optimizer.betas: ... write std.parseJson(std.extVar("),
        ("run_name=a/b", 'run_name: "a/b" ... match'),
        ("num_iterations='3'", 'num_iterations: "3" ... integer'),
        ("optimizer.betas=[2, 0.9]", "optimizer.betas.0: 2 ... less than 1"),
        ("optimizer.learning_rate=1e300", "optimizer.learning_rate: 1000 ... equal to 1"),
        ("seed=1e22", "seed: 1000 ... less than"),
        ("run_name='" + "x" * 300 + "'", "^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$"),
        (r"base_exp_dir='a\u0000b'", "base_exp_dir ... NUL"),
        ("sampling.temperature=1e-300", "sampling.temperature: 1e-300 ... greater"),
        ("hang_limit_s=1e-9", "hang_limit_s: 1e-09 ... equal to 1"),
        ("base_exp_dir=''", 'base_exp_dir: "" ... match'),
        ("render_pool.workers=some", "render_pool.workers: ... integer or 'auto'"),
        ("judge.api_base=3", "judge.api_base: 3 ... string or a valid array"),
        ("algorithm.loss=ppo", "shipped loss (known: cispo, dapo, dr_grpo, grpo, gspo)"),
        (f"{'k' * 100_000}=1", "kkk: unknown key"),
        ("base_exp_dir=/tmp/\udcc3", "not UTF-8"),
        ("render_pool={workers: 1, address: 'ray://far.example:10001'}", "render_pool.address: "),
    ],
    ids=lambda text: ascii(text[:40]),
)
def test_a_wrong_override_is_explained(run_file: Path, override: str, parts: str) -> None:
    [problem] = problems_of(run_file, override, env={"APP__SEED": "7"})
    assert holds(problem, parts) and len(problem) < 2000, problem


def test_all_problems_come_at_once_and_name_the_file(tmp_path: Path) -> None:
    values = tiny_config.nothing(tmp_path, seed="0", optimiser={"learning_rate": 1}, world_size=0)
    del values["generations_per_prompt"]
    path = tiny_config.write(tmp_path, values)
    problems = problems_of(path)
    assert all(problem.startswith(f"{path}: ") for problem in problems)
    for expected in (
        "seed: ",
        "optimiser: ... unknown ... 'optimizer'",
        "world_size: 0",
        "generations_per_prompt: missing",
    ):
        assert any(holds(problem, expected) for problem in problems), (expected, problems)
    assert len(problems) == 4


def test_a_file_that_is_no_config_is_refused(tmp_path: Path) -> None:
    missing, file = tmp_path / "nowhere.jsonnet", tmp_path / "broken.jsonnet"
    assert problems_of(missing)[0].startswith(f"{missing}: ")
    for text, parts in (
        ("{\n  a: 1,\n  a: 2 }", f"{file}:3:3: duplicate field: a"),
        ("{ render_pool: 7 }", "render_pool: 7 given"),
        ("[1]", f"{file} ... a config is an object {{ ... }}, not of type list"),
        ("{ assert false : 'use two ranks,\\nor one', a: 1 }", "use two ranks,\nor one (at "),
    ):
        file.write_text(text)
        assert holds("\n".join(problems_of(file)), parts)


@pytest.mark.parametrize(
    ("model", "values", "parts"),
    [
        (VieScore.Config, {"semantics_prompt": "/none.txt"}, "at: semantics_prompt: ... /none.txt"),
        (StockPipeline.Config, {"cfg": 1}, "at.cfg: unknown ... set at.arguments.cfg"),
        (
            StockPipeline.Config,
            {"interface": {"seed": 1}},
            "at.interface.seed: unknown ... set at.interface.arguments.seed",
        ),
        (ImagesApi.Config, {"api_base": "x", "model": "m", "n": 1}, "at.n: ... set at.extra.n"),
    ],
)
def test_the_message_of_a_section_names_its_key(
    model: Any, values: dict[str, Any], parts: str
) -> None:
    _, [problem] = validate(model, values, at="at")
    assert holds(problem, parts)
