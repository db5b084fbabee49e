"""EARL's flat config block loads unchanged and gives the same run as our configs of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny_config
from tiny_messages import holds, raising

from rl import build
from rl.config import loading
from rl.config.schema import ConfigError, RunConfig, load_config

DOCUMENTED = """
{
    train_paths_file: [],
    coefficients: [],
    val_paths_file: [
        std.extVar("APP__DATA_DIR") +
            "/validation_22march_256/feature/list/tokenized_datalist.json",
    ],
    val_coefficients: [1.0],
    base_exp_dir: std.extVar("APP__BASE_EXP_DIR"),
    model_path: "kazemnejad/Emu3-Base-SFT-got-Apr13_post_stochastic_256_lr1e-5-checkpoint-10800",
    tokenizer_path: "BAAI/Emu3-Gen",
    assistant_prefill: " Let's think step by step. <|start thinking|>",
    learning_rate: 3e-6,
    num_iterations: 2000,
    kl_coeff: 0.0003,
    temperature: 1.0,
    per_device_batch_size: 8,
    episodes_per_iteration: 128,
    generations_per_sample: 8,
    max_response_tokens: 2048,
    top_p: 1.0,
    top_k: -1,
    model_context_size: 4096,
    vllm_gpu_memory_utilization: 0.3,
    emu3_use_logit_processor: true,
    separate_language_and_vision_vocabs: true,
    reward_function_api_base: std.extVar("APP__REWARD_FUNCTION_API_BASE"),
    reward_function_api_model_name: "Qwen/Qwen2.5-VL-72B-Instruct",
    reward_compute_viescore: true,
    reward_compute_ground_score: false,
    reward_final_reward: "viescore",
    run_name: std.extVar("APP__RUN_NAME"),
    log_episodes_every_n_iterations: 5,
    keep_checkpoints_every_n_iterations: 100,
    save_checkpoints_every_n_iterations: 100,
    push_to_hub_every_n_iterations: 100,
    push_to_hub_repo_id: 'imged_rl__' + $.run_name,
}
"""


def load(folder: Path, block: str = DOCUMENTED, *overrides: str) -> RunConfig:
    path = folder / "flat.jsonnet"
    path.write_text(block)
    return load_config(path, overrides, tiny_config.ENVIRONMENT)


def test_every_field_of_earl_has_a_place() -> None:
    """EARL's code had 43 fields; six of them, for its cycles, may only have their defaults."""
    assert len(loading.EarlFields.model_fields) == 43
    assert set(loading.EarlFields.model_fields) >= set(re.findall(r"^    (\w+):", DOCUMENTED, re.M))


MORE = {
    "train_paths_file": ["a/list/tokenized_datalist.json", "b/list/tokenized_datalist.json"],
    "coefficients": [0.13, 6],
    "random_seed": 7,
    "model_revision": "main",
    "train_text_tokens_only": False,
    "text_only_cycle_steps": 10,
    "reward_compute_ground_score": True,
    "reward_final_reward": "sqrt(viescore_pqxground_score)",
}


def flat(**changes: Any) -> str:
    return f"({DOCUMENTED}) + {json.dumps(changes)}"


def test_fields_that_map_to_several_keys_are_read(tmp_path: Path) -> None:
    config = load(tmp_path, flat(**MORE))
    resolved = build.resolve(config)
    assert [source["coefficient"] for source in config.data.train] == [0.13, 6]
    assert (config.seed, resolved.policy.config.revision) == (7, "main")
    assert config.final_reward.op == "geometric_mean"
    assert config.final_reward.weights == {"viescore/pq_01": 1, "ground_score": 1}
    shares = load(tmp_path, flat(**MORE | {"coefficients": []})).data.train
    assert all("coefficient" not in source for source in shares), "[] = equal shares"


def test_a_short_context_cuts_the_response(tmp_path: Path) -> None:
    config = load(tmp_path, flat(model_context_size=3000, reward_function_api_base="None"))
    assert config.sampling.max_completion_tokens == 3000 - 1280
    assert config.optimizer.max_tokens_per_micro_batch == 8 * 3000
    assert config.judge.api_base == "", "EARL read 'None' as no judge too"


def test_a_run_without_a_name_is_named_after_its_file(tmp_path: Path) -> None:
    assert load(tmp_path, flat(run_name=None)).run_name == "flat"


def test_our_keys_and_overrides_mix_with_the_fields(tmp_path: Path) -> None:
    block = flat(judge={"timeout_s": 9.0}, learning_rate=1e-6)
    config = load(tmp_path, block, "world_size=2", "kl_coeff=0.5", "policy.dtype=float32")
    assert (config.judge.timeout_s, config.judge.max_tokens) == (9.0, 1400)
    assert (config.world_size, config.algorithm.kl_coeff) == (2, 0.5)
    assert build.resolve(config).policy.config.dtype == "float32"


OWN: dict[str, Any] = {
    "policy": {"type": "emu3", "lora": {"r": 8}},
    "engine": {"type": "transformers"},
    "renderer": {"batch_size": 2},
    "rewards": {"viescore": {"type": "viescore"}, "mine": {"type": "accuracy"}},
    "final_reward": {"weights": {"mine": 2}},
    "data": {"on_bad_row": "skip", "train": [{"type": "tiny_world.data.shapes"}]},
    "optimizer": {"zero_stage": 3, "learning_rate": 1e-5},
}


@pytest.mark.parametrize("sections", [list(OWN), *([name] for name in OWN)])
def test_our_sections_mix_with_the_fields(tmp_path, sections: list[str]) -> None:
    """Sections override the fields and the constants of EARL's code."""
    chosen = {name: OWN[name] for name in sections}
    config = load(tmp_path, flat(**chosen)).model_dump(mode="json")
    for name, section in chosen.items():
        for key, value in section.items():
            loaded = config[name][key]
            assert loaded == (loaded | value if isinstance(value, dict) else value), (name, key)
    assert config["policy"]["model_path"].startswith("kazemnejad/"), "the other fields stay"
    assert config["final_reward"]["weights"]["viescore"] == 1


def test_validation_data_of_our_section_is_used(tmp_path: Path) -> None:
    section = {"validation": [{"type": "tiny_world.data.shapes"}]}
    for nothing in (None, "x"):
        with pytest.raises(ConfigError, match="data: "):
            load(tmp_path, flat(val_paths_file=None, val_coefficients=[], data=nothing))
    for paths in ([], None):
        for data, every_n in ({"data": section}, 100), ({}, 0):
            config = load(tmp_path, flat(val_paths_file=paths, val_coefficients=[], **data))
            assert config.evaluation.every_n_iterations == every_n


def test_a_stray_field_does_not_make_a_nested_config_flat() -> None:
    overrides = ("model_path=x", "kl_coeff=1")
    second, first = sorted(tiny_config.problems_of("configs/quickstart.jsonnet", *overrides))
    assert "model_path: " in first
    assert holds(second, "kl_coeff: ... 'algorithm.kl_coeff'")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"learning_rat": 1.0}, "learning_rat: ... 'learning_rate'"),
        ({"vlm_spm_memory_utilization": 1}, "'vllm_gpu_memory_utilization'"),
        ({"episodes_per_iteration": 100}, "100 ... groups of 8"),
        (
            {"reward_final_reward": "sqrt(viescore_pxground_score)"},
            "reward_final_reward: ... 'viescore'",
        ),
        ({"coefficients": [1.0]}, "coefficients: 1 ... 0 train_paths_file"),
        ({"val_coefficients": [0.5]}, "val_coefficients.0: 0.5"),
        ({"separate_language_and_vision_vocabs": False}, "vision_vocabs: false ... True"),
        ({"train_vision_tokens_only": True}, "train_vision_tokens_only: ... in turns is gone"),
        ({"model_context_size": 900, "max_response_tokens": 800}, "no room"),
        ({"model_context_size": "4096"}, 'model_context_size: "4096" ... integer'),
        ({"temperature": "hot"}, 'sampling.temperature: "hot" ... number'),
    ],
)
def test_mistakes_name_field_and_fix(tmp_path: Path, changes: dict[str, Any], parts: str) -> None:
    with raising(ConfigError, parts):
        load(tmp_path, flat(**changes))


@pytest.mark.parametrize("name", [name for name in tiny_config.SHIPPED if "__rl_" in name])
def test_our_ten_configs_equal_their_flat_form(tmp_path: Path, name: str) -> None:
    """Both forms give the same run, including the constants of EARL's code."""
    config = tiny_config.shipped(name)
    policy, context = config.policy, config.engine["max_model_len"]
    block = flat(
        train_paths_file=[source["path"] for source in config.data.train],
        coefficients=[source["coefficient"] for source in config.data.train],
        model_path=policy["model_path"],
        tokenizer_path=policy["tokenizer_path"],
        assistant_prefill=policy["assistant_prefill"],
        num_iterations=config.num_iterations,
        per_device_batch_size=config.optimizer.max_tokens_per_micro_batch // context,
        model_context_size=context,
        random_seed=42,
        world_size=4,
        gpu_gb=80,
    )
    ours, theirs = (each.model_dump(mode="json") for each in (config, load(tmp_path, block)))
    theirs["final_reward"]["weights"] = ours["final_reward"]["weights"]  # {} and {viescore: 1}
    assert theirs["engine"]["gpu_memory_utilization"] == 0.3  # of 80 GB: 10 completions at once
    theirs["engine"]["gpu_memory_utilization"] = "auto"
    theirs["checkpoint"]["keep_every_n_iterations"] = 0  # 119 GB each; the hub keeps the models
    assert theirs == ours
