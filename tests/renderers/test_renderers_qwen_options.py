"""The editor's options: each against an independent reference, its error bounded."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable
from unittest.mock import MagicMock, call

import pytest
import tiny_editor
import torch
from diffusers import TaylorSeerCacheConfig
from tiny_editor import (
    StockParts,
    make_renderer,
    render_floats,
    render_stock,
    three_jobs,
)
from tiny_rounding import PICTURE
from torch import nn

from rl.renderers import qwen_image_edit
from rl.renderers.qwen_image import fp8
from rl.renderers.qwen_image.attention import FastestAttention, attention_of
from rl.renderers.qwen_image.fp8 import EIGHT_BITS, Fp8Linear, round_blocks
from rl.renderers.qwen_image.modulation import build_table, move_without_modulation
from rl.renderers.qwen_image.qwen_image_components import lay_out
from rl.renderers.qwen_image.qwen_image_denoiser import Denoiser
from rl.renderers.qwen_image.step_cache import extrapolate, is_computed


@pytest.fixture(scope="module")
def stock() -> StockParts:
    return tiny_editor.make_stock()


def test_the_defaults_are_exact() -> None:
    config = qwen_image_edit.Config(type="x")
    assert (config.fp8, config.step_cache_interval, config.compile_blocks) == ("off", 1, False)


# Attention


def heads(seed: int) -> torch.Tensor:
    return torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(seed))


def test_the_fastest_kernel_that_works_is_taken_once(caplog: pytest.LogCaptureFixture) -> None:
    times_ms, calls = iter([3.0, 1.0]), []

    def time_call(call: Callable[[], object]) -> float:
        calls.append(call())
        return next(times_ms)

    # The second is for NPUs, and not here.
    candidates = ("native", "_native_npu", "_native_math")
    attention = FastestAttention(candidates, time_call)
    queries, keys, values = (heads(seed) for seed in range(3))
    with caplog.at_level(logging.INFO):
        first = attention(queries, keys, values)
        attention(queries[:1], keys[:1], values[:1])
    assert len(calls) == 2
    assert "'_native_math' for queries of [2, 5, 3, 8] (native 3.000 ms" in caplog.text
    weights = torch.einsum("bqhe,bkhe->bhqk", queries, keys) / 8**0.5
    expected = torch.einsum("bhqk,bkhe->bqhe", weights.softmax(dim=-1), values)
    torch.testing.assert_close(first, expected)


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_full_or_lost_gpu_while_timing_is_no_kernel_s_fault(kind: type[Exception]) -> None:
    def time_call(call: Callable[[], object]) -> float:
        raise kind("full")

    with pytest.raises(kind):
        FastestAttention(("native",), time_call)(heads(0), heads(1), heads(2))


def test_kernels_are_timed_on_the_device_that_runs_them(monkeypatch) -> None:
    """A renderer may be on another GPU than its rank, whose stream is the current one."""
    cuda = MagicMock()
    cuda.Event.return_value.elapsed_time.return_value = 1.0
    for name in ("device", "Event", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    attention_of("auto", torch.device("cuda:1"))(heads(0), heads(1), heads(2))
    assert cuda.device.call_args == call(torch.device("cuda:1"))
    depth, depths = 0, set()
    for name, *_ in cuda.mock_calls:
        depth += name.endswith("__enter__") - name.endswith("__exit__")
        depths |= {depth} if name == "Event().record" else set()
    assert depths == {1}


@pytest.mark.parametrize("backend", ["flash_9", "flash"])
def test_a_kernel_that_is_not_here_is_refused(backend: str) -> None:
    with pytest.raises(ValueError, match=f"renderer.attention_backend: '{backend}'"):
        attention_of(backend, torch.device("cpu"))


def test_a_named_kernel_gives_the_same_pictures(stock: StockParts) -> None:
    parts, jobs = stock.ours(), three_jobs()
    expected = render_floats(make_renderer(parts), jobs)
    ours = render_floats(make_renderer(parts, attention_backend="_native_math"), jobs)
    assert (ours - expected).abs().max() <= PICTURE


# 8 bits


def test_rows_are_rounded_to_three_bits_each_by_its_own_largest() -> None:
    """By hand: the largest of a row becomes 448, and next to that the format counts in steps of 32:
    of 28, in twos. 17 and 19 lie halfway and go to the one whose last bit is 0."""
    linear = nn.Linear(4, 2, bias=False)
    linear.weight.data = torch.tensor([[7.0, 1.0, -3.0, 0.0], [0.014, 0.002, -0.006, 0.0]])
    rounded = Fp8Linear(linear, in_8_bits=False)
    assert rounded.weight.dtype == EIGHT_BITS
    torch.testing.assert_close(rounded.scale, torch.tensor([[7 / 448], [0.014 / 448]]))
    torch.testing.assert_close(rounded(torch.eye(4)), linear.weight.T)
    linear.weight.data = torch.tensor([[28.0, 17.0, 1.0, 0.0], [-28.0, 19.0, 0.0, 0.0]])
    expected = torch.tensor([[28.0, 16.0, 1.0, 0.0], [-28.0, 20.0, 0.0, 0.0]])
    torch.testing.assert_close(Fp8Linear(linear, in_8_bits=False)(torch.eye(4)), expected.T)


@torch.no_grad()
def test_products_in_8_bits_are_those_of_the_rounded() -> None:
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(32, 48)
    tokens = (
        torch.randn(3, 5, 32, generator=generator) * torch.tensor([0.01, 1, 100])[:, None, None]
    )
    ours = Fp8Linear(linear, in_8_bits=True)(tokens)
    by_row = [(m, m.abs().amax(-1, keepdim=True) / 448) for m in (tokens, linear.weight)]
    rounded = [(m / scale).to(EIGHT_BITS).float() * scale for m, scale in by_row]
    expected = rounded[0] @ rounded[1].T + linear.bias
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    assert Fp8Linear(linear, in_8_bits=True)(tokens[:, :0]).shape == (3, 0, 48)


def test_the_device_never_holds_more_than_one_part_of_a_block_unrounded(
    stock: StockParts, monkeypatch
) -> None:
    """The meta device stands for a GPU: what is there is known, and takes nothing."""
    transformer, held_bytes = stock.ours().transformer, []
    blocks, round_rows = transformer.transformer_blocks, fp8.round_rows

    def weighed(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        there = [p.nbytes for p in blocks.parameters() if p.is_meta and p.ndim == 2]
        held_bytes.append(sum(there))
        return round_rows(rows)

    monkeypatch.setattr(fp8, "round_rows", weighed)
    largest = max(sum(p.nbytes for p in part.parameters()) for part in blocks[0].children())
    config = qwen_image_edit.Config(type="x", fp8="storage")
    lay_out(transformer, config, "meta", move_without_modulation)
    assert len(held_bytes) == 2 * 12 and max(held_bytes) <= largest
    assert transformer.proj_out.weight.is_meta and not blocks[0].img_mod[1].weight.is_meta


@pytest.mark.parametrize("mode", ["storage", "compute"])
def test_8_bits_move_a_picture_a_little(stock: StockParts, mode: str) -> None:
    jobs = three_jobs()
    parts = stock.ours()
    exact = render_floats(make_renderer(parts), jobs)
    round_blocks(parts.transformer, mode, "cpu")
    kinds = [type(m) for m in parts.transformer.transformer_blocks.modules()]
    # Eight in attention and two in each of two MLPs; modulation is not among them.
    assert (kinds.count(Fp8Linear), kinds.count(nn.Linear)) == (2 * 12, 2 * 2)
    error = (render_floats(make_renderer(parts), jobs) - exact).abs().mean()
    assert 1e-4 < error < 0.03


def test_8_bits_are_half_of_16_in_the_memory_plan() -> None:
    half, whole = (
        qwen_image_edit.QwenImageEdit.parameter_counts(qwen_image_edit.Config(type="x", fp8=fp8))
        for fp8 in ("storage", "off")
    )
    assert half == whole | {"transformer": whole["transformer"] / 2}


# Steps that are guessed


def test_which_steps_are_computed() -> None:
    computed = {n: [step for step in range(10) if is_computed(step, n)] for n in (1, 2, 3)}
    assert computed == {1: [*range(10)], 2: [0, 1, 2, 4, 6, 8], 3: [0, 1, 2, 5, 8]}


def test_steps_between_lie_on_a_line() -> None:
    computed = [(2, torch.tensor([1.0, 5.0])), (5, torch.tensor([2.5, 5.0]))]
    assert extrapolate(computed, 7).tolist() == [3.5, 5.0]


def test_guessed_steps_are_taylorseers(stock: StockParts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against diffusers' own cache in its lite mode, order 1, in float32."""
    tiny_editor.use_small_conditions(monkeypatch)
    (job,) = three_jobs()[:1]
    renderer = make_renderer(stock.ours(), num_steps=8, step_cache_interval=2)
    stock.transformer.enable_cache(
        TaylorSeerCacheConfig(
            cache_interval=2,
            disable_cache_before_step=3,
            max_order=1,
            taylor_factors_dtype=torch.float32,
            use_lite_mode=True,
        )
    )
    with contextlib.ExitStack() as stack:
        stack.callback(stock.transformer.disable_cache)
        expected = render_stock(stock, [job], num_inference_steps=8)
    assert (render_floats(renderer, [job]) - expected).abs().max() <= PICTURE
    every = render_floats(make_renderer(stock.ours(), num_steps=8), [job])
    assert (every - expected).abs().max() > 1e-4


# Compiled blocks


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU with g++")
@torch.no_grad()
def test_compiled_blocks_serve_every_length(stock: StockParts, monkeypatch) -> None:
    """Up to rounding what they were; other words in the rows compile nothing anew."""
    from torch._dynamo.utils import counters

    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    monkeypatch.setattr(torch._dynamo.config, "disable", False)
    plain, compiled = (
        Denoiser(stock.transformer, attention_of("auto", torch.device("cpu")), compiled=compiled)
        for compiled in (False, True)
    )
    table = build_table(stock.transformer, torch.tensor([1000.0, 500.0]))
    graphs = []
    for lengths in ((9, 5), (7, 5), (6, 30)):
        states = [tiny_editor.make_states(0, length) for length in lengths]
        latents, sources = torch.randn(2, 24, 16), torch.randn(2, 8, 16)
        ours, expected = (
            denoiser.velocity(
                latents, denoiser.prepare(states, sources, [(1, 4, 6), (1, 2, 4)]), table[1]
            )
            for denoiser in (compiled, plain)
        )
        torch.testing.assert_close(ours, expected, atol=PICTURE, rtol=PICTURE)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[-1] > 0
