"""Parts of the editor against modules of diffusers: VAE, modulation, denoiser, 8-bit weights."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import tiny_editor
import torch
from diffusers.image_processor import VaeImageProcessor
from tiny_editor import StockParts, make_states
from tiny_rounding import PICTURE_TOL, PRODUCT_TOL
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
SHAPES = [(1, 4, 6), (1, 2, 4)]
NUM_TARGETS, NUM_SOURCE = 24, 8


@pytest.fixture(scope="module", params=[False, True], ids=["edit", "zero_cond_t"])
def stock(request: pytest.FixtureRequest) -> StockParts:
    return tiny_editor.make_stock(zero_cond_t=request.param)


def count_flops(run: object) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run()
    return counter.get_total_flops()


@torch.no_grad()
def test_the_vae_for_one_frame_equals_the_video_vae() -> None:
    vae = tiny_editor.make_stock().vae
    ours = FrameVae(copy.deepcopy(vae)).requires_grad_(False)
    mean, std = (
        torch.tensor(vae.config[f"latents_{s}"]).view(1, -1, 1, 1) for s in ("mean", "std")
    )
    pixels = torch.rand(2, 3, 64, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    latents = vae.encode(pixels.unsqueeze(2)).latent_dist.mode().squeeze(2)
    expected = (latents - mean) / std
    decoded = vae.decode(latents.unsqueeze(2)).sample.squeeze(2)
    for one, other in ((ours.encode(pixels), expected), (ours.decode(expected), decoded)):
        assert (one - other).norm() <= 1e-5 * other.norm()


def test_the_vae_for_one_frame_has_no_convolution_in_time() -> None:
    """Encoding needs 2.9 times fewer FLOPs at this size, not 3 times: layers with one tap in time
    (shortcuts, attention, resampling) cost the same as before."""
    vae = tiny_editor.make_stock().vae
    pixels, latents = torch.zeros(1, 3, 64, 64), torch.zeros(1, 4, 8, 8)
    stock = [
        count_flops(lambda: vae.encode(pixels.unsqueeze(2))),
        count_flops(lambda: vae.decode(latents.unsqueeze(2))),
    ]
    ours = FrameVae(vae)
    assert not any(isinstance(module, nn.Conv3d) for module in ours.modules())
    flops = [count_flops(lambda: ours.encode(pixels)), count_flops(lambda: ours.decode(latents))]
    assert stock[0] / flops[0] > 2.5 and stock[1] / flops[1] > 2.4


@torch.no_grad()
def test_the_modulation_table_equals_what_each_block_computes(stock: StockParts) -> None:
    """Equals the modules at one timestep, as the stock forward runs them."""
    transformer = stock.transformer
    table = build_table(transformer, TIMESTEPS)
    assert len(table) == 4
    num_parts = 2 if transformer.config.zero_cond_t else 1
    for timestep, entry in zip(TIMESTEPS, table, strict=True):
        times = torch.stack([timestep, torch.tensor(0.0)])[:num_parts] / 1000
        embedding = transformer.time_text_embed(times, torch.empty(0))
        for index, block in enumerate(transformer.transformer_blocks):
            image, words = block.img_mod(embedding), block.txt_mod(embedding[:1])
            for rows, ours in ((image, entry.image[index]), (words, entry.text[index])):
                expected = rows.reshape(len(rows), 6, -1) + torch.tensor([0, 1, 0] * 2)[:, None]
                torch.testing.assert_close(ours, expected, atol=PRODUCT_TOL, rtol=PRODUCT_TOL)
        tokens = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0))
        normed = torch.nn.functional.layer_norm(tokens, (32,), eps=1e-6)
        expected = transformer.norm_out(tokens, embedding[:1])
        ours = normed * entry.out[1] + entry.out[0]
        torch.testing.assert_close(ours, expected, atol=PRODUCT_TOL, rtol=PRODUCT_TOL)


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
    transformer = QwenImageEdit(config, Resources(None, "cpu")).loop.parts.transformer
    on_host = {name for name, p in transformer.named_parameters() if p.device.type == "cpu"}
    assert on_host == {name for name, _ in transformer.named_parameters() if "_mod." in name}
    on_device = sum(p.numel() for p in transformer.parameters() if p.device.type == "meta")
    assert on_device == QwenImageEdit.cost(config).weights["transformer"]


@torch.no_grad()
def test_a_step_equals_the_stock_forward(stock: StockParts) -> None:
    """Four rows, two adjacent ones equally long, against the padded and masked forward."""
    transformer = stock.transformer
    states = [make_states(seed, length) for seed, length in enumerate((9, 5, 5, 12))]
    generator = torch.Generator().manual_seed(5)
    latents = torch.randn(4, NUM_TARGETS, 16, generator=generator)
    sources = torch.randn(4, NUM_SOURCE, 16, generator=generator)
    padded, mask = tiny_editor.pad_states(states)
    expected = transformer(
        hidden_states=torch.cat([latents, sources], dim=1),
        timestep=TIMESTEPS[1].expand(4) / 1000,
        encoder_hidden_states=padded,
        encoder_hidden_states_mask=mask,
        img_shapes=[SHAPES] * 4,
        return_dict=False,
    )[0][:, :NUM_TARGETS]
    denoiser = Denoiser(transformer)
    prepared = denoiser.prepare(states, sources, SHAPES)
    velocity = denoiser.velocity(latents, prepared, build_table(transformer, TIMESTEPS)[1])
    torch.testing.assert_close(velocity, expected, atol=PICTURE_TOL, rtol=PICTURE_TOL)


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
    width, text_lens = 32, (9, 5)
    latents, sources = torch.zeros(2, NUM_TARGETS, 16), torch.zeros(2, NUM_SOURCE, 16)
    prepared = denoiser.prepare([make_states(0, length) for length in text_lens], sources, SHAPES)
    table = build_table(transformer, TIMESTEPS)
    expected = 2 * NUM_TARGETS * 2 * 16 * width
    for length in text_lens:
        others = NUM_SOURCE + length
        tokens = NUM_TARGETS + others
        expected += tokens * (12 * width**2 + 2 * width * tokens)
        expected += NUM_TARGETS * (12 * width**2 + 2 * width * tokens) + others * 2 * width**2
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
        unrounded = [p.nbytes for p in blocks.parameters() if p.is_meta and p.ndim == 2]
        held_bytes.append(sum(unrounded))
        return Fp8Linear(linear)

    monkeypatch.setattr(qwen_image_denoiser, "Fp8Linear", recording_linear)
    largest = max(sum(p.nbytes for p in part.parameters()) for part in blocks[0].children())
    config = QwenImageEdit.Config(type="x", fp8="storage")
    prepare_transformer(transformer, config, "meta")
    assert len(held_bytes) == 2 * 12 and max(held_bytes) <= largest
    assert transformer.proj_out.weight.is_meta and not blocks[0].img_mod[1].weight.is_meta


def test_8_bit_weights_change_a_picture_slightly_and_take_half_the_memory() -> None:
    jobs, parts = tiny_editor.three_jobs(), tiny_editor.make_parts()
    exact = tiny_editor.render_floats(tiny_editor.make_renderer(parts), jobs)
    move(parts.transformer, "cpu", rounded=True)
    kinds = [type(m) for m in parts.transformer.transformer_blocks.modules()]
    # Eight in attention and two in each of two MLPs are rounded, modulation is not.
    assert (kinds.count(Fp8Linear), kinds.count(nn.Linear)) == (2 * 12, 2 * 2)
    rounded = tiny_editor.render_floats(tiny_editor.make_renderer(parts), jobs)
    assert 1e-4 < (rounded - exact).abs().mean() < 0.03
    half, whole = (
        QwenImageEdit.cost(QwenImageEdit.Config(type="x", fp8=mode)).weights
        for mode in ("storage", "off")
    )
    assert half == whole | {"transformer": whole["transformer"] / 2}
