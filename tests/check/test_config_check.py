"""`--check` refuses each mistake with its key and fix, and reports the plan of a run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_config
from tiny_config import evaluated as shipped
from tiny_messages import code_of, holds

from rl import build
from rl.check import check_report, memory_plan
from rl.check.compatibility import memory_problems, plugin_problems
from rl.config.schema import RunConfig
from rl.ranks.dist import Machine
from rl.simple_launch import main


def config_of(folder: Path, *overrides: str, **changes: Any) -> RunConfig:
    return tiny_config.validated(
        tiny_config.changed(tiny_config.real(folder, **changes), *overrides)
    )


def problems_of(folder: Path, *overrides: str, **changes: Any) -> list[str]:
    return check_report.problems(config_of(folder, *overrides, **changes))


RIGHT = {"type": "viescore"}
NOTHING = {"type": "tiny_plugins.nothing"}
OWN = "rewards.own.type=viescore"
SECOND = 'rewards.own.judge={"api_base": "http://h:2", "model": "other"}'
HELD_OUT = "rewards.own.held_out_only=true"
BROKEN = [
    ("engine.max_model_length=64", "engine.max_model_length: ... 'max_model_len'"),
    ("policy.lora.alfa=3", "policy.lora.alfa: ... 'alpha'"),
    ("world_size=3", "prompts_per_iteration: ... 4 ... 3 ... world_size ... multiple of 3"),
    ("renderer.type=qwen_image_edt",
     "renderer.type: ... 'qwen_image_edt' ... rl/renderers ... 'qwen_image_edit'"),
    ("engine={}", "engine.type: ... missing ... transformers, vllm"),
    ('data.train=[{"type": "edit_jsonl", "path": "nowhere.jsonl"}]',
     "data.train.0: ... nowhere.jsonl ... exist"),
    ("policy.model_path=./weights", "policy.model_path: ... './weights'"),
    ("judge.api_base=", "judge.api_base ... empty ... URL"),
    ("judge.api_base=embedded",
     "judge.api_base ... 'embedded' ... http://host:4877 ... host:port ... judge.start_command"),
    ('judge={"start_command": ["no_such_judge", "{url_file}"]}',
     "judge.start_command: ... 'no_such_judge' ... PATH"),
    ('judge={"start_command": ["{python}", "-m", "my_judge"]}',
     "judge.start_command: ... '{url_file}'"),
    ('judge={"start_command": ["{python}"], "api_base": "http://h:x"}',
     "judge.api_base ... 'http://h:x' ... port"),
    ("judge.api_key_env=NO_SUCH_KEY_HERE",
     "judge.api_key_env ... NO_SUCH_KEY_HERE ... environment ... export"),
    (OWN, "rewards.own.judge.api_base=", "rewards.own.judge.api_base ... empty"),
    (OWN, 'rewards.own.judge={"start_command": ["no_such_judge", "{url_file}"]}',
     "rewards.own.judge.start_command: ... 'no_such_judge' ... PATH"),
    (OWN, "rewards.own.judge.modle=b", "rewards.own.judge.modle: ... 'model'"),
    (OWN, "rewards.own.held_out_only=yes", "rewards.own.held_out_only: ... yes"),
    (OWN, SECOND, "rewards.own.n_evals=2", "rewards.own.temperature=null", "judge.temperature=0.5",
     "rewards.own.n_evals: ... temperature 0"),
    ("rewards.vie.n_evals=3", "rewards.vie.temperature=null", "judge.temperature=0",
     "rewards.vie.n_evals: ... n_evals=3 ... temperature 0 ... above 0"),
    ('rewards.own={"type": "edit_quality", "temperature": 0}',
     "rewards.own.n_evals: ... n_evals=3 ... temperature 0 ... above 0"),
    ("rewards.own.type=tests.helpers.tiny_rewards.Ranks", SECOND, HELD_OUT,
     "rewards.own.held_out_only: ... compares ... one"),
    ("rewards={}", OWN, SECOND, HELD_OUT, "rewards: only diagnostics"),
    (OWN, SECOND, HELD_OUT, "final_reward.weights.own=1",
     "final_reward.weights.own: ... no picture of training"),
    ("renderer.type=none", "rewards.vie: ... pictures ... renderer none"),
    ("renderer.height_px=512", "renderer.height_px, width_px: ... both"),
    ("rewards={}", "rewards: ... empty"),
    ("final_reward.weights.view=1", "final_reward.weights.view: ... vie, vie/pq_01, vie/sc_01"),
    ("final_reward.weights.vie=0", "final_reward.weights: ... zero"),
    ("num_epochs=1", "num_iterations, num_epochs: ... both"),
    ("num_iterations=null", "num_iterations, num_epochs: ... neither"),
    ("generations_per_prompt=1", "generations_per_prompt: ... 1 ... mean"),
    ("optimizer.updates_per_iteration=5",
     "optimizer.updates_per_iteration: ... 5 updates ... 4 groups"),
    ("max_staleness=1", "optimizer.updates_per_iteration=2",
     "max_staleness: ... 1 ... optimizer.updates_per_iteration 2"),
    ("optimizer.warmup_iterations=3", "optimizer.warmup_iterations: ... 3"),
    ("engine.max_model_len=2048",
     "engine.max_model_len: ... 2048 (policy.max_prompt_tokens) ... "
     "256 (sampling.max_completion_tokens) ... 2304"),
    ("algorithm.kl_coeff=0.1", "algorithm.kl_estimator=k1",
     "algorithm.kl_estimator: ... 'k1' ... zero ... 'k2' or 'k3' ... kl_placement 'reward'"),
    ("algorithm.loss=gspo", "algorithm.importance_correction: ... 'token' ... 'gspo'"),
    ("engine.type=transformers", "optimizer.zero_stage=3",
     "engine.type: ... transformers ... ZeRO-3 ... 'vllm' ... optimizer.zero_stage <= 2"),
    ("evaluation.every_n_iterations=5", "data.validation: ... empty ... evaluation.every"),
    ("policy.lora.r=513", "engine.type: ... 512 ... policy.lora.r (513)"),
    ("policy.device=cuda:1",
     "engine.type: ... 'cuda:1' ... CUDA_VISIBLE_DEVICES=1 ... policy.device=auto"),
    ("policy.device=cuda:+1", "policy.device: ... 'cuda:+1' ... own device"),
    ("checkpoint.push_to_hub_every_n_iterations=5",
     "checkpoint.push_to_hub_repo_id: ... empty ... repository"),
    ("prompts_per_iteration=1000000", "generations_per_prompt=1000000",
     "generations_per_prompt: 1,000,000,000,000 completions"),
    ("judge.api_base=http://judge:99999", "judge.api_base ... range"),
    ("data.train.0.weight=0", "data.train.0.weight: 0 given ... greater than 0"),
    # correct variants
    ("rewards.vie.n_evals=3", "rewards.vie.temperature=0.5", "judge.temperature=0", ""),
    ("algorithm.kl_coeff=0.1", "algorithm.kl_estimator=k1", "algorithm.kl_placement=reward", ""),
    ("algorithm.kl_coeff=0", "algorithm.kl_estimator=k1", ""),
    ("algorithm.loss=gspo", "algorithm.importance_correction=sequence", ""),
    ("engine.type=transformers", "optimizer.backend=torch", "optimizer.zero_stage=3", ""),
    ("optimizer.zero_stage=3", ""),
    ("max_staleness=1", ""),
    ("optimizer.updates_per_iteration=2", ""),
]  # fmt: skip
"""Changes to a correct config, then parts of the message, the first of which is the key ("": no
message)."""


@pytest.mark.parametrize("row", BROKEN, ids=[" ".join(row[:-1]) for row in BROKEN])
def test_one_mistake_is_one_message(tmp_path: Path, row: tuple[str, ...]) -> None:
    *overrides, parts = row
    problems = problems_of(tmp_path, *overrides)
    assert len(problems) == bool(parts), problems
    for problem in problems:
        assert problem.startswith(parts.partition(" ... ")[0]) and holds(problem, parts), problem


ONE = {"one": NOTHING}


@pytest.mark.parametrize(
    ("attribute", "value", "changes", "expected"),
    [
        ("Nil.accepts", "image_tokens", {"renderer": NOTHING, "rewards": ONE},
         ["renderer.type: ... tiny_plugins.nothing ... image_tokens ... qwen2_5_vl ... or text"]),
        ("NothingMuch.needs", {"target", "answer"}, {"rewards": ONE},
         ["rewards.one: ... 'answer' ... data.train.0 ... column",
          "rewards.one: ... 'target' ... data.train.0 ... column"]),
        ("Nobody.needs", {"source_codes"},
         {"policy": NOTHING, "renderer": NOTHING, "rewards": ONE},
         ["policy.type: ... tiny_plugins.nothing ... 'source_codes' ... data.train.0 ... rl prep"]),
    ],
)  # fmt: skip
def test_what_a_plugin_accepts_or_needs_must_be_there(
    tmp_path: Path, monkeypatch: Any, attribute: str, value: Any, changes: Any, expected: list[str]
) -> None:
    monkeypatch.setattr(f"tiny_plugins.nothing.{attribute}", value)
    for problem, parts in zip(problems_of(tmp_path, **changes), expected, strict=True):
        assert holds(problem, parts), problem


def test_a_rubrics_pictures_must_be_in_the_data(tmp_path: Path) -> None:
    (question := tmp_path / "question.txt").write_text("Was {instruction} done?")
    section = {"type": "rubric", "prompt": str(question), "scores": {"success": {}}}
    assert problems_of(tmp_path, rewards={"mine": section}) == []
    section["shows"] = ["target", "prompt", "image"]
    [problem] = problems_of(tmp_path, rewards={"mine": section})
    assert holds(problem, "rewards.mine: ... 'target' ... data.train.0 ... column")


def test_a_renderer_that_edits_needs_sources(tmp_path: Path) -> None:
    problems = problems_of(tmp_path, 'data.train.0.columns={"source": ""}')
    assert any(holds(text, "data.train.0: ... edits ... source") for text in problems)


def test_a_users_plugins_are_named_by_dotted_path(tmp_path: Path) -> None:
    assert check_report.problems(tiny_config.validated(tiny_config.nothing(tmp_path))) == []
    for name, parts in (("os.path", "no Policy"), ("my.own.policy", "policy.type: ... 'my'")):
        assert holds(problems_of(tmp_path, policy={"type": name})[0], parts)


def test_mixture_weights_or_coefficients_are_checked(tmp_path: Path) -> None:
    source = tiny_config.real(tmp_path)["data"]["train"][0]
    mixture = [source | {"coefficient": 0.5}, source | {"coefficient": 3}]
    for train, weights in (
        ([source | {"weight": 3}, source], [3, 1]),
        (mixture, [50, 30]),  # times rows
    ):
        resolved = build.resolve(config_of(tmp_path, data={"train": train}))
        assert build.mixture_weights(resolved, [range(100), range(10)]) == weights
    unread = {"train": [source], "validation": [source | {"weight": 2}]}
    [problem] = problems_of(tmp_path, data=unread)
    assert holds(problem, "data.validation.0.weight: unknown key")
    [problem] = problems_of(tmp_path, data={"train": [mixture[0], source]})
    assert holds(problem, "data.train: ... every ... coefficient ... none")


def test_diagnostic_rewards_count_only_if_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tiny_plugins.nothing.NothingMuch.diagnostic", True)
    both = {"vie": RIGHT, "glance": NOTHING}
    for changes, weights in (
        ({}, {}),
        ({"rewards": both}, {"vie": 1}),
        ({"rewards": both, "final_reward": {"weights": {"glance": 2.0}}}, {"glance": 2}),
    ):
        assert build.resolve(config_of(tmp_path, **changes)).config.final_reward.weights == weights
    [only] = problems_of(tmp_path, rewards={"glance": NOTHING})
    assert holds(only, "rewards: ... diagnostics")


def test_epochs_become_iterations(tmp_path: Path) -> None:
    for epochs, num_samples, iterations in (
        (3, 10, 8),  # 30 prompts in batches of 4
        (3, 1, 1),
        (3, 11, 9),  # the last 33 - 8 x 4 are drawn, too
        (0.28, 100, 7),  # though 0.28 * 100 / 4 > 7
    ):
        config = config_of(tmp_path, num_iterations=None, num_epochs=epochs)
        assert build.num_iterations(config, num_samples) == iterations
    assert build.num_iterations(config_of(tmp_path), num_samples=10) == 3


def test_a_run_whose_checkpoints_are_gone_is_not_restarted(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    run = config.run_dir

    def first_line() -> str:
        text, code = check_report.report(config, gpu_gb=141)
        assert code == 0
        return text.splitlines()[0]

    run.mkdir(parents=True)
    assert first_line().endswith("starts afresh")
    (run / "metrics.jsonl").write_text('{"iteration": 1}\n')  # killed before the first
    assert "sets aside" in first_line()
    (run / "last_checkpoint.txt").write_text("step_000007\n")
    [problem] = check_report.problems(config)
    assert holds(problem, f"run_name: ... {run}/checkpoints ... step_000007 ... move {run} away")
    tiny_config.save_checkpoint(config, 5)
    assert "goes on after 5 iterations" in first_line()
    (run / "checkpoints" / "step_000005" / "manifest.json").unlink()
    assert "none of the 1 checkpoints" in check_report.problems(config)[0]


def test_the_report_of_a_correct_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    updates = {"updates_per_iteration": 2, "gradient_checkpointing": True}
    values = tiny_config.real(
        tmp_path,
        world_size=2,
        generations_per_prompt=8,
        rewards={"vie": RIGHT, "other": {"type": "edit_quality", "n_evals": 3}},
        optimizer={"max_tokens_per_micro_batch": 5000, **updates},
    )
    path = str(tiny_config.write(tmp_path, values))
    assert launched("--check", path, "gpu_gb=80", "judge.max_concurrency=10") == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for expected in (
        "prompts ... 4 an iteration ... 2 on each of 2 ranks",
        "completions ... 32 an iteration ... 16 on each of 2 ranks",
        "judge questions ... 160 an iteration ... 80 on each of 2 ranks",  # 32 x (2 + 3)
        "steps ... 2 an iteration ... 8 completions a rank",
        "forwards ... 5000 tokens ... 4096",  # 2048 + 8 x 256
        "kept for backward ... 4096 tokens ... optimizer.updates_per_iteration",
        "3 iterations of 4 prompts = 6 epochs of 2 samples",
        "160 questions an iteration ... 20 in flight ... 6 tries",
        "memory per GPU, against 80 GB",
        "nothing is wrong",
    ):
        assert any(holds(line, expected) for line in lines), expected


@pytest.mark.parametrize(
    ("change", "tokens", "remark"),
    [
        ("seed=1", 4 * 2560, "all there can be"),
        ("optimizer.max_kept_tokens=3000", 3000, "not all (optimizer.max_kept_tokens)"),
        ("optimizer.max_kept_tokens=99999", 4 * 2560, "all there can be"),
        ("max_staleness=1", 0, "not all (max_staleness 1)"),
        ("optimizer.zero_stage=3", 0, "not all (optimizer.zero_stage 3)"),
        ("policy.lora.dropout=0.1", 0, "not all (policy.lora.dropout)"),
    ],
)
def test_the_report_says_what_is_kept_for_the_backward(
    tmp_path: Path, change: str, tokens: int, remark: str
) -> None:
    """A step has 4 groups of 2048 + 2 x 256 tokens."""
    text, _ = check_report.report(config_of(tmp_path, change), gpu_gb=141)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert f"kept for backward {tokens} tokens on each rank, {remark}" in lines
    forwarded_again = any(line.startswith("activations of a forward") for line in lines)
    assert forwarded_again == (remark != "all there can be")


def unfit(config: RunConfig, gpu_gb: float) -> list[str]:
    return memory_problems(build.resolve(config), gpu_gb)


def remedies(problems: list[str]) -> list[str]:
    """The `key=value` overrides that the messages suggest, as a user would copy them."""
    return [word for text in problems for word in re.findall(r"[\w.]+=[^\s,;]+", text)]


def save_empty_lists(config: RunConfig) -> None:
    """Writes the lists that a config reads, with one edit each, as if the data had been fetched."""
    for source in [*config.data.train, *config.data.validation]:
        if source["type"] == "emu3_tokens":
            file = Path(source["path"])
            file.parent.mkdir(parents=True)
            file.write_text('{"path_list": ["1.pth"]}')
            (file.parent.parent / "1.pth").touch()


@pytest.mark.parametrize("name", tiny_config.SHIPPED)
def test_every_shipped_config_has_no_problems_and_fits_its_gpus(name: str) -> None:
    """A cache for a group fits, and a tenth of the GPU is free; derived values follow `gpu_gb`."""
    base = shipped(name)
    save_empty_lists(base)
    assert check_report.problems(base) == []
    smaller = {"sft", "vlm", "prompt"} & {name.partition("_")[0]}
    expected = 80 if smaller or name.startswith("qwen_image_21") else 141
    if name.startswith("one_"):
        expected = int(name.replace("card_edit", "gpu_24gb").split("_")[-1].removesuffix("gb"))
    assert base.gpu_gb == expected
    if stated := re.search(r"(\d+) x (\d+) GB", readme_row(name)):
        num_gpus = 3 if name == "prompt_enhancement" else base.world_size  # 1 process, 3 GPUs
        assert list(map(float, stated.groups())) == [num_gpus, base.gpu_gb]
    others = {80, 141} - {base.gpu_gb} if name in tiny_config.DISTINCT else set()
    for gpu_gb in (base.gpu_gb, *others):
        config = shipped(name, *([f"gpu_gb={gpu_gb}"] if gpu_gb in others else []))
        assert unfit(config, gpu_gb) == []
        planned = memory_plan.plan_of(build.resolve(config), gpu_gb)
        if config.policy.get("device") == "cpu":
            assert planned is None
            continue
        assert planned.engine.at_once >= config.generations_per_prompt
        assert planned.peak_gb <= 0.9 * gpu_gb


ROWS = {
    "one_card_edit",
    "one_gpu_24gb",
    "one_gpu_48gb",
    "one_gpu_80gb",
    "prompt_enhancement",
    "qwen_image_21",
    "qwen_image_21_fewstep",
    "qwen_image_edit",
    "qwen_image_edit_fewstep",
    "qwen_image_edit_plus",
    "vlm_reasoning",
}
"""Configs with a row of their own in the README; EARL's ten share one."""


def readme_row(stem: str) -> str:
    lines = (tiny_config.REPO / "README.md").read_text().splitlines()
    rows = [line for line in lines if f"`{stem}`" in line.split(" | ")[0] and " GB" in line]
    assert len(rows) == (stem in ROWS)
    return "".join(rows)


ENGINE = 'engine={"type":"transformers"}'


@pytest.mark.parametrize("gpu_gb", [24, 48, 80])
def test_a_config_for_one_gpu_needs_no_more(gpu_gb: float) -> None:
    config = shipped(f"one_gpu_{gpu_gb}gb")
    text, code = check_report.report(config, gpu_gb)
    assert code == 0 and text.endswith("nothing is wrong") and config.world_size == 1
    assert holds(text, "fits with ... GB to spare") and "no effect" not in text
    planned = memory_plan.plan_of(build.resolve(config), gpu_gb)
    parts = [] if planned is None else [item.part for item in planned.items]
    assert any(part.startswith("renderer") for part in parts) == (gpu_gb > 24), "no second GPU"


def test_sampling_with_the_policy_frees_the_engines_copy() -> None:
    name, recompute = "qwen_image_21_fewstep", "optimizer.gradient_checkpointing=true"
    assert recompute in remedies(unfit(shipped(name, "world_size=1"), 48))
    [problem] = unfit(shipped(name, "world_size=1", recompute), 48)
    assert holds(problem, "in phase 'load' ... engine={type:'transformers'} (")
    config = shipped(name, "world_size=1", recompute, ENGINE)
    assert check_report.report(config, 48)[1] == 0
    planned = memory_plan.plan_of(build.resolve(config), 48)
    assert planned.engine is None
    # 32 completions of 768 + 256 tokens, keys and values of 36 layers and 8 heads of 128, 2 bytes.
    [cache_gb] = [item.gb for item in planned.items if item.part == "key-value cache"]
    assert cache_gb == pytest.approx(32 * 1024 * 2 * 36 * 8 * 128 * 2 / 1e9)


def test_sd3_without_t5_saves_its_weights() -> None:
    overrides = ["gpu_gb=32", "renderer.device=auto"]
    assert "renderer.use_t5=false" in remedies(unfit(shipped("one_gpu_48gb", *overrides), 32))
    t5 = build.resolve(shipped("one_gpu_48gb", *overrides))
    none = build.resolve(shipped("one_gpu_48gb", *overrides, "renderer.use_t5=false"))
    before, after = (memory_plan.plan_of(resolved, 32) for resolved in (t5, none))
    assert after.peak_gb <= 32
    # 4.762 B parameters of 2 bytes.
    assert before.total_gb("render") - after.total_gb("render") == pytest.approx(4.762 * 2)
    # On a GPU of its own, SD3 takes nothing from the policy's.
    alone = shipped("one_gpu_48gb", "gpu_gb=12", "renderer.device=cuda:1")
    assert "renderer.use_t5=false" not in remedies(unfit(alone, 12))


SHARE = "engine.gpu_memory_utilization:"


def test_a_gpu_share_that_is_too_small_is_refused() -> None:
    for share, fits in ((0.25, True), (0.24, False), ("auto", True)):
        config = shipped("qwen_image_edit", f"engine.gpu_memory_utilization={share}")
        text, code = check_report.report(config, 80)
        assert (code == 0) == fits == text.endswith("\nnothing is wrong")
        assert fits or text.endswith(f"1 wrong\n  - {unfit(config, 80)[0]}")


@pytest.mark.parametrize(
    ("overrides", "gpu_gb", "parts"),
    [
        (["engine.dtype=float32", "engine.gpu_memory_utilization=0.16"], 141,
         f"{SHARE} ... 22.6 GB of 141 ... 30.4 GB ... =auto"),
        # the engine has a vision tower of its own
        (["policy.freeze_vision_tower=false", "engine.gpu_memory_utilization=0.16"], 80,
         f"{SHARE} ... 12.8 GB of 80 ... 16.6 GB ... =auto"),
        (["engine.gpu_memory_utilization=0.16"], 16,
         f"{SHARE} ... 2.6 GB of 16 ... 18.6 GB ... 15.2 GB ... larger GPU ... policy.model_path"),
        (["engine.gpu_memory_utilization=0.8"], 80,
         "memory: ... 30.2 GB ... 110.2 GB of 80 ... 'load' ... "
         "engine.gpu_memory_utilization=auto"),
        (["engine.residency=resident", "engine.gpu_memory_utilization=0.25", "world_size=4"], 80,
         "memory: ... 4.6 GB ... 84.6 GB of 80 ... 'render' ... engine.residency=sleep ("),
        (["optimizer.zero_stage=1"], 80,
         "memory: ... 20.9 GB ... 100.9 GB of 80 ... 'reference' (gradients 34.0 ... zero_stage=2"),
    ],
)  # fmt: skip
def test_a_config_that_does_not_fit_names_key_and_fix(
    overrides: list[str], gpu_gb: float, parts: str
) -> None:
    name = "sft_s__rl_sc" if "optimizer.zero_stage=1" in overrides else "qwen_image_edit"
    problems = unfit(shipped(name, *overrides), gpu_gb)
    assert any(holds(problem, parts) for problem in problems), problems


def test_each_row_has_the_keys_that_shrink_it_unless_they_are_set() -> None:
    """The fullest phase, its largest items, then keys, the cheapest for the user first."""
    [problem] = unfit(shipped("vlm_reasoning", "optimizer.gradient_checkpointing=false"), 24)
    first, *_, last = remedies([problem])
    assert holds(problem, "'learn' (activations of a forward 38.7, policy weights 3.8 ... ; what")
    assert (first, last) == (
        "optimizer.gradient_checkpointing=mlp",
        "optimizer.max_tokens_per_micro_batch=1",
    )
    assert "max_kept_tokens" not in problem, "nothing is kept in this phase"
    [problem] = unfit(shipped("vlm_reasoning", "optimizer.gradient_checkpointing=true"), 6)
    assert "gradient_checkpointing" not in problem


def test_no_key_is_enough_on_a_small_gpu() -> None:
    [problem] = unfit(shipped("qwen_image_edit", "world_size=8"), 24)
    assert problem.startswith("memory: DOES NOT FIT by ") and problem.endswith("or a smaller model")
    least = ["optimizer.gradient_checkpointing=true", "optimizer.max_kept_tokens=0"]
    least += ["optimizer.max_tokens_per_micro_batch=1", "engine={type: 'transformers'}"]
    least += ["policy.device=auto"]
    [problem] = unfit(shipped("quickstart", *least, "renderer.batch_size=1"), 1)
    assert holds(problem, "memory: ... 1.8 GB ... 2.8 GB of 1 ... 'learn' ... no key; else larger")


def test_a_policy_on_the_cpu_has_no_gpu_memory_plan() -> None:
    text, code = check_report.report(shipped("quickstart"), 1)
    assert code == 0 and "not planned: policy.device is 'cpu'" in text


@pytest.mark.parametrize(
    ("overrides", "section", "parts"),
    [
        (["policy.model_path=nobody/knows", "policy.init_text_encoder_from=''"], "policy",
         "'nobody/knows' ... local folder"),
        (["renderer.model_path=nobody/knows"], "renderer", "qwen_image_edit ... 'nobody/knows'"),
        (["rewards.clip={type: 'clip', model_path: 'nobody/knows'}"], "rewards.clip",
         "clip ... 'nobody/knows'"),
        (["engine={type: 'tiny_plugins.nothing'}"], "engine", "tiny_plugins.nothing"),
    ],
)  # fmt: skip
def test_a_model_of_unknown_size_is_not_said_to_fit(
    overrides: list[str], section: str, parts: str
) -> None:
    text, code = check_report.report(shipped("qwen_image_edit", *overrides), 141)
    [unknown] = (line for line in text.splitlines() if f"unknown: {section}: " in line)
    assert holds(unknown, parts) and code == 0
    assert holds(text.splitlines()[-1], f"unknown ... {section}")
    assert "nothing is wrong" not in text and "  fits with" not in text


launched = partial(code_of, main)


def sized(folder: Path) -> str:
    """A config that fits smaller GPUs only because it keeps less for the backward there."""
    values = json.dumps(tiny_config.real(folder, gpu_gb=141))
    path = folder / "sized.jsonnet"
    path.write_text(
        f"{values} + {{ optimizer: {{ max_kept_tokens: if $.gpu_gb > 130 then null else 0, "
        "gradient_checkpointing: $.gpu_gb <= 130 } }"
    )
    return str(path)


@pytest.mark.parametrize(
    ("changes", "arguments", "code", "parts"),
    [
        ({"gpu_gb": 60}, [], 1, "against 60 GB"),
        ({"gpu_gb": 60}, ["gpu_gb=141"], 0, "nothing is wrong"),
        ({"world_size": 4}, ["--nnodes", "3", "--rdzv-endpoint", "host:1"], 1,
         "--nnodes 3 ... world_size 4"),
    ],
)  # fmt: skip
def test_check_plans_for_the_configs_own_gpus(
    tmp_path: Path, capsys: Any, changes: Any, arguments: list[str], code: int, parts: str
) -> None:
    path = str(tiny_config.write(tmp_path, tiny_config.real(tmp_path, **changes)))
    assert launched("--check", path, *arguments) == code
    assert holds("".join(capsys.readouterr()), parts)


def test_the_config_follows_the_requested_gpu_size(tmp_path, capsys, monkeypatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr("rl.simple_launch.launch", lambda args, *_: started.append(args.overrides))
    path = sized(tmp_path)
    assert launched("--check", path, "gpu_gb=80") == launched(path, "gpu_gb=80") == 0
    assert holds(capsys.readouterr().out, "against 80 GB ... (optimizer.max_kept_tokens)")
    assert started == [["gpu_gb=80"]], "the ranks get the size too"


TWO_RANKS = "world_size=2"


@pytest.mark.parametrize(
    ("cuda_gb", "arguments", "code", "parts"),
    [
        ([150.1], [], 0, ""),  # an H200 141GB
        ([85.0], [], 1, "85.0 ... add gpu_gb=85"),
        ([85.0], ["gpu_gb=80"], 0, ""),
        ([120.0], [], 0, "gpu_gb: ... 141 GB ... 120.0 ... add gpu_gb=120"),
        ([150.1], ["gpu_gb=80"], 0, "add gpu_gb=150"),
        ([20.0], [], 1, "memory: DOES NOT FIT"),
        ([45.0, 150.8], [TWO_RANKS], 1, "memory: DOES NOT FIT"),  # the smaller GPU counts
        ([150.8, 150.8, 8.0], [TWO_RANKS], 0, ""),
        ([], [], 0, ""),  # a CPU
    ],
)
def test_a_start_is_checked_against_its_gpus(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    cuda_gb: list[float],
    arguments: list[str],
    code: int,
    parts: str,
) -> None:
    """The GPUs count with their real sizes."""
    monkeypatch.setattr("rl.simple_launch.launch", lambda *arguments: 0)
    monkeypatch.setattr("rl.ranks.dist.look_at_machine", lambda: Machine(tuple(cuda_gb)))
    monkeypatch.setattr("rl.simple_launch.this_machine.host_memory_gb", lambda: 1000.0)
    assert launched(sized(tmp_path), *arguments) == code
    printed = capsys.readouterr().err
    assert holds(printed, parts) and (parts or "gpu_gb" not in printed)


def test_a_start_checks_the_hosts_memory(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    machine = Machine((150.1,))
    assert check_report.problems_here(config, machine, 1, 64) == []
    [problem] = check_report.problems_here(config, machine, 1, 3)
    assert holds(problem, "host memory: ... 1 ranks ... 3.0")


def test_a_closed_output_pipe_keeps_the_exit_code(tmp_path: Path) -> None:
    path = tiny_config.write(tmp_path, tiny_config.real(tmp_path, gpu_gb=60))
    command = f"{sys.executable} -m rl.simple_launch --check {path} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (1, "")


def test_zero_3_is_no_remedy_where_the_starting_weights_are_read() -> None:
    """Full fine-tuning with a KL term: a start under ZeRO-3 would be refused."""
    [problem] = unfit(shipped("sft_s__rl_sc"), 24)
    assert "policy weights" in problem and "zero_stage" not in problem
    [problem] = unfit(shipped("sft_s__rl_sc", "algorithm.kl_coeff=0"), 24)
    assert "optimizer.zero_stage=3" in remedies([problem])
    [refused] = plugin_problems(build.resolve(shipped("sft_s__rl_sc", "optimizer.zero_stage=3")))
    assert holds(refused, "optimizer.zero_stage: ... ZeRO-3 ... KL ... use 2")


def test_a_wrong_config_is_reported_and_starts_nothing(tmp_path, capsys) -> None:
    path = tiny_config.write(tmp_path, tiny_config.real(tmp_path, num_iterations=None))
    for arguments in (["--check"], []):
        assert launched(*arguments, str(path)) == 1
        assert holds("".join(capsys.readouterr()), "num_iterations, num_epochs: ... neither")
    assert not (tmp_path / "runs").exists()
