"""What parts of the editor cost and keep: VAE, modulation, denoiser, 8-bit weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_editor
import torch
from diffusers.image_processor import VaeImageProcessor
from tiny_editor import make_states
from tiny_pictures import render_floats
from tiny_rounding import PRODUCT_TOL
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from rl.api.plugin import Resources
from rl.api.types import RenderFailure
from rl.renderers import qwen_image_denoiser
from rl.renderers.diffusion_loop import to_pictures
from rl.renderers.qwen_image_denoiser import (
    EIGHT_BITS,
    Denoiser,
    Fp8Linear,
    ModulationTables,
    build_table,
    move,
)
from rl.renderers.qwen_image_edit import QwenImageEdit
from rl.renderers.qwen_image_loop import FrameVae, prepare_transformer

TIMESTEPS = torch.tensor([1000.0, 916.0, 427.0, 20.0])


@pytest.mark.parametrize("zero_cond_t", [False, True])
@torch.no_grad()
def test_the_modulation_table_equals_what_each_block_computes(zero_cond_t: bool) -> None:
    transformer = tiny_editor.make_stock(zero_cond_t=zero_cond_t).transformer
    for timestep, entry in zip(TIMESTEPS, build_table(transformer, TIMESTEPS), strict=True):
        times = torch.stack([timestep, torch.tensor(0.0)])[: 1 + zero_cond_t] / 1000
        embedding = transformer.time_text_embed(times, torch.empty(0))
        for index, block in enumerate(transformer.transformer_blocks):
            image, words = block.img_mod(embedding), block.txt_mod(embedding[:1])
            for rows, ours in ((image, entry.image[index]), (words, entry.text[index])):
                expected = rows.reshape(len(rows), 6, -1) + torch.tensor([0, 1, 0] * 2)[:, None]
                torch.testing.assert_close(ours, expected, atol=PRODUCT_TOL, rtol=PRODUCT_TOL)


def count_flops(run: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run()
    return counter.get_total_flops()


def test_the_vae_for_one_frame_has_no_convolution_in_time() -> None:
    """Encoding needs 2.9 times fewer FLOPs at this size, not 3 times: layers with one tap in time
    (shortcuts, attention, resampling) cost the same as before."""
    vae = tiny_editor.make_stock().vae
    pixels, latents = torch.zeros(1, 3, 64, 64), torch.zeros(1, 4, 8, 8)
    encoding = count_flops(lambda: vae.encode(pixels.unsqueeze(2)))
    decoding = count_flops(lambda: vae.decode(latents.unsqueeze(2)))
    ours = FrameVae(vae)
    assert not any(isinstance(module, nn.Conv3d) for module in ours.modules())
    assert encoding > 2.5 * count_flops(lambda: ours.encode(pixels))
    assert decoding > 2.4 * count_flops(lambda: ours.decode(latents))


def test_the_modulation_of_a_schedule_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qwen_image_denoiser, "NUM_KEPT_SCHEDULES", 2)
    tables = ModulationTables(tiny_editor.make_stock().transformer)
    first = tables.of_schedule(TIMESTEPS)
    other = tables.of_schedule(TIMESTEPS[:2])
    assert tables.of_schedule(TIMESTEPS.clone()) is first
    tables.of_schedule(TIMESTEPS[:1])
    assert tables.of_schedule(TIMESTEPS) is first, "the schedule used last is kept"
    assert tables.of_schedule(TIMESTEPS[:2]) is not other
    assert tables.of_schedule(TIMESTEPS / 2) is not first, "equally many steps at other timesteps"


def test_only_pictures_with_nan_or_infinity_are_failures() -> None:
    decoded = torch.zeros(4, 3, 8, 8)
    decoded[1, 0, 0, 0], decoded[2, 1, 2, 3], decoded[3] = math.nan, math.inf, -2.0
    pictures = to_pictures(decoded, VaeImageProcessor().postprocess)
    assert [isinstance(one, RenderFailure) for one in pictures] == [False, True, True, False]


def test_modulation_stays_in_host_memory(tmp_path: Path) -> None:
    """A 'meta' device stands for the GPU."""
    tiny_editor.make_stock().save(tmp_path)
    settings = tiny_editor.TINY | {"model_path": str(tmp_path)}
    config = QwenImageEdit.Config(**settings).model_copy(update={"device": "meta"})
    parts = QwenImageEdit(config, Resources(None, "cpu")).loop.parts
    assert parts.vae.mean.is_meta
    named = dict(parts.transformer.named_parameters())
    on_host = {name for name, p in named.items() if p.device.type == "cpu"}
    assert on_host == {name for name in named if "_mod." in name}
    on_device = sum(p.numel() for p in named.values() if p.is_meta)
    assert on_device == QwenImageEdit.cost(config).weights["transformer"]


def plain_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Attention [B, S, H, E] by matrix products, whose FLOPs torch counts on a CPU."""
    queries, keys, values = (tensor.transpose(1, 2) for tensor in (queries, keys, values))
    weights = (queries @ keys.mT / queries.shape[-1] ** 0.5).softmax(dim=-1)
    return (weights @ values).transpose(1, 2)


def test_a_step_costs_exactly_the_necessary_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply-adds of two blocks of width D = 32: per block, a token costs 12 D^2 (4 in attention,
    8 in the MLP) and 2 D per key that it reads. After the last block only picture tokens remain;
    the other tokens give it keys and values, 2 D^2. Projections from and to 16 channels: 16 D."""
    transformer = tiny_editor.make_stock().transformer
    monkeypatch.setattr(qwen_image_denoiser, "attention", plain_attention)
    denoiser = Denoiser(transformer)
    width, text_lens, num_targets, num_source = 32, (9, 5), 24, 8
    latents, sources = torch.zeros(2, num_targets, 16), torch.zeros(2, num_source, 16)
    states = [make_states(0, length) for length in text_lens]
    prepared = denoiser.prepare(states, sources, [(1, 4, 6), (1, 2, 4)])
    table = build_table(transformer, TIMESTEPS)
    expected = 2 * num_targets * 2 * 16 * width
    for length in text_lens:
        others = num_source + length
        tokens = num_targets + others
        expected += (tokens + num_targets) * (12 * width**2 + 2 * width * tokens)
        expected += others * 2 * width**2
    assert count_flops(lambda: denoiser.velocity(latents, prepared, table[0])) == 2 * expected


def test_each_row_of_weights_is_rounded_relative_to_its_largest_value() -> None:
    """The largest value of a row becomes 448, near which the format has steps of 32. If the largest
    is 28, the steps are 2: 17 and 19 are halfway and go to the neighbour whose last bit is 0."""
    linear = nn.Linear(4, 2, bias=False)
    linear.weight.data = torch.tensor([[7.0, 1.0, -3.0, 0.0], [0.014, 0.002, -0.006, 0.0]])
    rounded = Fp8Linear(linear)
    assert rounded.weight.dtype == EIGHT_BITS
    torch.testing.assert_close(rounded.scale, torch.tensor([[7 / 448], [0.014 / 448]]))
    torch.testing.assert_close(rounded(torch.eye(4)), linear.weight.T)
    linear.weight.data = torch.tensor([[28.0, 17.0, 1.0, 0.0], [-28.0, 19.0, 0.0, 0.0]])
    expected = torch.tensor([[28.0, 16.0, 1.0, 0.0], [-28.0, 20.0, 0.0, 0.0]])
    torch.testing.assert_close(Fp8Linear(linear)(torch.eye(4)), expected.T)


def test_the_device_holds_at_most_one_unrounded_part_of_a_block(monkeypatch) -> None:
    """The meta device stands for the GPU: its tensors are counted and take no memory."""
    transformer, held_bytes = tiny_editor.make_parts().transformer, []
    blocks = transformer.transformer_blocks

    def recording_linear(linear: nn.Linear) -> Fp8Linear:
        held_bytes.append(sum(p.nbytes for p in blocks.parameters() if p.is_meta and p.ndim == 2))
        return Fp8Linear(linear)

    monkeypatch.setattr(qwen_image_denoiser, "Fp8Linear", recording_linear)
    largest = max(sum(p.nbytes for p in part.parameters()) for part in blocks[0].children())
    prepare_transformer(transformer, QwenImageEdit.Config(type="x", fp8="storage"), "meta")
    assert len(held_bytes) == 2 * 12 and max(held_bytes) <= largest
    assert transformer.proj_out.weight.is_meta and not blocks[0].img_mod[1].weight.is_meta


def test_8_bit_weights_change_a_picture_slightly_and_take_half_the_memory() -> None:
    jobs, parts = tiny_editor.three_jobs(), tiny_editor.make_parts()
    exact = render_floats(tiny_editor.make_renderer(parts), jobs)
    move(parts.transformer, "cpu", rounded=True)
    kinds = [type(m) for m in parts.transformer.transformer_blocks.modules()]
    # Eight in attention and two in each of two MLPs are rounded, modulation is not.
    assert (kinds.count(Fp8Linear), kinds.count(nn.Linear)) == (2 * 12, 2 * 2)
    rounded = render_floats(tiny_editor.make_renderer(parts), jobs)
    assert 1e-4 < (rounded - exact).abs().mean() < 0.03
    half, whole = (
        QwenImageEdit.cost(QwenImageEdit.Config(type="x", fp8=mode)).weights
        for mode in ("storage", "off")
    )
    assert half == whole | {"transformer": whole["transformer"] / 2}
