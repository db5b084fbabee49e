"""The GPU benchmark at tiny size on the CPU, and its check of the attention kernel."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import bench_gpu, gpu_check, gpu_models, gpu_policy, gpu_real_size
from benchmarks.gpu_bench import Bench, Report
from benchmarks.gpu_models import REAL, TINY
from rl.algorithm import attention_kernels
from rl.algorithm.attention_kernels import Kernel, Runs
from rl.check_gpu import gpu_kernels
from rl.check_gpu.lines import Asked
from rl.policies.qwen_vl.qwen_vl_loading import Config, load_image_processor, load_tokenizer
from rl.policies.qwen_vl.qwen_vl_prompts import QwenPrompts
from rl.ranks.dist import Dist
from rl.renderers import qwen_image_edit

pytestmark = pytest.mark.slow


def run(out: Path, items: str) -> tuple[int, dict]:
    code = bench_gpu.main(["--tiny", "--items", items, "--out", str(out)])
    [record] = out.glob("*.json")
    assert record.with_suffix(".md").exists()
    return code, json.loads(record.read_text())


def new_bench(folder: Path, size=TINY) -> Bench:
    return Bench(Dist(), size, 0.0, folder, Report())


@pytest.mark.campaign
def test_every_item_but_the_slow_two_runs_on_a_cpu(tmp_path, capsys):
    code, record = run(tmp_path, "4,6,3,2,4b,1")
    assert code == 0 and record["failures"] == []
    items = [line["item"] for line in record["lines"]]
    assert list(dict.fromkeys(items)) == ["1", "4b", "2", "3", "4", "6"]
    lines = {line["what"]: line for line in record["lines"]}
    assert lines["packed attention on this device"]["note"] == "PASS"
    ours = lines["DiT 32^2 x 2 of different lengths, ours"]
    assert ours["ms"] > ours["floor_ms"] > 0 and ours["peer_ratio"] > 0
    group = lines["P=178 G=3 T=6, packed, attention sdpa, gradient_checkpointing False"]
    recomputed = lines["P=178 G=3 T=6, packed, attention sdpa, gradient_checkpointing True"]
    assert group["floor_ms"] == pytest.approx(recomputed["floor_ms"], rel=1e-6)
    assert "TRL stock's passes over ours" in capsys.readouterr().out
    assert str(tmp_path) not in json.dumps(record)


@pytest.mark.campaign
def test_whole_iterations_and_the_sampler_run_on_a_cpu(tmp_path):
    code = bench_gpu.main(
        ["--tiny", "--items", "5,7", "--seconds-per-item", "12", "--out", str(tmp_path)]
    )
    [record] = tmp_path.glob("*.json")
    lines = {line["what"]: line for line in json.loads(record.read_text())["lines"]}
    assert code == 0
    for policy in ("on-policy", "one step off-policy"):
        assert 0 < lines[f"64^2, 2 steps, judge 0 s, {policy}"]["floor_share"] < 1
    assert lines["adapter synced and read back"]["ms"] > 0


def test_a_failing_item_does_not_stop_the_others(tmp_path, monkeypatch):
    def broken(bench: Bench) -> None:
        bench.log("half of it", ms=1.0)
        raise RuntimeError("no such file: /home/somebody/secret/weights.bin\nand more")

    monkeypatch.setattr(gpu_check, "matmul_rate", broken)
    code, record = run(tmp_path, "1,4b")
    assert code == 1
    assert record["failures"] == ["1: RuntimeError: no such file: weights.bin"]
    items = [(line["item"], line["what"]) for line in record["lines"]]
    assert items[0] == ("1", "half of it")
    assert items[-1] == ("4b", "packed attention on this device")


def test_real_sizes_are_refused_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="--tiny"):
        bench_gpu.main(["--items", "1"])
    with pytest.raises(SystemExit):
        bench_gpu.main(["--items", "1,9", "--tiny"])


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
    monkeypatch.setattr(attention_kernels, "choose_kernel", lambda *_: wrong)
    monkeypatch.setattr(gpu_check, "_policy_problems", lambda bench: [])
    for limits in (gpu_kernels.LARGEST_ERROR, gpu_kernels.LARGEST_BIAS):
        monkeypatch.setitem(limits, "float32", gpu_kernels.LARGEST_ERROR["bfloat16"])
    bench = new_bench(tmp_path)
    gpu_check.packed_attention(bench)
    assert bench.attention == "sdpa"
    assert any(
        "a group: result has a relative error" in failure for failure in bench.report.failures
    )
    assert not any("prompts alone" in failure for failure in bench.report.failures)
    assert bench.report.lines[-1].note.startswith("FAIL")


def test_visible_tokens_of_packed_attention_by_hand():
    """A prompt of 2, completions of 2 and 1; then a prompt of 1 with one of 1."""
    mask = gpu_kernels.visible(gpu_kernels.groups_of([(2, (2, 1)), (1, (1,))]))
    rows = ["x......", "xx.....", "xxx....", "xxxx...", "xx..x..", ".....x.", ".....xx"]
    assert mask.tolist() == [[cell == "x" for cell in row] for row in rows]


def test_padded_rows_as_in_trl_have_our_log_probs(tmp_path):
    """Equal seeds give both equal weights; a fresh adapter changes nothing. TRL bans no tokens."""
    bench = new_bench(tmp_path)
    gpu_models.save_policy_files(bench)
    torch.manual_seed(0)
    runner = gpu_policy.StepRunner(bench, 56, "auto", False)
    prompt, ids_G = runner.examples[0]
    runner.policy.module.banned_token_ids = ()
    batch = runner.policy.collate([(prompt, ids) for ids in ids_G])
    torch.manual_seed(0)
    rows = gpu_policy.PaddedRows(bench, 56, prompt, ids_G)
    with torch.no_grad():
        ours, theirs = runner.policy.module(batch).logprobs.flatten(), rows._logprobs(ids_G)
    assert (ours - theirs).abs().max() < 1e-4 < ours.std()


# Sizes


def test_real_sizes_are_those_of_the_released_models(tmp_path):
    bench = new_bench(tmp_path, REAL)
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
    for side_px, num_tokens in zip(REAL.policy_px, (1543, 370), strict=True):
        renderer = qwen_image_edit.Config(type="", policy_image_area_px=side_px**2)
        template = qwen_image_edit.QwenImageEdit.prompt_template(renderer)
        prompts = QwenPrompts(tokenizer, load_image_processor(section), template, True, 2048)
        sample = gpu_models.make_sample(bench, side_px, 0)
        prompt = prompts.prompt(sample, sample.instruction)
        assert len(prompt.token_ids) == num_tokens == REAL.num_prompt_tokens(side_px)
        assert prompt.num_dropped_tokens == 64


def test_real_size_steps_at_tiny_size(tmp_path, monkeypatch):
    """The same code as on a GPU; only the peak of its memory is not known here."""
    text = {"vocab_size": 521, "hidden_size": 64, "intermediate_size": 128}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    for table, values in (
        (gpu_real_size.LANGUAGE, text),
        (gpu_real_size.ROPE, {"mrope_section": [4, 6, 6]}),
        (gpu_real_size.VISION, {**TINY.vision, "out_hidden_size": 64}),
        (gpu_real_size.MODEL_SIZE, dict(TINY.transformer)),
    ):
        for name, value in values.items():
            monkeypatch.setitem(table, name, value)
    monkeypatch.setattr(gpu_real_size, "SIDE_TOKENS", 4)
    asked = Asked(str(tmp_path), tiny=True, gpu_gb=80.0)
    for peak_gb, status in ((20.0, "PASS"), (90.0, "FAIL")):
        monkeypatch.setattr(gpu_real_size, "peak_gb", lambda device, peak_gb=peak_gb: peak_gb)
        lines = [*gpu_real_size.policy(asked), *gpu_real_size.edit(asked)]
        assert [line.status for line in lines] == ["PASS", status, "PASS", status]
