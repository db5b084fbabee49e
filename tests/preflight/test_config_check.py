"""What `--check` refuses, each with its key and remedy, and what it reports."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_config

from rl import build
from rl.config.schema import RunConfig, load_config
from rl.preflight import footprint, report
from rl.preflight.memory_remedies import memory_problems
from rl.ranks.placement import Machine
from rl.simple_launch import main


def config_of(folder: Path, **changes: Any) -> RunConfig:
    return load_config(tiny_config.write(folder, tiny_config.real(folder, **changes)))


def problems_of(folder: Path, **changes: Any) -> list[str]:
    return report.problems(config_of(folder, **changes))


def test_a_right_config_has_no_problems(tmp_path: Path) -> None:
    assert problems_of(tmp_path) == []


RIGHT = {"type": "viescore"}
DROPS_OUT = {
    "type": "qwen2_5_vl",
    "model_path": "Qwen/Qwen2.5-VL-7B-Instruct",
    "lora": {"dropout": 0.1},
}
BROKEN: list[tuple[dict[str, Any], str]] = [
    (  # a plug's own typo
        {"engine": {"type": "vllm", "max_model_length": 64}},
        "engine.max_model_length: unknown key; did you mean 'max_model_len'?",
    ),
    (  # a plug's own type
        {"engine": {"type": "vllm", "max_num_seqs": "64"}},
        'engine.max_num_seqs: "64" given, must be a whole number >= 1 and <= 100000; strings are',
    ),
    (  # a typo inside an optional section
        {"policy": {"type": "qwen2_5_vl", "model_path": "a/b", "lora": {"alfa": 3}}},
        "policy.lora.alfa: unknown key; did you mean 'alpha'?",
    ),
    (
        {"policy": {"type": "qwen2_5_vl", "model_path": "a/b", "lora": {"r": 0}}},
        "policy.lora.r: 0 given, must be a whole number >= 1 and <= 65536 (Rank.)",
    ),
    (
        {"world_size": 3},
        "prompts_per_iteration: 4 prompts cannot be shared by 3 ranks (world_size); use 3 or 6",
    ),
    (
        {"renderer": {"type": "qwen_image_edt"}},
        "renderer.type: no plug 'qwen_image_edt' in rl/renderers; did you mean 'qwen_image_edit'?",
    ),
    (
        {"engine": {}},
        "engine.type: missing; name a file of rl/engines: ",
    ),
    (
        {"data": {"train": [{"type": "edit_jsonl", "path": "nowhere.jsonl"}]}},
        "data.train.0: nowhere.jsonl does not exist; give the",
    ),
    (
        {"policy": {"type": "qwen2_5_vl", "model_path": "./weights"}},
        "policy.model_path: no folder './weights'",
    ),
    (
        {"judge": {"api_base": ""}},
        "judge.api_base is empty, and a reward needs a judge: set it to the endpoint's URL",
    ),
    (
        {"judge": {"api_base": "http://xn--a.example"}},
        "judge.api_base='http://xn--a.example' is not an http(s) URL with a host: ",
    ),
    (
        {"judge": {"api_base": "embedded"}},
        "judge.api_base='embedded' is neither a URL (http://host:4877), nor host:port, nor a file "
        "that exists; a judge that the run itself is to start is named by judge.start_command",
    ),
    (
        {"judge": {"start_command": ["no_such_judge", "{url_file}"]}},
        "judge.start_command: there is no program 'no_such_judge' on this machine's PATH or in ",
    ),
    (
        {"judge": {"start_command": ["{python}", "-m", "my_judge"]}},
        "judge.start_command: nothing says where it will answer; give it '{url_file}', a file into",
    ),
    (
        {"judge": {"start_command": ["{python}", "{url_file}"], "api_base": "http://h:1"}},
        "judge.api_base: 'http://h:1' given, but judge.start_command writes the URL into '{url_f",
    ),
    (
        {"judge": {"start_command": ["{python}"], "api_base": "http://h:99999"}},
        "judge.api_base='http://h:99999' is not an http(s) URL with a host: port 99999 is not in",
    ),
    (
        {"judge": {"api_base": "http://h:1", "api_key_env": "NO_SUCH_KEY_HERE"}},
        "judge.api_key_env names NO_SUCH_KEY_HERE, which is not in the environment: export NO_SUCH",
    ),
    (
        {"renderer": {"type": "none"}},
        "rewards.vie: needs pictures, and renderer none makes none",
    ),
    (
        {"renderer": {"type": "qwen_image_edit", "height_px": 512}},
        "renderer.height_px, width_px: set both",
    ),
    ({"rewards": {}}, "rewards: empty; give at least one"),
    (
        {"final_reward": {"weights": {"view": 1}}},
        "final_reward.weights.view: no such reward; known: vie, vie/pq_01, vie/sc_01",
    ),
    ({"final_reward": {"weights": {"vie": 0}}}, "final_reward.weights: all zero"),
    ({"final_reward": {"weights": {"vie": -1}}}, "final_reward.weights.vie: -1.0 given, must be"),
    ({"num_epochs": 1}, "num_iterations, num_epochs: both given; keep one"),
    ({"num_iterations": None}, "num_iterations, num_epochs: neither given; set one"),
    ({"generations_per_prompt": 1}, "generations_per_prompt: 1 completion is always its own mean"),
    (
        {"optimizer": {"updates_per_iteration": 5}},
        "optimizer.updates_per_iteration: 5 updates, but each rank has only 4 groups",
    ),
    (
        {"max_staleness": 1, "optimizer": {"updates_per_iteration": 2}},
        "max_staleness: 1 is one update behind, and optimizer.updates_per_iteration 2 makes it",
    ),
    ({"optimizer": {"warmup_iterations": 3}}, "optimizer.warmup_iterations: 3 covers all 3"),
    (
        {"engine": {"type": "vllm", "max_model_len": 2048}},
        "engine.max_model_len: 2048 tokens hold no prompt of 2048 (policy.max_prompt_tokens) with "
        "a completion of 256 (sampling.max_completion_tokens); needs 2304",
    ),
    (
        {"algorithm": {"kl_coeff": 0.1, "kl_estimator": "k1"}},
        "algorithm.kl_estimator: 'k1' in the loss pulls nowhere (on-policy its expected gradient "
        "is zero); use 'k2' or 'k3', or kl_placement 'reward'",
    ),
    (
        {"algorithm": {"loss": "gspo"}},
        "algorithm.importance_correction: 'token' weighs each token apart, and 'gspo' has one",
    ),
    (
        {"engine": {"type": "transformers"}, "optimizer": {"zero_stage": 3}},
        "engine.type: transformers samples with the trainer's own weights, which ZeRO-3 shards; "
        "use engine 'vllm', or optimizer.zero_stage <= 2",
    ),
    ({"evaluation": {"every_n_iterations": 5}}, "data.validation: empty, and evaluation.every_n"),
    (
        {"policy": {"type": "qwen2_5_vl", "model_path": "a/b", "device": "cuda:+1"}},
        "policy.device: 'cuda:+1' counts from the rank's own device, which is the policy's; give",
    ),
    (
        {"checkpoint": {"push_to_hub_every_n_iterations": 5}},
        "checkpoint.push_to_hub_repo_id: empty; name the hub repository",
    ),
]


@pytest.mark.parametrize(("changes", "message"), BROKEN, ids=[text[:40] for _, text in BROKEN])
def test_one_mistake_is_one_message(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    found = problems_of(tmp_path, **changes)
    assert len(found) == 1 and found[0].startswith(message), found


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": {"kl_coeff": 0.1, "kl_estimator": "k1", "kl_placement": "reward"}},
        {"algorithm": {"kl_coeff": 0.1, "kl_estimator": "k2"}},
        {"algorithm": {"loss": "gspo", "importance_correction": "sequence"}},
        {"algorithm": {"kl_coeff": 0, "kl_estimator": "k1"}},
        {"engine": {"type": "transformers"}, "optimizer": {"zero_stage": 2}},
        {"engine": {"type": "vllm"}, "optimizer": {"zero_stage": 3}},
        {"max_staleness": 1},
        {"optimizer": {"updates_per_iteration": 2}},
        {
            "engine": {"type": "transformers"},
            "optimizer": {"backend": "torch", "zero_stage": 3},
        },
    ],
)
def test_the_neighbours_of_these_mistakes_are_allowed(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    assert problems_of(tmp_path, **changes) == []


def test_a_renderer_that_does_not_take_what_the_policy_emits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiny_plugs.nothing.Nil.accepts", "image_tokens")
    found = problems_of(
        tmp_path,
        renderer={"type": "tiny_plugs.nothing"},
        rewards={"one": {"type": "tiny_plugs.nothing"}},
    )
    assert found == [
        "renderer.type: tiny_plugs.nothing takes image_tokens, but policy qwen2_5_vl emits "
        "hidden_states or text; choose a renderer that takes one of these"
    ]


def test_what_a_reward_needs_must_be_in_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiny_plugs.nothing.NothingMuch.needs", frozenset({"target", "answer"}))
    found = problems_of(tmp_path, rewards={"one": {"type": "tiny_plugs.nothing"}})
    assert found == [
        f"rewards.one: needs each sample's {need!r}, which data.train.0 does not provide; map a "
        "column to it"
        for need in ("answer", "target")
    ]


def test_a_renderer_that_edits_needs_sources(tmp_path: Path) -> None:
    source = tiny_config.real(tmp_path)["data"]["train"][0] | {"columns": {"source": ""}}
    found = problems_of(tmp_path, data={"train": [source]})
    assert any("edits a picture, and these samples have no source" in text for text in found)


def test_plugs_of_ones_own_are_named_by_dotted_path(tmp_path: Path) -> None:
    nothing = load_config(tiny_config.write(tmp_path, tiny_config.nothing(tmp_path)))
    assert report.problems(nothing) == []
    assert "holds no Policy" in problems_of(tmp_path, policy={"type": "os.path"})[0]
    absent = problems_of(tmp_path, policy={"type": "my.own.policy"})
    assert absent[0].startswith("policy.type: no module 'my' among the installed ones or in ")


def test_mixture_weights(tmp_path: Path) -> None:
    source = tiny_config.real(tmp_path)["data"]["train"][0]
    resolved = build.resolve(config_of(tmp_path, data={"train": [source | {"weight": 3}, source]}))
    assert list(resolved.train_weights) == [3, 1]
    wrong = {"train": [source | {"weight": 0}], "validation": [source | {"weight": 2}]}
    assert problems_of(tmp_path, data=wrong) == [
        "data.train.0.weight: 0 given, must be a number > 0",
        "data.validation.0.weight: validation is read in order; drop weight",
    ]


def test_coefficients_weigh_sources_by_their_rows(tmp_path: Path) -> None:
    source = tiny_config.real(tmp_path)["data"]["train"][0]
    mixture = [source | {"coefficient": 0.5}, source | {"coefficient": 3}]
    resolved = build.resolve(config_of(tmp_path, data={"train": mixture}))
    assert build.mixture_weights(resolved, [range(100), range(10)]) == [50, 30]
    assert problems_of(tmp_path, data={"train": [mixture[0], source]}) == [
        "data.train: give every source a coefficient (its weight is coefficient x rows), or none "
        "of them"
    ]


def test_diagnostics_do_not_count_unless_named(tmp_path: Path) -> None:
    glance = {"type": "tiny_plugs.glance"}
    both = {"vie": RIGHT, "glance": glance}
    assert build.resolve(config_of(tmp_path, rewards=both)).config.final_reward.weights == {
        "vie": 1
    }
    named = {"weights": {"glance": 2.0}}
    resolved = build.resolve(config_of(tmp_path, rewards=both, final_reward=named))
    assert resolved.config.final_reward.weights == {"glance": 2}
    assert build.resolve(config_of(tmp_path)).config.final_reward.weights == {}
    [only] = problems_of(tmp_path, rewards={"glance": glance})
    assert only.startswith("rewards: only diagnostics, which do not count by themselves")


def test_a_policy_that_reads_codes_needs_tokenised_data(tmp_path: Path) -> None:
    found = problems_of(tmp_path, policy={"type": "tiny_plugs.reads_codes"})
    assert (
        "policy.type: tiny_plugs.reads_codes reads each sample's 'source_codes', which "
        "data.train.0 does not provide; tokenise the data with rl prepare"
    ) in found


def test_epochs_become_iterations(tmp_path: Path) -> None:
    config = config_of(tmp_path, num_iterations=None, num_epochs=3)
    assert build.num_iterations(config, num_samples=10) == 8, "30 prompts in batches of 4"
    assert build.num_iterations(config, num_samples=1) == 1
    assert build.num_iterations(config_of(tmp_path), num_samples=10) == 3


def save_checkpoint(config: RunConfig, iteration: int) -> None:
    folder = config.run_dir / "checkpoints" / f"step_{iteration:06d}"
    folder.mkdir(parents=True)
    meta = {"config": config.model_dump(mode="json")}
    text = json.dumps({"iteration": iteration, "world_size": 1, "meta": meta})
    (folder / "state.json").write_text(text)
    manifest = {"state.json": {"size": len(text), "sha256": "unchecked here"}}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_a_resume_conflict_is_found_before_anything_starts(tmp_path: Path) -> None:
    save_checkpoint(config_of(tmp_path), 7)
    text, code = report.report(config_of(tmp_path), gpu_gb=141)
    assert code == 0 and "goes on after 7 iterations" in text
    found = problems_of(tmp_path, algorithm={"kl_coeff": 0.5}, judge={"api_base": "http://new:1"})
    assert len(found) == 1
    assert found[0].startswith("run_name: run 'tiny' has checkpoints made with another config")
    assert "algorithm.kl_coeff: 0.0 -> 0.5" in found[0]
    assert "api_base" not in found[0], "a judge may move"


def test_a_run_without_a_whole_checkpoint_is_not_restarted(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    save_checkpoint(config, 7)
    (config.run_dir / "checkpoints" / "step_000007" / "manifest.json").unlink()
    assert "none of the 1 checkpoints" in report.problems(config)[0]


def test_a_run_whose_checkpoints_are_gone_is_not_restarted(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    config.run_dir.mkdir(parents=True)
    text, code = report.report(config, gpu_gb=141)
    assert code == 0 and "starts afresh\n" in text
    (config.run_dir / "metrics.jsonl").write_text('{"iteration": 1}\n')  # killed before the first
    text, code = report.report(config, gpu_gb=141)
    assert code == 0 and "starts afresh, and sets aside what is recorded there\n" in text
    (config.run_dir / "last_checkpoint.txt").write_text("step_000007\n")
    assert report.problems(config) == [
        f"run_name: {config.run_dir}/checkpoints holds no checkpoint, though step_000007 was "
        "written there: restore it, choose another run_name to start from the base weights, or "
        f"move {config.run_dir} away to start so under this one"
    ]
    save_checkpoint(config, 5)
    text, code = report.report(config, gpu_gb=141)
    gone = "checkpoint step_000007 was the last to be written and is gone"
    assert code == 0 and f"goes on after 5 iterations; {gone}" in text


def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_config.write(
        tmp_path,
        tiny_config.real(
            tmp_path,
            world_size=2,
            generations_per_prompt=8,
            rewards={"vie": RIGHT, "other": {"type": "edit_quality", "n_evals": 3}},
            optimizer={
                "max_tokens_per_micro_batch": 5000,
                "updates_per_iteration": 2,
                "gradient_checkpointing": True,
            },
        ),
    )
    with pytest.raises(SystemExit) as caught:
        main(["--check", "--gpu-gb", "80", str(path), "judge.max_concurrency=10"])
    assert caught.value.code == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for expected in (
        "prompts 4 an iteration 2 on each of 2 ranks",
        "completions 32 an iteration 16 on each of 2 ranks",
        "judge questions 160 an iteration 80 on each of 2 ranks",  # 32 x (2 + 3)
        "optimiser steps 2 an iteration, each of 8 completions a rank",
        "forwards in rows of up to 5000 tokens; a group is 4096 at the most",  # 2048 + 8 x 256
        "kept for backward 4096 tokens on each rank, not all (optimizer.updates_per_iteration)",
        "whole run 3 iterations of 4 prompts = 6 epochs of 2 samples",
        "160 questions an iteration: 9600 an hour at one iteration a minute; up to 20 in flight, "
        "6 tries each",
        "memory per GPU, against 80 GB",
        "nothing is wrong",
    ):
        assert expected in lines, expected


@pytest.mark.parametrize(
    ("changes", "tokens", "words"),
    [
        ({}, 4 * 2560, "all there can be"),
        ({"optimizer": {"max_kept_tokens": 3000}}, 3000, "not all (optimizer.max_kept_tokens)"),
        ({"optimizer": {"max_kept_tokens": 99999}}, 4 * 2560, "all there can be"),
        ({"max_staleness": 1}, 0, "not all (max_staleness 1)"),
        ({"optimizer": {"zero_stage": 3}}, 0, "not all (optimizer.zero_stage 3)"),
        ({"policy": DROPS_OUT}, 0, "not all (policy.lora.dropout)"),
    ],
)
def test_what_is_kept_for_the_backward(
    tmp_path: Path, changes: dict[str, Any], tokens: int, words: str
) -> None:
    """4 groups of 2048 + 2 x 256 tokens."""
    text, _ = report.report(config_of(tmp_path, **changes), gpu_gb=141)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert f"kept for backward {tokens} tokens on each rank, {words}" in lines
    forwarded_again = any(line.startswith("activations, one forward") for line in lines)
    assert forwarded_again == (words != "all there can be")


SHIPPED = sorted(Path("configs").glob("*.jsonnet"))


@cache
def shipped(name: str, *overrides: str) -> RunConfig:
    return load_config(f"configs/{name}.jsonnet", overrides, tiny_config.ENVIRONMENT)


def unfit(config: RunConfig, gpu_gb: float) -> list[str]:
    return memory_problems(build.resolve(config), gpu_gb)


def remedies(problems: list[str]) -> list[str]:
    """The `key=value` words of a message, as a user would copy them."""
    found = []
    for problem in problems:
        share = re.match(r"([\w.]+): .* at least (\S+) (?:is|are) needed", problem)
        found += [f"{share[1]}={share[2]}"] if share else []
        found += re.findall(r"[\w.]+\.\w+=[^\s),]+", problem)
    return found


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_config_fits_its_own_size_and_80_gb(path: Path) -> None:
    """With a cache for a group at least, and a tenth of the GPU free; what it derives from the size
    follows `gpu_gb`."""
    own = shipped(path.stem)
    smaller = {"sft", "vlm", "prompt"} & {path.stem.partition("_")[0]}
    expected = 80 if smaller or path.stem.startswith("qwen_image_21") else 141
    assert own.gpu_gb == expected
    stated = re.search(r"GPUs of (\d+) GB", readme_row(path.stem))
    assert stated is None or float(stated[1]) == own.gpu_gb
    for gpu_gb in dict.fromkeys((own.gpu_gb, 80, 141)):
        config = shipped(path.stem, f"gpu_gb={gpu_gb}")
        assert unfit(config, gpu_gb) == []
        planned = footprint.footprint(build.resolve(config), gpu_gb)
        assert planned is not None and planned.inference is not None
        assert planned.inference.at_once(gpu_gb) >= config.generations_per_prompt
        assert planned.peak_gb <= 0.9 * gpu_gb


def readme_row(stem: str) -> str:
    lines = Path("README.md").read_text().splitlines()
    return next((line for line in lines if line.startswith(f"| `configs/{stem}.jsonnet`")), "")


@pytest.mark.parametrize("gpu_gb", [141, 80, 60, 48, 40, 24, 12])
@pytest.mark.parametrize("more", ["seed=1", "optimizer.gradient_checkpointing=false"])
@pytest.mark.parametrize(
    "name", ["qwen_image_edit", "qwen_image_edit_plus", "sft_s__rl_sc", "vlm_reasoning"]
)
def test_a_remedy_is_one(name: str, more: str, gpu_gb: float) -> None:
    """What the message says, done, ends in a config that fits; or nothing does, and it says so."""
    found = unfit(shipped(name, more), gpu_gb)
    no_way = [p for p in found if re.search(r"no share works|larger GPU", p)]
    if found and not no_way:
        assert remedies(found)
        assert unfit(shipped(name, more, *remedies(found)), gpu_gb) == []


def test_a_share_without_room_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    config = shipped("qwen_image_edit", "engine.gpu_memory_utilization=0.16")
    text, code = report.report(config, 80)
    [found] = unfit(config, 80)
    assert found == (
        "engine.gpu_memory_utilization: 0.16 of 80 GB is 12.8 GB, and its weights alone are 15.2 "
        "GB; at least 0.25 is needed ('auto': what it needs)"
    )
    assert code == 1 and text.endswith(f"1 wrong\n  - {found}") and "nothing is wrong" not in text
    assert "DOES NOT FIT, though the sum leaves 9.8 GB: see below" in text
    for share, right in ((0.25, True), (0.24, False), ("auto", True)):
        again = shipped("qwen_image_edit", f"engine.gpu_memory_utilization={share}")
        text, code = report.report(again, 80)
        assert (code == 0) == right == text.endswith("\nnothing is wrong")
        if not right:
            assert "beside its weights (15.2 GB) and workspace (4.3 GB) there is no room" in text


@pytest.mark.parametrize(
    ("overrides", "gpu_gb", "message"),
    [
        (
            ["engine.kv_cache_memory_mb=100"],
            141,
            "engine.kv_cache_memory_mb: 100 MiB hold no completion of 2304 tokens, prompt "
            "included; at least 127 are needed",
        ),
        (  # a cache for the context that is asked for
            ["engine.kv_cache_memory_mb=127", "engine.max_model_len=4608"],
            141,
            "engine.kv_cache_memory_mb: 127 MiB hold no completion of 4608 tokens, prompt "
            "included; at least 253 are needed",
        ),
        (  # the sampler's own dtype
            ["engine.dtype=float32", "engine.gpu_memory_utilization=0.16"],
            141,
            "engine.gpu_memory_utilization: 0.16 of 141 GB is 22.6 GB, and its weights alone are "
            "30.4 GB; at least 0.27 is needed ('auto': what it needs)",
        ),
        (  # a vision tower of its own
            ["policy.freeze_vision_tower=false", "engine.gpu_memory_utilization=0.16"],
            80,
            "engine.gpu_memory_utilization: 0.16 of 80 GB is 12.8 GB, and its weights alone are "
            "16.6 GB; at least 0.27 is needed ('auto': what it needs)",
        ),
        (
            ["engine.gpu_memory_utilization=0.16"],
            16,
            "engine.gpu_memory_utilization: 0.16 of 16 GB is 2.6 GB, and its weights alone are "
            "15.2 GB; no share works, it wants 18.6 GB: take a larger GPU, a smaller "
            "policy.model_path, or engine.dtype 'bfloat16' if it is wider",
        ),
        (
            ["engine.gpu_memory_utilization=0.8"],
            80,
            "memory: DOES NOT FIT by 30.2 GB: 110.2 GB of 80 in phase 'generate'; this fits: "
            "engine.gpu_memory_utilization=0.42 (30.4 GB less)",
        ),
        (
            ["engine.residency=resident", "engine.gpu_memory_utilization=0.25", "world_size=4"],
            80,
            "memory: DOES NOT FIT by 8.0 GB: 88.0 GB of 80 in phase 'render'; this fits: "
            "engine.residency=sleep (17.8 GB less)",
        ),
        (
            ["world_size=1", "renderer.device=cuda:1", "renderer.max_memory_gb=20"],
            141,
            "renderer.max_memory_gb: 20 GB for renderer on cuda:1, whose weights alone are 27.5 "
            "GB; raise it, or drop it",
        ),
        (  # trainer and sampler
            ["world_size=1", "renderer.device=cuda:1", "policy.max_memory_gb=30"],
            141,
            "policy.max_memory_gb: 30 GB for policy on cuda:0, whose weights alone are 31.8 GB; "
            "raise it, or drop it",
        ),
        (
            ["world_size=1", "renderer.device=cuda:1"],
            34,
            "renderer.device: renderer wants 37.2 GB of cuda:1, which has 34; give each a device "
            "of its own, a smaller batch_size, or a larger GPU",
        ),
    ],
)
def test_what_does_not_fit_names_key_and_remedy(
    overrides: list[str], gpu_gb: float, message: str
) -> None:
    assert message in unfit(shipped("qwen_image_edit", *overrides), gpu_gb)


def test_a_remedy_names_nothing_that_is_not_needed() -> None:
    """Smaller batches come first, and the stage alone is enough."""
    assert unfit(shipped("sft_s__rl_sc", "optimizer.zero_stage=1"), 80) == [
        "memory: DOES NOT FIT by 20.9 GB: 100.9 GB of 80 in phase 'reference'; this fits: "
        "optimizer.zero_stage=2 (34.0 GB less)"
    ]


def test_no_key_is_enough_on_a_small_gpu() -> None:
    [found] = unfit(shipped("qwen_image_edit", "world_size=8"), 24)
    assert found.startswith("memory: DOES NOT FIT by ")
    assert re.search(r"; \d+\.\d GB too much even with optimizer\.\S+=\S+ \(", found)
    assert found.endswith("; take larger GPUs, or a smaller model")
    least = ["optimizer.gradient_checkpointing=true", "optimizer.max_kept_tokens=0"]
    least += ["optimizer.max_tokens_per_micro_batch=280", "engine={type: 'transformers'}"]
    assert unfit(shipped("quickstart", *least, "renderer.batch_size=1"), 1) == [
        "memory: DOES NOT FIT by 1.8 GB: 2.8 GB of 1 in phase 'render'; no key of it helps; take "
        "larger GPUs, or a smaller model"
    ]


def test_a_policy_on_the_cpu_asks_no_gpu_for_memory() -> None:
    text, code = report.report(shipped("quickstart", "policy.device=cpu"), 1)
    assert code == 0 and "not planned: policy.device is 'cpu'" in text


@pytest.mark.parametrize(
    ("overrides", "unknown", "what"),
    [
        (
            ["policy.model_path=nobody/knows", "policy.init_text_encoder_from=''"],
            "unknown: policy: 'nobody/knows' is neither a local folder of safetensors nor one of ",
            "policy",
        ),
        (
            ["renderer.model_path=nobody/knows"],
            "unknown: renderer: qwen_image_edit does not know the size of 'nobody/knows'",
            "renderer",
        ),
        (
            ["rewards.clip={type: 'clip', model_path: 'nobody/knows'}"],
            "unknown: rewards.clip: clip does not know the size of 'nobody/knows'",
            "rewards.clip",
        ),
        (
            ["engine={type: 'tiny_plugs.nothing'}"],
            "unknown: engine: tiny_plugs.nothing does not say what it takes",
            "engine",
        ),
    ],
)
def test_what_is_unknown_is_not_said_to_fit(overrides: list[str], unknown: str, what: str) -> None:
    text, code = report.report(shipped("qwen_image_edit", *overrides), 141)
    assert unknown in text and code == 0
    assert text.endswith(
        f"\nno mistake found; whether it fits its GPUs is unknown ({what}: see above)"
    )
    assert "nothing is wrong" not in text and "  fits with" not in text


def test_a_model_folder_of_no_known_shape_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    for name in ("tokenizer.json", "preprocessor_config.json"):
        (tmp_path / name).write_text("{}")
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})
    size = len(header).to_bytes(8, "little")
    (tmp_path / "model.safetensors").write_bytes(size + header.encode() + bytes(8))
    change = [f"policy.model_path={tmp_path}", "policy.init_text_encoder_from=''"]
    text, _ = report.report(shipped("qwen_image_edit", *change), 141)
    assert f"unknown: policy: '{tmp_path}' is neither" in text


def launched(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    return int(caught.value.code or 0)


def sized(folder: Path) -> str:
    """A config that keeps less for the backward on a smaller GPU, and would not fit else."""
    values = json.dumps(tiny_config.real(folder, gpu_gb=141))
    path = folder / "sized.jsonnet"
    path.write_text(
        f"{values} + {{ optimizer: {{ max_kept_tokens: if $.gpu_gb > 130 then null else 0, "
        "gradient_checkpointing: $.gpu_gb <= 130 } }"
    )
    return str(path)


def test_check_plans_for_the_configs_own_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tiny_config.write(tmp_path, tiny_config.real(tmp_path, gpu_gb=60)))
    assert launched("--check", path) == 1
    assert "memory per GPU, against 60 GB" in capsys.readouterr().out
    assert launched("--check", "--gpu-gb", "141", path) == 0
    assert capsys.readouterr().out.endswith("nothing is wrong\n")
    for size in ("0", "-80", "nan", "inf"):
        assert launched("--check", "--gpu-gb", size, path) == 2
        assert f"argument --gpu-gb: {size} is no size in GB" in capsys.readouterr().err


def test_the_config_follows_the_size_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(
        "rl.simple_launch.launch", lambda args, *more: started.append(args.overrides) or 0
    )
    path = sized(tmp_path)
    for arguments in (["--gpu-gb", "80"], ["gpu_gb=80"]):
        assert launched("--check", path, *arguments) == 0
        out = capsys.readouterr().out
        assert "memory per GPU, against 80 GB" in out
        assert "not all (optimizer.max_kept_tokens)" in out
    assert launched("--gpu-gb", "80", path) == 0
    assert started == [["gpu_gb=80.0"]], "ranks read it too"


@pytest.mark.parametrize(
    ("cuda_gb", "arguments", "code", "said"),
    [
        (150.1, [], 0, ""),  # an H200 141GB
        (
            85.0,
            [],
            1,
            "and these have 85.0; what the file derives from it fits them with gpu_gb=85",
        ),
        (85.0, ["gpu_gb=80"], 0, ""),
        (
            120.0,
            [],
            0,
            "gpu_gb: written for GPUs of 141 GB, and these have 120.0; with gpu_gb=120 ",
        ),
        (150.1, ["gpu_gb=80"], 0, "with gpu_gb=150 follows what the file derives from it"),
        (20.0, [], 1, "memory: DOES NOT FIT"),
    ],
)
def test_a_start_on_other_gpus_than_stated_says_so(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    cuda_gb: float,
    arguments: list[str],
    code: int,
    said: str,
) -> None:
    monkeypatch.setattr("rl.simple_launch.launch", lambda *arguments: 0)
    monkeypatch.setattr("rl.simple_launch.placement.look_at_machine", lambda: Machine((cuda_gb,)))
    monkeypatch.setattr("rl.simple_launch.host_memory.here_gb", lambda: 1000.0)
    assert launched(sized(tmp_path), *arguments) == code
    printed = capsys.readouterr().err
    assert said in printed and (said or "gpu_gb" not in printed)


def test_a_start_looks_at_the_hosts_memory(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    machine = Machine((150.1,))
    assert report.problems_here(config, machine, 1, 64) == []
    [found] = report.problems_here(config, machine, 1, 3)
    assert (
        found.startswith("host memory: ") and "of 1 ranks on a machine, or in a container, of 3.0"
    )


def test_a_reader_that_leaves_early_changes_no_exit_code(tmp_path: Path) -> None:
    path = tiny_config.write(tmp_path, tiny_config.real(tmp_path, gpu_gb=60))
    command = f"{sys.executable} -m rl.simple_launch --check {path} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "")


def test_nodes_that_do_not_divide_the_ranks_are_no_less_wrong_under_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tiny_config.write(tmp_path, tiny_config.real(tmp_path, world_size=4)))
    nodes = ("--nnodes", "3", "--rdzv-endpoint", "host:1")
    assert launched("--check", *nodes, path) == 1
    assert "--nnodes 3 does not divide world_size 4" in capsys.readouterr().err


def test_a_start_is_refused_on_gpus_that_are_too_small(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the ranks' own GPUs as they are, or as --gpu-gb says they are."""
    monkeypatch.setattr("rl.simple_launch.launch", lambda *arguments: 0)
    monkeypatch.setattr("rl.simple_launch.host_memory.here_gb", lambda: 1000.0)
    path = str(tiny_config.write(tmp_path, tiny_config.real(tmp_path, world_size=2)))
    for cuda_gb, arguments, code in (
        ((85.5, 150.8), [], 1),  # the smaller of the two
        ((150.8, 150.8, 8.0), [], 0),
        ((85.5, 85.5), ["--gpu-gb", "141"], 0),
        ((150.8, 150.8), ["--gpu-gb", "80"], 1),
        ((), ["--gpu-gb", "1"], 0),  # a CPU
    ):
        machine = Machine(cuda_gb)
        monkeypatch.setattr("rl.simple_launch.placement.look_at_machine", lambda m=machine: m)
        assert launched(*arguments, path) == code, (cuda_gb, arguments)
        assert ("DOES NOT FIT by" in capsys.readouterr().err) == (code == 1)


def test_another_models_gpu_counts_as_it_is(tmp_path: Path) -> None:
    config = config_of(tmp_path, renderer={"type": "qwen_image_edit", "device": "cuda:+1"})
    assert report.problems_here(config, Machine((150.8, 46.0)), 1) == []
    [found] = report.problems_here(config, Machine((150.8, 45.0)), 1)
    assert found.startswith("renderer.device: renderer wants 45.2 GB of cuda:+1, which has 45; ")
    own = config_of(tmp_path, renderer={"type": "qwen_image_edit", "device": "cuda:0"})
    assert unfit(own, 80) == unfit(config_of(tmp_path), 80), "rank 0's own, spelled out"


def test_a_wrong_config_is_reported_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_config.write(tmp_path, tiny_config.real(tmp_path, num_iterations=None))
    for arguments in (["--check"], []):
        with pytest.raises(SystemExit) as caught:
            main([*arguments, str(path)])
        assert caught.value.code == 1
        printed = "".join(capsys.readouterr())
        assert "num_iterations, num_epochs: neither given; set one" in printed
    assert not (tmp_path / "runs").exists()
