"""Loaded weights are aligned like allocated memory, whatever the offsets in the model's files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_editor
import tiny_emu3
import tiny_emu3_vq
import tiny_policy
import tiny_qwen
import tiny_sd3
import torch
from safetensors.torch import load_file, save_file
from tiny_weight_files import displace, num_askew

from rl.api.plugin import Resources
from rl.api.policy import PolicySetup
from rl.model_files import align_weights
from rl.policies import emu3
from rl.renderers import emu3_vq, sd3
from rl.renderers.qwen_image_edit import QwenImageEdit

Modules = list[torch.nn.Module]


def qwen_policy(folder: Path) -> Modules:
    tiny_qwen.save_policy_folder(folder)
    return [tiny_policy.make_policy(str(displace(folder))).module]


def emu3_policy(folder: Path) -> Modules:
    tiny_emu3.save_policy_folder(folder)
    config = emu3.Config(type="emu3", model_path=str(displace(folder)), dtype="float32")
    return [emu3.Emu3(config, PolicySetup("image_tokens", max_completion_tokens=64)).module]


def qwen_editor(folder: Path) -> Modules:
    tiny_editor.make_stock().save(folder)
    config = QwenImageEdit.Config(**tiny_editor.TINY | {"model_path": str(displace(folder))})
    parts = QwenImageEdit(config, Resources(None, "cpu")).loop.parts
    return [parts.transformer, parts.vae]


def sd3_pipeline(folder: Path) -> Modules:
    tiny_sd3.save_sd3(tiny_sd3.make_parts(), folder)
    config = sd3.Config(**tiny_sd3.TINY | {"model_path": str(displace(folder))})
    parts = sd3.SD3(config, Resources(None, "cpu")).loop.parts
    encoders = [parts.text_encoder, parts.text_encoder_2, parts.text_encoder_3]
    return [parts.transformer, parts.vae, *encoders]


def emu3_codec(folder: Path) -> Modules:
    tiny_emu3_vq.make_vq().save_pretrained(folder)
    config = emu3_vq.Config(type="emu3_vq", model_path=str(displace(folder)), dtype="float32")
    return [emu3_vq.Emu3Vq(config, Resources(None, "cpu")).loop.codec.model]


@pytest.mark.slow
@pytest.mark.parametrize("load", [qwen_policy, emu3_policy, qwen_editor, sd3_pipeline, emu3_codec])
def test_loaded_weights_are_aligned(load: Callable[[Path], Modules], tmp_path: Path) -> None:
    assert not any(num_askew(module) for module in load(tmp_path))


def test_the_base_of_a_full_fine_tune_is_aligned_too(tmp_path: Path) -> None:
    """The reference pass uses it in place of the trained weights, in the same kernels."""
    tiny_qwen.save_policy_folder(tmp_path)
    policy = tiny_policy.make_policy(str(displace(tmp_path)), lora=None)
    assert num_askew(policy.module) == 0
    with policy.reference():
        assert num_askew(policy.module) == 0


def test_aligning_keeps_values_ties_and_aligned_tensors(tmp_path: Path) -> None:
    linear = torch.nn.Linear(7, 5)
    save_file(linear.state_dict(), tmp_path / "model.safetensors")
    displace(tmp_path)
    loaded = torch.nn.Linear(7, 5)
    loaded.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True)
    loaded.register_buffer("aligned", torch.ones(3))
    tied = torch.nn.ModuleDict({"one": loaded, "other": torch.nn.Linear(7, 5)})
    tied["other"].weight = loaded.weight
    assert num_askew(loaded) == 2, "the check can fail"
    address = loaded.aligned.data_ptr()
    align_weights(tied, "cuda")
    assert num_askew(loaded) == 2, "weights on a GPU are copies anyway"
    align_weights(tied, "cpu")
    assert num_askew(tied) == 0 and loaded.aligned.data_ptr() == address
    assert tied["other"].weight is loaded.weight
    assert torch.equal(loaded.weight, linear.weight) and torch.equal(loaded.bias, linear.bias)
