"""A trained rewriter in use: as it was trained, in batches, from Python and the command line."""

from __future__ import annotations

import argparse
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_policy
import tiny_qwen
import tiny_qwen3
import torch
from tiny_act import act_group

from rl import build, enhance
from rl.api.engine import EngineSetup
from rl.api.plug import PlugConfig
from rl.api.policy import Policy, PolicySetup
from rl.api.types import Sample, SamplingParams
from rl.commands import enhance as script
from rl.config.schema import load_config
from rl.engines.transformers import TransformersEngine
from rl.enhance import SYSTEM_PROMPT, Enhancer, policy_section
from rl.policies import qwen2_5_vl
from rl.preflight import compatibility
from rl.ranks.seeding import derive_seed
from rl.record import checkpoint
from rl.record.adapter_base import Base, noted
from rl.rewards.prompt_quality import score

PROMPTS = ["a cat", "a red square to the left of a blue circle", "the sky", "add an image"]
PICTURES = [None, tiny_qwen.picture(1), None, tiny_qwen.picture(2, 92, 64)]
RUN_SYSTEM_PROMPT = "Describe the image."
NUM_TOKENS = 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_qwen.save_policy_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def enhancer(model: str) -> Enhancer:
    return Enhancer(model, device="cpu")


def trained(model: str, **section: Any) -> qwen2_5_vl.Qwen25VL:
    """A policy as a run with renderer sd3 would have trained it."""
    config = qwen2_5_vl.Config(
        **{**run_section(model), "lora": tiny_policy.LORA, "device": "cpu", **section}
    )
    policy = qwen2_5_vl.Qwen25VL(config, PolicySetup("text", max_completion_tokens=NUM_TOKENS))
    if config.lora is not None:
        tiny_policy.wake_lora(policy)
    return policy


def run_section(model: str) -> dict[str, Any]:
    return {
        "type": "qwen2_5_vl",
        "model_path": model,
        "dtype": "float32",
        "system_prompt": RUN_SYSTEM_PROMPT,
        "max_prompt_tokens": 300,
    }


def write_run(folder: Path, section: dict[str, Any], renderer: dict[str, Any]) -> None:
    """The `config.json` of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "format": 3,
        "run_name": "tiny",
        "base_exp_dir": str(folder.parent),
        "num_iterations": 1,
        "prompts_per_iteration": 1,
        "generations_per_prompt": 2,
        "policy": section,
        "engine": {"type": "vllm"},
        "renderer": renderer,
        "rewards": {"clip": {"type": "clip"}},
        "data": {"train": [{"type": "prompts"}]},
    }
    (folder / "config.json").write_text(json.dumps(config))


def tensors_of(policy: Policy[Any]) -> dict[str, torch.Tensor]:
    return {n: p.detach() for n, p in policy.module.named_parameters() if p.requires_grad}


@pytest.fixture(scope="module")
def run_dir(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one adapter, as a checkpoint lies on disk."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    section = {**run_section(model), "lora": tiny_policy.LORA}
    write_run(folder, section, {"type": "sd3", "num_steps": 4})
    policy = trained(model)
    policy.save_pretrained(str(model_folder(folder)), tensors_of(policy))
    return folder


def model_folder(run: Path) -> Path:
    return run / "checkpoints" / "step_000001" / "model"


def by_engine(policy: Any, temperature: float, seed: int = 0) -> list[str]:
    """What the sampler of training writes for each prompt alone, from the same seeds."""
    samples = [
        Sample(f"s{number}", prompt, sources=(picture,) if picture else ())
        for number, (prompt, picture) in enumerate(zip(PROMPTS, PICTURES, strict=True))
    ]
    params = SamplingParams(temperature, 1.0, -1, NUM_TOKENS, num_completions=1)
    prompts = [policy.build_prompt(sample) for sample in samples]
    seeds = [derive_seed("evaluation", seed, "sampling", prompt) for prompt in PROMPTS]
    groups = TransformersEngine(PlugConfig(), EngineSetup(policy, "cpu")).generate(
        prompts, params, seeds
    )
    return [
        act_group(policy, prompt, group)[0].text
        for prompt, group in zip(prompts, groups, strict=True)
    ]


def rewritten(enhancer: Enhancer, **options: Any) -> list[str]:
    settings = {"max_new_tokens": NUM_TOKENS, "batch_size": 4, **options}
    return [result.enhanced for result in enhancer.enhance_batch(PROMPTS, PICTURES, **settings)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_batch_is_what_the_sampler_of_training_writes(
    enhancer: Enhancer, model: str, temperature: float
) -> None:
    expected = by_engine(trained(model, lora=None, system_prompt=SYSTEM_PROMPT), temperature)
    assert len(set(expected)) == 4
    for batch_size in (1, 3, 4):
        assert rewritten(enhancer, temperature=temperature, batch_size=batch_size) == expected


def test_another_seed_gives_other_words(enhancer: Enhancer) -> None:
    assert rewritten(enhancer, seed=1) != rewritten(enhancer)
    assert rewritten(enhancer, seed=1, temperature=0.0) == rewritten(enhancer, temperature=0.0)


def test_the_order_of_prompts_does_not_matter(enhancer: Enhancer) -> None:
    forward = enhancer.enhance_batch(PROMPTS, batch_size=2, max_new_tokens=NUM_TOKENS)
    backward = enhancer.enhance_batch(PROMPTS[::-1], batch_size=3, max_new_tokens=NUM_TOKENS)
    assert forward == backward[::-1]
    alone = enhancer.enhance(PROMPTS[1], max_new_tokens=NUM_TOKENS)
    assert alone == forward[1]


def test_a_result_reports_itself(enhancer: Enhancer) -> None:
    result = enhancer.enhance("  a cat ", max_new_tokens=3)
    assert (result.original, result.num_tokens, result.finish) == ("a cat", 3, "length")
    assert result.quality == score("a cat", result.enhanced)
    assert result.quality_0_5 == sum(result.quality.values())


def test_it_stops_where_the_policy_stops(enhancer: Enhancer) -> None:
    policy = enhancer._editor.policy
    stop = policy.stop_token_ids[0]
    head = policy.module.base_model.lm_head.weight
    before = head[stop].clone()
    with torch.no_grad():
        head[stop] = 10 * head[: stop - 1].norm() * torch.sign(torch.randn(head.shape[1]))
    try:
        results = enhancer.enhance_batch(PROMPTS, temperature=1.0, max_new_tokens=200)
    finally:
        with torch.no_grad():
            head[stop] = before
    stopped = [result for result in results if result.finish == "stop"]
    assert stopped and all(result.num_tokens < 200 for result in stopped)
    for result in results:
        assert result.enhanced and "<|im_end|>" not in result.enhanced
        if result.num_tokens == 1:
            assert result.enhanced == result.original


def test_empty_prompts_are_refused(enhancer: Enhancer) -> None:
    with pytest.raises(ValueError, match="prompt 2 is empty"):
        enhancer.enhance_batch(["a cat", "  "])
    with pytest.raises(ValueError, match="prompt 2 is empty"):
        enhancer.enhance_stream(["a cat", "  "])  # before the first is taken


def test_a_batch_of_nothing_is_refused(enhancer: Enhancer) -> None:
    with pytest.raises(ValueError, match="batch_size is 0"):
        enhancer.enhance_batch(["a cat"], batch_size=0)


@pytest.mark.parametrize("place", ["run", "checkpoint", "model"])
def test_an_adapter_is_used_as_its_run_trained_it(
    model: str, run_dir: Path, place: str, enhancer: Enhancer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "problem_of", lambda step: None)  # no manifest lies here
    folder = model_folder(run_dir)
    given = {"run": run_dir, "checkpoint": folder.parent, "model": folder}[place]
    tuned = Enhancer(adapter_path=given, device="cpu")
    assert tuned.system_prompt == RUN_SYSTEM_PROMPT
    if place == "model":
        expected = by_engine(trained(model), 1.0)
        assert rewritten(tuned, temperature=1.0) == expected
        assert rewritten(enhancer, temperature=1.0) != expected


def test_a_run_that_thinks_has_room_for_its_thought_and_says_what_it_left_alone(
    model: str, run_dir: Path, tmp_path: Path, enhancer: Enhancer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "problem_of", lambda step: None)  # no manifest lies here
    thought = {"marker": "never written"}
    section = {**run_section(model), "lora": tiny_policy.LORA, "thought": thought}
    write_run(tmp_path, section, {"type": "sd3", "num_steps": 4})
    shutil.copytree(run_dir / "checkpoints", tmp_path / "checkpoints")
    tuned = Enhancer(adapter_path=tmp_path, device="cpu")
    assert (enhancer.max_new_tokens, tuned.max_new_tokens) == (enhance.MAX_NEW_TOKENS, 256)
    result = tuned.enhance("a cat", max_new_tokens=NUM_TOKENS)
    assert result.enhanced == "a cat" and result.thought
    assert str(result.failure).startswith("unfinished thought: ")
    assert script.as_row(result)["failure"] == result.failure
    whole = enhancer.enhance("a cat", max_new_tokens=NUM_TOKENS)
    assert whole.failure is None and "failure" not in script.as_row(whole)


def test_an_adapter_without_its_run_goes_by_its_own_file(
    model: str, run_dir: Path, tmp_path: Path
) -> None:
    for file in model_folder(run_dir).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    section = policy_section(None, tmp_path, None)
    assert section["model_path"] == model
    assert section["lora"] == {"r": 4, "alpha": 8}
    assert section["system_prompt"] == SYSTEM_PROMPT
    assert policy_section("other/base", tmp_path, "Be brief.") == {
        **section,
        "model_path": "other/base",
        "system_prompt": "Be brief.",
    }


def test_an_adapter_of_an_editors_text_encoder(run_dir: Path, tmp_path: Path) -> None:
    """Under both spellings."""
    for file in model_folder(run_dir).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    file = tmp_path / "adapter_config.json"
    written = json.loads(file.read_text())
    editor = Base("Qwen/Qwen-Image-Edit", subfolder="text_encoder", words="some/words")
    expected = {
        "model_path": "some/words",
        "init_text_encoder_from": "Qwen/Qwen-Image-Edit",
        "text_encoder_subfolder": "text_encoder",
    }
    file.write_text(json.dumps({**written, **noted(editor, "Any")}))
    assert policy_section(None, tmp_path, None).items() >= expected.items()
    old = {"base_model_name_or_path": "Qwen/Qwen-Image-Edit/text_encoder", "auto_mapping": None}
    file.write_text(json.dumps({**written, **old}))
    with pytest.raises(ValueError, match=r"write auto_mapping.base_model_tokenizer into its"):
        policy_section(None, tmp_path, None)
    other = policy_section("other/base", tmp_path, None)
    assert other["model_path"] == "other/base" and "init_text_encoder_from" not in other


def test_another_base_and_place_leave_the_runs_own_behind(
    model: str, run_dir: Path, tmp_path: Path
) -> None:
    section = {
        **run_section(model),
        "lora": tiny_policy.LORA,
        "revision": "a-commit-of-it",
        "attn_implementation": "varlen",
    }
    write_run(tmp_path, section, {"type": "sd3", "num_steps": 4})
    folder = model_folder(tmp_path)
    folder.mkdir(parents=True)
    for file in model_folder(run_dir).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    assert policy_section(None, folder, None)["revision"] == "a-commit-of-it"
    other = policy_section("other/base", folder, None)
    assert other["model_path"] == "other/base" and "revision" not in other
    assert other["system_prompt"] == RUN_SYSTEM_PROMPT
    assert other["attn_implementation"] == "auto"


def test_a_whole_model_needs_no_base(model: str, tmp_path: Path) -> None:
    run = tmp_path / "full"
    write_run(run, {**run_section(model), "lora": None}, {"type": "sd3"})
    policy = trained(model, lora=None)
    with torch.no_grad():
        for parameter in policy.module.base_model.model.language_model.layers.parameters():
            parameter.mul_(1.5)
    policy.save_pretrained(str(model_folder(run)), tensors_of(policy))
    tuned = Enhancer(adapter_path=model_folder(run), device="cpu")
    assert rewritten(tuned, temperature=1.0) == by_engine(policy, 1.0)
    with pytest.raises(ValueError, match="is a whole model"):
        policy_section("other/base", model_folder(run), None)


def test_an_editors_policy_is_refused(model: str, run_dir: Path, tmp_path: Path) -> None:
    run = tmp_path / "edits"
    write_run(run, run_section(model), {"type": "qwen_image_edit"})
    model_folder(run).mkdir(parents=True)
    (model_folder(run) / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 8}')
    with pytest.raises(ValueError, match="'qwen_image_edit', which takes hidden_states"):
        policy_section(None, model_folder(run), None)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds neither adapter_config.json nor config.json"):
        policy_section(None, tmp_path, None)
    (tmp_path / "checkpoints" / "step_000001").mkdir(parents=True)
    with pytest.raises(ValueError, match="none of its 1 checkpoints is whole"):
        policy_section(None, tmp_path, None)


def test_the_best_device_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert enhance.pick_device() == "cuda:0"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert enhance.pick_device() == "cpu"
    dtypes = [enhance.pick_dtype(device) for device in ("cuda:0", "cpu")]
    assert dtypes == ["bfloat16", "float32"]


def test_the_command_line_reads_and_writes(
    model: str, tmp_path: Path, enhancer: Enhancer, capsys: pytest.CaptureFixture[str]
) -> None:
    PICTURES[1].save(tmp_path / "p.png")
    rows = [{"prompt": PROMPTS[0]}, {"prompt": PROMPTS[1], "image": "p.png"}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    options = ["--model", model, "--device", "cpu", "--max-new-tokens", str(NUM_TOKENS)]
    out = tmp_path / "out.jsonl"
    script.main([*options, "--file", str(file), "--out", str(out)])
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["enhanced"] for row in written] == rewritten(enhancer)[:2]
    assert [row["original"] for row in written] == PROMPTS[:2]
    assert set(written[0]["quality"]) == set(score("a", "b"))
    capsys.readouterr()
    script.main([*options, "--temperature", "0", PROMPTS[0]])
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["enhanced"] == rewritten(enhancer, temperature=0.0)[0]


def test_what_is_refused_leaves_the_file_of_before(model: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("before")
    options = ["--model", model, "--device", "cpu", "--out", str(out)]
    wrong = ((["a cat", " "], "prompt 2 is empty"), (["a cat", "a " * 3000], "tokens"))
    for prompts, words in wrong:
        with pytest.raises(SystemExit, match=words):
            script.main([*options, *prompts])
        assert out.read_text() == "before"


@pytest.mark.parametrize("size", ["0", "-1", "two"])
def test_a_batch_holds_one_prompt_at_least(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main(["--batch-size", size, "a cat"])
    assert f"--batch-size: {size!r} is no whole number of 1 or more" in capsys.readouterr().err


def test_a_qwen3_rewrites_too_and_its_own_files_say_what_it_is(tmp_path: Path) -> None:
    """As the engine of training writes, its adapter lying alone."""
    model = tiny_qwen3.save_policy_folder(tmp_path / "model")
    policy = tiny_qwen3.make_qwen3(model, "text", None, {"system_prompt": SYSTEM_PROMPT})
    tiny_policy.wake_lora(policy)
    policy.save_pretrained(str(tmp_path / "adapter"), tensors_of(policy))
    assert policy_section(model, None, None)["type"] == "qwen3_vl"
    enhancer = Enhancer(adapter_path=tmp_path / "adapter", device="cpu")
    assert rewritten(enhancer, temperature=0.0) == by_engine(policy, 0.0)


def test_the_shipped_config_trains_under_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    repo = Path(enhance.__file__).parents[1]
    monkeypatch.chdir(repo)
    names = {"APP__BASE_EXP_DIR": "runs", "APP__RUN_NAME": "mine"}
    places = {}
    for override in ("one_gpu=false", "one_gpu=true"):
        config = load_config(repo / "configs" / "prompt_enhancement.jsonnet", [override], names)
        assert config.policy["system_prompt"] == SYSTEM_PROMPT
        resolved = build.resolve(config)
        assert compatibility.compatibility_problems(resolved) == []
        places[override] = [claim.device for claim in build.claims(resolved)]
    assert places["one_gpu=false"] == ["auto", "cuda:1", "cuda:2"]
    assert places["one_gpu=true"] == ["auto", "auto", "auto"]


def test_prompts_come_from_stdin_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = argparse.Namespace(prompts=[], file=None)

    def pipe(content: bytes) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), "utf-8"))

    odd = "a\u2028cat\u0085in\rthe\x0crain"
    pipe(f"a cat\r\n\n{odd}\n".encode())
    assert script.read_prompts(nothing) == (["a cat", odd], [None, None])
    pipe(b"a cat\n\xff\n")
    with pytest.raises(SystemExit, match="standard input, row 2: is not UTF-8"):
        script.main([])
    pipe(b"")
    for arguments in ([], ["--file", "x.csv"], ["--file", "x.txt", "a cat"], ["--file", "no.txt"]):
        with pytest.raises(SystemExit, match=r"no prompts|neither|give one of them|does not exist"):
            script.main(arguments)
