"""Fingerprints of exported weights, and the checks that an adapter fits the model's layers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_qwen
import torch
from safetensors.torch import load_file, save_file
from tiny_calls import noted_calls
from tiny_messages import holds
from tiny_policy import make, saved, trainable
from tiny_rows import logprobs

from rl.model_files import fingerprint
from rl.policies.qwen_vl import Qwen25VL


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(9, 7), (3, 2050), (5,)], ids=["small", "columns", "vector"])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda w: w.view(-1)[-1:].mul_(1.01), id="the last value"),
        pytest.param(lambda w: w.copy_(w.roll(1, dims=0)), id="permuted rows"),
        pytest.param(lambda w: w.copy_(w.flip(-1)), id="permuted columns"),
        pytest.param(lambda w: w[1].neg_(), id="negated values"),
    ],
)
def test_the_fingerprint_changes_exactly_when_the_weights_change(
    dtype: torch.dtype, shape: tuple[int, ...], change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    weights = {"w": torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)}
    first = fingerprint(weights)
    # A copy of the values at an address that is not aligned to 64 bits.
    other = torch.cat([weights["w"].view(-1)[:1], weights["w"].view(-1)])[1:].view(shape)
    assert fingerprint({"w": other}) == first
    change(weights["w"])
    assert fingerprint(weights) != first


def test_a_fingerprint_copies_8_bytes_per_tensor_to_the_host(monkeypatch) -> None:
    num_bytes = noted_calls(monkeypatch, torch.Tensor, "cpu", lambda args, *_: args[0].nbytes)
    large = torch.zeros(2049, 2048, dtype=torch.bfloat16)
    fingerprint({"a": torch.zeros(8, 128), "b": large})
    assert num_bytes == [8 + 8]


@pytest.mark.parametrize(
    "wrong", ["q_porj", "proj_q", "proj|q_proj", "language_model", "(", "lora", "qkv"]
)
def test_a_target_that_names_no_layer_is_refused_before_a_model_is_loaded(wrong: str) -> None:
    """`qkv` names layers of the vision tower only, which is frozen."""

    def problems(names: list[str], **keys: Any) -> list[str]:
        section = {
            "type": "qwen2_5_vl",
            "model_path": saved("qwen2_5_vl"),
            "lora": {"target_modules": names},
        }
        config = Qwen25VL.Config.model_validate(section | keys)
        return list(Qwen25VL.problems(config, None))

    [problem] = problems(["q_proj", wrong])
    assert holds(problem, f"lora.target_modules: {wrong!r} is not ... known: ... q_proj")
    assert problems(["q_proj", "qkv"], freeze_vision_tower=False) == []
    assert len(problems([])) == 1


def test_a_target_name_shared_with_a_convolution_adapts_the_linear_layer_only(
    tmp_path: Path,
) -> None:
    """`proj` names both `attn.proj` and the convolution `patch_embed.proj`."""
    keys = {"lora": {"target_modules": ["q_proj", "proj"]}, "freeze_vision_tower": False}
    policy = make(**keys)
    names = [name for name in trainable(policy) if "visual" in name]
    assert names and all(".attn.proj." in name for name in names)
    policy.save_pretrained(str(tmp_path), trainable(policy))
    again = make(**keys, adapter_path=str(tmp_path))
    assert trainable(again).keys() == trainable(policy).keys()
    assert logprobs(again, [(again.build_prompt(tiny_qwen.sample(0)), (5, 6))]).isfinite().all()


@pytest.mark.parametrize(
    ("change", "figures"),
    [
        (lambda n, t: {n.replace("layers.1.", "layers.7."): t}, "8 of its tensors .* 8 tensors"),
        (lambda n, t: {n: t, n + "x": t} if "1.self_attn.q" in n else {n: t}, "2 of its .* 0 tens"),
        (lambda n, t: {} if "1.self_attn.q" in n else {n: t}, "0 of its .* and 2 tensors"),
        (lambda n, t: {n: t[:, :-1]} if "lora_A" in n else {n: t}, "size mismatch"),
        (lambda n, t: {}, "0 of its tensors .* and 16 tensors"),
    ],
    ids=["other layers", "more tensors", "fewer tensors", "other width", "no tensors"],
)
def test_an_adapter_whose_tensors_do_not_match_the_layers_is_refused(
    tmp_path: Path, change: Callable[..., dict[str, torch.Tensor]], figures: str
) -> None:
    policy = make()
    policy.save_pretrained(str(tmp_path), trainable(policy))
    file = tmp_path / "adapter_model.safetensors"
    changed = [change(name, tensor) for name, tensor in load_file(file).items()]
    tensors = {n: t.contiguous().clone() for part in changed for n, t in part.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"^policy\.adapter_path: .* does not fit: .*{figures}"):
        make(adapter_path=str(tmp_path))
