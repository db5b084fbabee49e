"""A key that is set but that nothing reads is reported or refused, never ignored silently."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_config
from tiny_messages import holds, refusal

from rl import build
from rl.check import check_report
from rl.check.check_report import doubtful, no_effect
from rl.simple_launch import main


def warnings_of(name: str, *overrides: str) -> list[str]:
    resolved = build.resolve(tiny_config.shipped(name, *overrides))
    return [*no_effect(resolved), *doubtful(resolved)]


@pytest.mark.parametrize("name", tiny_config.DISTINCT)
def test_a_shipped_config_sets_no_key_without_effect(name: str) -> None:
    assert warnings_of(name) == []


EDITOR = "qwen_image_edit"
SECOND = 'rewards.second={"type": "viescore", "held_out_only": true, "judge": {"model": "b"}}'
CASES: list[tuple[str, list[str], list[str]]] = [
    (EDITOR, ["optimizer.backend=torch", "optimizer.zero_stage=3"], ["zero_stage"]),
    (EDITOR, ["algorithm.clip_high=0.3"], ["clip_high"]),
    (EDITOR, ["algorithm.clip_high=0.3", "max_staleness=1"], []),
    (EDITOR, ["algorithm.clip_high=0.3", "policy.lora.dropout=0.1"], []),
    (EDITOR, ["algorithm.clip_low=0.1", "optimizer.updates_per_iteration=2"], []),
    (EDITOR, ["algorithm.kl_estimator=k2", "algorithm.kl_placement=reward", "algorithm.kl_coeff=0"],
     ["kl_estimator", "kl_placement"]),
    (EDITOR, ["evaluation.every_n_iterations=0", "evaluation.reference_drift=false"],
     ["data.validation", "evaluation.num_samples", "evaluation.reference_drift"]),
    (EDITOR, ["evaluation.top_k=5"], ["evaluation.top_k"]),
    (EDITOR, ["tracking.wandb=off"], ["wandb_project"]),
    (EDITOR, ["tracking.trackio_space=me/runs"], ["trackio_space"]),
    (EDITOR, ["judge.start_timeout_s=9"], ["judge.start_timeout_s"]),
    (EDITOR, ["evaluation.top_k=5", "evaluation.temperature=1"], []),
    (EDITOR, ["optimizer.max_kept_tokens=99", "max_staleness=1"], ["max_kept_tokens"]),
    (EDITOR, ["renderer.true_cfg_scale=1", "renderer.negative_prompt=bad"],
     ["renderer.negative_prompt"]),
    (EDITOR, ["renderer.height_px=512", "renderer.width_px=512", "renderer.output_area_px=4096"],
     ["renderer.output_area_px"]),
    (EDITOR, ["renderer.device=cpu", "renderer.max_memory_gb=3"], ["renderer.max_memory_gb"]),
    ("vlm_reasoning", ["judge.model=x", "judge.max_tokens=99"], ["judge.max_tokens", "judge.mode"]),
    ("vlm_reasoning", ["policy.conditioning=base"], ["policy.conditioning"]),
    ("vlm_reasoning", ["images_per_completion=2"], ["images_per_completion"]),
    ("quickstart", ["evaluation.thought_gain=true"], ["evaluation.thought_gain"]),
    ("quickstart", ["evaluation.thought_gain=true", "policy.thought={}"], []),
    ("quickstart", [SECOND], []),
    ("quickstart", [SECOND, "evaluation.every_n_iterations=0"],
     ["data.validation"]),
    ("tiny_prompts", ['rewards.clip.judge={"model": "b"}'], ["rewards.clip.judge"]),
    ("quickstart", ["policy.revision=v2"], ["policy.revision"]),
    ("tiny_earl", ["bare_arm=evaluation"], ["bare_arm"]),
    ("prompt_enhancement", ["renderer.guidance_scale=1", "renderer.negative_prompt=bad"],
     ["renderer.negative_prompt"]),
    ("quickstart", ["sampling.top_p=0.9"], ["sampling.top_p"]),
    ("quickstart", ["sampling.top_p=0.999", "sampling.top_k=20"],
     ["sampling.top_k", "sampling.top_p"]),
    ("quickstart", ["sampling.top_k=0", "sampling.top_p=1"], []),
    ("quickstart", ["algorithm.loss=dr_grpo"], ["algorithm.advantage_scale"]),
    ("quickstart", ["algorithm.loss=dr_grpo", "algorithm.advantage_scale=none",
                    "algorithm.advantage_eps=1e-4"], []),
    ("quickstart", ["algorithm.truncated_completions=mask"], []),
    ("tiny_thinking", ["algorithm.truncated_completions=mask"],
     ["algorithm.truncated_completions"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "overrides", "keys"), CASES, ids=[" ".join(c[1]) for c in CASES])
def test_a_key_that_nothing_reads_is_reported(
    name: str, overrides: list[str], keys: list[str]
) -> None:
    lines = sorted(warnings_of(name, *overrides))
    assert len(lines) == len(keys), lines
    reported = [line.partition(":")[0] for line in lines]
    assert all(key in line for key, line in zip(sorted(keys), reported, strict=True)), lines


def test_a_launch_reports_keys_without_effect(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("rl.simple_launch.launch", lambda *arguments: 0)
    changes = [f"base_exp_dir={tmp_path}", "optimizer.zero_stage=3", "sampling.top_p=0.9"]
    printed = refusal(main, ["configs/quickstart.jsonnet", *changes], 0).splitlines()[-2:]
    assert holds(printed[0], "without effect ... optimizer.zero_stage: ... 'torch'")
    assert holds(printed[1], "sampling.top_p: 0.9 ... Use 1.0")


@pytest.mark.parametrize(
    ("name", "overrides", "parts"),
    [
        (EDITOR, ["policy.system_prompt=Be bold."],
         f"policy.system_prompt: ... {EDITOR} ... drop"),
        (EDITOR, ['policy.lora.target_modules=["q_porj", "v_proj"]'],
         "policy.lora.target_modules: 'q_porj' ... known: down"),
        (EDITOR, ['policy.lora.target_modules=["qkv"]'], "policy.lora.target_modules: 'qkv'"),
        (EDITOR, ["policy.lora.target_modules=[]"], "policy.lora.target_modules: ... empty"),
        (EDITOR, ["renderer.lora_path=./no.safetensors"],
         "renderer.lora_path: ... './no.safetensors'"),
        (EDITOR, [f"renderer.lora_path={tiny_config.WEIGHTS}",
                  "renderer.lora_weight_name=no.safetensors"],
         "renderer.lora_weight_name: ... weights ... 'no.safetensors'"),
        # The model (a hub id, then a folder) has states of another width than the renderer reads.
        (EDITOR, ["policy.model_path=Qwen/Qwen2.5-VL-3B-Instruct",
                  "policy.init_text_encoder_from="],
         "policy: ... 2048 ... 3584 ... policy.model_path, policy.init_text_encoder_from"),
        ("quickstart", [f"policy.model_path={tiny_config.WEIGHTS / 'rewriter'}",
                        "policy.init_text_encoder_from="], "policy: ... 64 ... 128"),
        ("quickstart", ['policy.thought.marker=" "'], "policy.thought.marker: ... pattern"),
        ("tiny_earl", ["policy.thought={}"], "policy.thought: ... emu3 ... drop"),
        # correct variants
        ("tiny_prompts", ["policy.system_prompt=Be bold."], ""),
        (EDITOR, ['policy.lora.target_modules=["qkv"]', "policy.freeze_vision_tower=false"], ""),
    ],
)  # fmt: skip
def test_a_value_that_would_be_ignored_silently_is_refused(
    name: str, overrides: list[str], parts: str
) -> None:
    problems = check_report.problems(tiny_config.shipped(name, *overrides))
    assert len(problems) == bool(parts) and holds("".join(problems), parts), problems


def test_an_adapter_with_other_lora_settings_is_refused(tmp_path: Path) -> None:
    settings = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    change = f"policy.adapter_path={tmp_path}"
    config = tiny_config.shipped("quickstart", change)
    [lacking] = check_report.problems(config)
    assert holds(lacking, f"policy.adapter_path: {tmp_path} ... adapter_model.safetensors")
    (tmp_path / "adapter_model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert check_report.problems(config) == []
    [unread] = no_effect(build.resolve(config))
    assert holds(unread, "policy.lora.target_modules: ... adapter_path")
    for key, stated, actual in (("r", "4", "8"), ("dropout", "0.1", "0.0")):
        other = tiny_config.shipped("quickstart", change, f"policy.lora.{key}={stated}")
        [problem] = check_report.problems(other)
        assert holds(problem, f"policy.lora.{key}: {stated} ... adapter_path ... {actual}")
