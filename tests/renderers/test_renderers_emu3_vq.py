"""The emu3_vq renderer against Emu3VQVAE and the image processor of transformers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest.mock import Mock, patch

import numpy as np
import pytest
import tiny_emu3_vq
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_emu3_vq import NUM_CODES, make_codes
from tiny_messages import holds
from tiny_pictures import make_picture
from tiny_rounding import apart
from transformers import Emu3ImageProcessor, Emu3VQVAE

from rl.api.plugin import Resources
from rl.api.types import RenderJob, Sample
from rl.renderers import emu3_vq
from rl.renderers.diffusion_loop import batches_of
from rl.renderers.emu3_vq_loop import Emu3Codec, Emu3VqLoop, fit, load_codec

FOUR = partial(emu3_vq.batch_of, 4)


@pytest.fixture(scope="module")
def vq() -> Emu3VQVAE:
    return tiny_emu3_vq.make_vq()


@pytest.fixture(scope="module")
def codec(vq: Emu3VQVAE) -> Emu3Codec:
    return Emu3Codec(vq)


@pytest.fixture
def renderer(codec: Emu3Codec) -> Emu3VqLoop:
    return Emu3VqLoop(codec, FOUR)


@pytest.fixture
def decode(codec: Emu3Codec) -> Iterator[Mock]:
    """Records each batch that is decoded."""
    with patch.object(codec, "decode_tensor", wraps=codec.decode_tensor) as decode:
        yield decode


@pytest.fixture(scope="module")
def folder(vq: Emu3VQVAE, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vq")
    vq.save_pretrained(folder)
    return folder


def job(codes: np.ndarray) -> RenderJob:
    return RenderJob(Sample(id="s", instruction="i"), payload=codes, noise_seed=0)


# --- the codec ---------------------------------------------------------------------------------


def test_decoding_gives_exactly_the_first_frame() -> None:
    vq = tiny_emu3_vq.make_vq().double()
    codes = torch.from_numpy(np.stack([make_codes(1), make_codes(2)])).long()
    with torch.no_grad():
        video = vq.decode(codes[:, None])
    assert video.shape[1] == 4
    assert apart(video[:, 0], video[:, 1]) > 0.05
    assert apart(Emu3Codec(vq).decode_tensor(codes), video[:, 0].float()) < 1e-7


def test_encoding_equals_the_stock_model(vq: Emu3VQVAE, codec: Emu3Codec) -> None:
    processor = Emu3ImageProcessor(do_resize=False, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    pictures = [make_picture(seed) for seed in range(4)]
    inputs = processor(pictures, return_tensors="pt")
    with torch.no_grad():
        stock = vq.encode(inputs["pixel_values"], inputs["image_sizes"]).image_tokens
    ours = codec.encode(pictures, area_px=64 * 64, batch_size=3)
    assert all(codes.dtype == np.int32 and codes.shape == (8, 8) for codes in ours)
    np.testing.assert_array_equal(np.stack(ours), torch.stack(list(stock)).numpy())
    assert len(np.unique(ours)) > 20


def test_encoding_keeps_the_order_of_pictures_of_mixed_sizes(codec: Emu3Codec) -> None:
    sizes = [(64, 64), (96, 48), (64, 64), (48, 96)]
    pictures = [make_picture(seed, *size) for seed, size in enumerate(sizes)]
    together = codec.encode(pictures, area_px=64 * 64, batch_size=8)
    assert [codes.shape for codes in together] == [(8, 8), (5, 11), (8, 8), (11, 5)]
    for picture, codes in zip(pictures, together, strict=True):
        [alone] = codec.encode([picture], area_px=64 * 64, batch_size=1)
        np.testing.assert_array_equal(codes, alone)


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((256, 256), (32, 32)),
        ((512, 512), (32, 32)),
        ((640, 427), (39, 26)),  # 313 x 209 px in the published sets, cropped to 312 x 208
        ((100, 3000), (5, 175)),
        ((9, 9000), (1, 1011)),  # 8 x 8096 px
    ],
)
def test_the_grid_is_that_of_the_published_sets(
    size: tuple[int, int], grid: tuple[int, int]
) -> None:
    width, height = fit(Image.new("L", size), area_px=256 * 256, patch_px=8).size
    assert (width // 8, height // 8) == grid
    assert width % 8 == height % 8 == 0


# --- the renderer ------------------------------------------------------------------------------


def test_batches_that_a_pool_sends_get_the_same_bits(codec: Emu3Codec, folder: Path) -> None:
    """The decoder rounds with its batch, so a batch must not depend on what was decoded before."""
    wide, bad = make_codes(3, 2, 8), np.full((4, 4), NUM_CODES, np.int32)
    grids = [*map(make_codes, (1, 2, 1)), wide, bad, *map(make_codes, (2, 4, 1)), wide]
    config = emu3_vq.Config(type="emu3_vq", model_path=str(folder), batch_size=4)
    jobs = [job(codes) for codes in grids]
    expected = dict(Emu3VqLoop(codec, FOUR).render(jobs))
    parts = [part for _, part in batches_of(jobs, partial(emu3_vq.Emu3Vq.batch_of, config), {})]
    assert [[number for number, _ in part] for part in parts] == [[0, 1, 2, 4], [3, 8], [5, 6, 7]]
    for part in parts:
        drawn = dict(Emu3VqLoop(codec, FOUR).render([each for _, each in part]))
        for i, (number, _) in enumerate(part):
            assert drawn[i] == expected[number], number
    assert expected[3].size == (64, 16) and expected[0].size == (32, 32)


def test_a_reshaped_grid_is_another_picture(renderer: Emu3VqLoop) -> None:
    a = make_codes(1)
    [out] = renderer.decode_sources([Sample("a", "", source_codes=a, target_codes=a.reshape(2, 8))])
    assert out.source.size == (32, 32) and out.target.size == (64, 16)


@pytest.mark.parametrize("code", [NUM_CODES, -1])
def test_codes_outside_the_codebook_blame_the_policy(renderer: Emu3VqLoop, code: int) -> None:
    codes = make_codes(1)
    codes[2, 1] = code
    outcomes = dict(renderer.render([job(codes), job(make_codes(1)), job(codes[:0])]))
    assert holds(outcomes[0], f"bad_code: {code} ... 0..63 ... blame='policy'")
    assert isinstance(outcomes[1], Image.Image)
    assert holds(outcomes[2], "[0, 4] ... blame='policy'")


def test_nan_is_blamed_on_the_renderer_and_fails_only_its_picture() -> None:
    vq = tiny_emu3_vq.make_vq()
    vq.quantize.embedding.weight.data[7] = torch.nan
    jobs = [job(np.full((4, 4), code, np.int32)) for code in (6, 7)]
    outcomes = dict(Emu3VqLoop(Emu3Codec(vq), FOUR).render(jobs))
    assert isinstance(outcomes[0], Image.Image)
    assert holds(outcomes[1], "non_finite ... blame='renderer'")


def test_batches_of_large_pictures_are_smaller(renderer: Emu3VqLoop, decode: Mock) -> None:
    with patch("rl.renderers.emu3_vq.UNIT_CODES", 16):
        list(renderer.render([job(make_codes(seed, 4, 8)) for seed in range(3)]))
    # Two pictures of 32 x 64 px count as four of 32 x 32.
    assert [len(call.args[0]) for call in decode.call_args_list] == [2, 1]


def test_decode_sources_draws_what_has_only_codes(renderer: Emu3VqLoop, decode: Mock) -> None:
    picture, a, b = make_picture(0), make_codes(1), make_codes(2)
    samples = [
        Sample("1", "", source_codes=a, target_codes=b),
        Sample("2", "", source_codes=a, sources=(picture,)),
        Sample("3", ""),
        Sample("4", "", source_codes=b, target_codes=a.copy()),
    ]
    out = renderer.decode_sources(samples)
    assert [s.id for s in out] == [s.id for s in samples]
    assert [len(call.args[0]) for call in decode.call_args_list] == [1, 1], (
        "alone: their bits do not depend on the other samples"
    )
    assert out[1].source is picture and out[1].target is None and out[2].source is None
    assert out[0].source is out[3].target and out[0].target is out[3].source
    assert out[0].source_codes is a
    [again] = renderer.decode_sources(samples[:1])
    assert again.source is out[0].source and decode.call_count == 2
    ((_, rendered),) = renderer.render([job(a)])
    np.testing.assert_allclose(np.asarray(again.source, int), np.asarray(rendered, int), atol=1)


def test_a_sample_with_codes_of_another_tokenizer_is_named(renderer: Emu3VqLoop) -> None:
    sample = Sample(id="p-7", instruction="", target_codes=np.full((2, 2), 99, np.int32))
    with pytest.raises(ValueError, match=r"sample 'p-7': a picture .* bad_code: 99"):
        renderer.decode_sources([sample])


# --- the plugin --------------------------------------------------------------------------------


def test_the_plugin_counts_its_parameters_and_activations(folder: Path, vq: Emu3VQVAE) -> None:
    config = emu3_vq.Config(type="emu3_vq", model_path=str(folder), batch_size=2, dtype="bfloat16")
    plugin = emu3_vq.Emu3Vq(config, Resources(None, "cpu"))
    assert plugin.cost(config).weights == {"vq": sum(p.numel() for p in vq.parameters())}
    assert plugin.cost(config).activations == {"vq": 12 * 32 * 2 * 256 * 256}
    ((_, picture),) = plugin.render([job(make_codes(1))])
    assert picture.size == (32, 32)


def test_parameters_of_published_checkpoints_are_known_by_name() -> None:
    config = emu3_vq.Config(type="emu3_vq")
    assert config.model_path == "BAAI/Emu3-VisionTokenizer"
    with torch.device("meta"):
        full = Emu3VQVAE(Emu3VQVAE.config_class())
    count = sum(p.numel() for p in full.parameters())
    assert emu3_vq.Emu3Vq.cost(config).weights["vq"] == pytest.approx(count, rel=1e-4)
    other = emu3_vq.Config(type="emu3_vq", model_path="someone/else")
    assert emu3_vq.Emu3Vq.cost(other).weights == {}


# --- the formats of checkpoints with a tokenizer, each loaded without remote code --------------


def test_a_saved_folder_loads_completely(folder: Path, vq: Emu3VQVAE) -> None:
    loaded = load_codec(str(folder), None, "float32", "cpu").model
    assert_same(loaded, vq)
    assert not any(p.requires_grad for p in loaded.parameters())


def test_the_published_format_loads_without_its_python_code(vq: Emu3VQVAE, tmp_path: Path) -> None:
    folder = tmp_path / "Emu3-VisionTokenizer"
    tiny_emu3_vq.save_original(vq, folder)
    tensors = load_file(folder / "model.safetensors")
    # The names and shapes of the published class.
    assert tensors["decoder.up.3.attn.1.proj_out.weight"].shape == (64, 64, 1, 1)
    assert {
        "encoder.down.3.attn.0.norm.weight",
        "encoder.down.0.downsample.conv.weight",
        "encoder.mid.attn_1.q.bias",
        "decoder.mid.attn_1.norm.conv_y.weight",
        "decoder.up.2.upsample.conv.weight",
        "decoder.up.3.block.0.norm1.norm_layer.weight",
        "decoder.time_res_stack.0.norm1.running_mean",
        "encoder.time_conv.1.conv.conv.weight",
        "post_quant_conv.conv.weight",
        "quantize.embedding.weight",
    } <= tensors.keys()
    assert emu3_vq.Emu3Vq.problems(emu3_vq.Config(model_path=str(folder)), None) == []
    codec = load_codec(str(folder), None, "float32", "cpu")
    assert_same(codec.model, vq)
    theirs, ours = (each.encode([make_picture(1)], 4096, 1) for each in (codec, Emu3Codec(vq)))
    np.testing.assert_array_equal(theirs, ours)


def assert_same(loaded: torch.nn.Module, vq: Emu3VQVAE) -> None:
    expected = vq.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(t, expected[name]) for name, t in loaded.state_dict().items())


@pytest.mark.parametrize("mean", [0.1, 0.5])
def test_pixel_statistics_come_from_the_checkpoint(
    folder: Path, tmp_path: Path, mean: float
) -> None:
    """Without any, they are 0.5."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    if mean != 0.5:
        Emu3ImageProcessor(image_mean=[mean] * 3, image_std=[0.3] * 3).save_pretrained(tmp_path)
    assert load_codec(str(tmp_path), None, "float32", "cpu").processor.image_mean == [mean] * 3


def test_incomplete_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["decoder.conv_in.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"decoder\.conv_in\.weight"):
        load_codec(str(tmp_path), None, "float32", "cpu")
