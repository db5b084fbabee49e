"""The GPU benchmark at tiny size on the CPU, and the check of the attention kernel."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from tiny_messages import refusal

from benchmarks import bench_gpu, gpu_memory, gpu_models, gpu_policy
from benchmarks.gpu_models import REAL
from rl.algorithm import attention_kernels
from rl.algorithm.attention_kernels import Kernel, Runs
from rl.policies import trained_module
from rl.policies.policy_base import load_tokenizer
from rl.policies.qwen_vl_prompts import Config, QwenPrompts, load_image_processor
from rl.ranks.dist import Dist
from rl.renderers.qwen_image_edit import QwenImageEdit
from rl.tools import gpu_steps
from rl.tools.gpu_checks import Setup

pytestmark = pytest.mark.slow


def setup_in(folder, **more) -> Setup:
    return Setup(str(folder), str(folder), tiny=True, **more)


def run(out, cases: str) -> dict:
    """What -> its row of the results."""
    code = bench_gpu.main(["--tiny", "--cases", cases, "--out", str(out)])
    rows = [json.loads(row) for row in (out / "results.jsonl").read_text().splitlines()]
    assert code == 0 and "DONE" in (out / "report.md").read_text()
    return {row["what"]: row for row in rows}


def test_forwards_and_steps_at_tiny_size(tmp_path):
    found = run(tmp_path, "vae,dit,policy")
    ours = found["DiT 32^2 x 2 of different lengths, ours"]["data"]
    assert ours["ms"] > ours["floor_ms"] > 0 and ours["peer_ratio"] > 0
    assert found["VAE decode 64^2, ours against diffusers"]["status"] == "PASS"
    floors = [
        found[f"P=178 G=3 T=6, packed, checkpointing {value}"]["data"]["floor_ms"]
        for value in (False, "mlp", True)
    ]
    assert max(floors) < 2 * min(floors)  # each process of a case measures the rate once
    assert found["our step beside TRL tuned's"]["data"]["ratio"] > 0


@pytest.mark.campaign
def test_every_case_runs_at_tiny_size(tmp_path):
    found = run(tmp_path, ",".join(case.name for case in bench_gpu.CASES))
    assert {row["step"] for row in found.values()} == {case.name for case in bench_gpu.CASES}
    assert found["iterations at this size"]["note"] == "2 of 2"


def test_without_a_gpu_real_sizes_and_unknown_cases_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    out = ["--out", str(tmp_path), "--cases"]
    assert "--tiny" in refusal(bench_gpu.main, [*out, "dit"])
    assert "did you mean 'dit'?" in refusal(bench_gpu.main, [*out, "dti", "--tiny"], 2)


# The check of the attention kernel


def without_last_key(kernel: Kernel) -> Kernel:
    """The kernel without the last key of each non-causal part: one token of a prompt of 65."""

    def forward(query, key, value, runs: Runs):
        if runs.causal:
            return kernel.forward(query, key, value, runs)
        parts = (
            [k[:-1] for k in key.split(runs.key_lens)],
            [v[:-1] for v in value.split(runs.key_lens)],
        )
        shorter = replace(runs, key_lens=tuple(length - 1 for length in runs.key_lens))
        return kernel.forward(query, *(torch.cat(tensors) for tensors in parts), shorter)

    return Kernel(forward, kernel.backward)


def test_a_kernel_that_misses_one_key_fails_even_the_bfloat16_tolerance(tmp_path, monkeypatch):
    wrong = without_last_key(attention_kernels.CPU)
    monkeypatch.setattr(gpu_steps, "choose_kernel", lambda *_: wrong)
    monkeypatch.setattr(gpu_steps, "policy_outcomes", lambda setup: [{}, {}, {}])
    for limits in (gpu_steps.LARGEST_ERROR, gpu_steps.LARGEST_BIAS):
        monkeypatch.setitem(limits, "float32", gpu_steps.LARGEST_ERROR["bfloat16"])
    auto, *_ = gpu_steps.kernels(setup_in(tmp_path))
    assert auto.status == "FAIL" and auto.keys == {"policy.attn_implementation": "sdpa"}
    assert "in a group the result has a relative error" in auto.note


def test_a_policy_whose_kernel_is_wrong_fails(tmp_path, monkeypatch):
    wrong = without_last_key(attention_kernels.CPU)
    chosen = attention_kernels.choose_kernel
    for module in (gpu_steps, trained_module):
        monkeypatch.setattr(
            module,
            "choose_kernel",
            lambda name, *rest: wrong if name == "auto" else chosen(name, *rest),
        )
    lines = {line.what: line for line in gpu_steps.kernels(setup_in(tmp_path))}
    for what in ("log-probs", "states", "gradient"):
        assert lines[f"a policy's {what}"].status == "FAIL"
    assert lines["packed attention (sdpa) of Qwen2.5-VL"].status == "PASS"


def test_visible_tokens_of_packed_attention_by_hand():
    """A prompt of 2, completions of 2 and 1; then a prompt of 1 with one of 1."""
    mask = gpu_steps.visible(gpu_steps.groups_of([(2, (2, 1)), (1, (1,))]))
    rows = ["x......", "xx.....", "xxx....", "xxxx...", "xx..x..", ".....x.", ".....xx"]
    assert mask.tolist() == [[cell == "x" for cell in row] for row in rows]


def test_padded_rows_as_in_trl_have_our_log_probs(tmp_path):
    """Equal seeds give both equal weights; a fresh adapter changes nothing. TRL bans no tokens."""
    bench = gpu_models.open_bench(setup_in(tmp_path))
    torch.manual_seed(0)
    runner = gpu_policy.StepRunner(bench, False)
    prompt, ids_G = runner.examples[0]
    runner.policy.module.banned_token_ids = ()
    batch = runner.policy.collate([(prompt, ids) for ids in ids_G])
    torch.manual_seed(0)
    rows = gpu_policy.PaddedRows(bench, prompt, ids_G)
    with torch.no_grad():
        ours, theirs = runner.policy.module(batch).logprobs.flatten(), rows._logprobs(ids_G)
    assert (ours - theirs).abs().max() < 1e-4 < ours.std()


# Sizes


def test_real_sizes_are_those_of_the_released_models(tmp_path):
    bench = replace(gpu_models.open_bench(setup_in(tmp_path)), size=REAL)
    gpu_models.save_policy_files(bench)
    on_meta = replace(bench, dist=Dist(device="meta"))
    model = gpu_models.random_policy_model(on_meta, "bfloat16", "sdpa")
    tower = sum(p.numel() for p in model.model.visual.parameters())
    decoder = sum(p.numel() for p in model.parameters()) - tower
    assert (decoder / 1e9, tower / 1e9) == pytest.approx((7.616, 0.677), abs=1e-3)
    parts = {"all": 0, "modulation": 0}
    for name, parameter in gpu_models.random_transformer(on_meta).named_parameters():
        parts["all"] += parameter.numel()
        parts["modulation"] += parameter.numel() * ("img_mod" in name or "txt_mod" in name)
    assert [n / 1e9 for n in parts.values()] == pytest.approx([20.430, 6.797], abs=1e-3)

    assert (REAL.num_conditioning_tokens(1024), REAL.num_conditioning_tokens(512)) == (1735, 690)
    section = Config(
        type="qwen2_5_vl",
        model_path=str(tmp_path / "policy"),
        image_max_pixels=gpu_models.MAX_PICTURE_PX,
    )
    tokenizer = load_tokenizer(section)
    assert len(tokenizer) == 151_665
    for side_px, num_tokens in ((REAL.policy_px, 1543), (384, 370)):
        renderer = QwenImageEdit.Config(type="", policy_image_area_px=side_px**2)
        template = QwenImageEdit.prompt_template(renderer)
        prompts = QwenPrompts(tokenizer, load_image_processor(section), template, 2048)
        sample = gpu_models.make_sample(bench, side_px, 0)
        prompt = prompts.prompt(sample, sample.instruction)
        assert len(prompt.token_ids) == num_tokens == REAL.num_prompt_tokens(side_px)
        assert prompt.num_dropped_tokens == 64


def test_memory_steps_at_tiny_size(tmp_path, monkeypatch):
    """The same code as on a GPU; only the peak of its memory is not known here."""
    setup = setup_in(tmp_path, gpu_gb=80.0)
    for peak_gb, status in ((20.0, "PASS"), (90.0, "FAIL")):
        monkeypatch.setattr(gpu_memory, "peak_gb", lambda device, peak_gb=peak_gb: peak_gb)
        lines = [*gpu_memory.policy(setup)]
        for released in gpu_memory.SMALL:
            lines += gpu_memory.transformer(setup, released)
        assert [line.status for line in lines] == ["PASS", status] * 3


def test_a_batch_of_a_stock_pipeline_at_tiny_size(tmp_path, monkeypatch):
    for peak_gb, status in ((0.1, "PASS"), (1.0, "FAIL")):
        monkeypatch.setattr(gpu_memory, "peak_gb", lambda device, peak_gb=peak_gb: peak_gb)
        lines = [*gpu_memory.stock(setup_in(tmp_path))]
        assert [line.status for line in lines] == ["PASS", "MEASURED", status] * 2
    apart = lines[1].data
    assert apart["again"] < 1e-6 and apart["batch"] < 1e-6 < 1e-3 < apart["noise"]
