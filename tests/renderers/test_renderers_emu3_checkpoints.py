"""The kinds of checkpoint that hold an Emu3 tokenizer, each loaded without remote code."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny_emu3_vq
import torch
from safetensors import safe_open
from tiny_pictures import make_picture
from transformers import Emu3Config, Emu3ForConditionalGeneration, Emu3ImageProcessor, Emu3VQVAE

from rl.renderers.emu3_vq import plug as emu3_vq
from rl.renderers.emu3_vq.codec import Emu3Codec, load_codec


@pytest.fixture(scope="module")
def vq() -> Emu3VQVAE:
    return tiny_emu3_vq.make_vq()


@pytest.fixture(scope="module")
def folder(vq: Emu3VQVAE, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("vq")
    vq.save_pretrained(place)
    return place


def test_an_own_folder_loads_whole(folder: Path, vq: Emu3VQVAE) -> None:
    loaded = load_codec(str(folder), None, "float32", "cpu").model
    assert_same(loaded, vq)
    assert not any(p.requires_grad for p in loaded.parameters())


def test_the_original_format_loads_without_its_code(vq: Emu3VQVAE, tmp_path: Path) -> None:
    place = tmp_path / "Emu3-VisionTokenizer"
    tiny_emu3_vq.save_original(vq, place)
    with safe_open(place / "model.safetensors", framework="pt") as tensors:
        names = set(tensors.keys())
        # Spelt out as the published class has them.
        assert tensors.get_slice("decoder.up.3.attn.1.proj_out.weight").get_shape() == [
            64,
            64,
            1,
            1,
        ]
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
    } <= names
    assert (
        emu3_vq.Emu3Vq.problems(emu3_vq.Config(type="emu3_vq", model_path=str(place)), None) == []
    )
    codec = load_codec(str(place), None, "float32", "cpu")
    assert_same(codec.model, vq)
    picture = make_picture(1)
    np.testing.assert_array_equal(
        codec.encode([picture], 4096, 1)[0], Emu3Codec(vq).encode([picture], 4096, 1)[0]
    )


def test_a_whole_emu3_gives_its_tokenizer(vq: Emu3VQVAE, tmp_path: Path) -> None:
    config = Emu3Config(
        text_config={
            "vocab_size": 4000,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            **{f"{token}_token_id": 0 for token in ("pad", "bos", "eos")},
        },
        vq_config=tiny_emu3_vq.CONFIG,
        vocabulary_map={"<image>": 1},
    )
    model = Emu3ForConditionalGeneration(config)
    model.model.vqmodel.load_state_dict(vq.state_dict())
    model.save_pretrained(tmp_path, max_shard_size="300KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    language_only = [shard for shard in shards if not holds_vq(shard)]
    assert language_only and len(language_only) < len(shards)
    count = emu3_vq.Emu3Vq.parameter_counts(
        emu3_vq.Config(type="emu3_vq", model_path=str(tmp_path))
    )
    assert count == {"vq": sum(p.numel() for p in vq.parameters())}
    for shard in language_only:
        shard.unlink()
    assert_same(load_codec(str(tmp_path), None, "float32", "cpu").model, vq)


def holds_vq(shard: Path) -> bool:
    with safe_open(shard, framework="pt") as tensors:
        return any("vqmodel." in name for name in tensors.keys())  # noqa: SIM118


def assert_same(loaded: torch.nn.Module, vq: Emu3VQVAE) -> None:
    expected = vq.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(t, expected[name]) for name, t in loaded.state_dict().items())


def test_pixel_statistics_are_the_checkpoints(folder: Path, tmp_path: Path) -> None:
    stated = tmp_path / "stated"
    shutil.copytree(folder, stated)
    Emu3ImageProcessor(image_mean=[0.1] * 3, image_std=[0.3] * 3).save_pretrained(stated)
    assert load_codec(str(stated), None, "float32", "cpu").processor.image_mean == [0.1] * 3
    assert load_codec(str(folder), None, "float32", "cpu").processor.image_mean == [0.5] * 3


def test_incomplete_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copy(folder / "config.json", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["decoder.conv_in.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"1 of .*decoder\.conv_in\.weight"):
        load_codec(str(tmp_path), None, "float32", "cpu")
