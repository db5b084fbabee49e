"""Step 2: the renderers' transformers and VAE against float64 on the CPU, and 8-bit rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from rl import build
from rl.algorithm import attention_kernels
from rl.check_gpu.gpu_kernels import relative_error
from rl.check_gpu.lines import Asked, Line, failed, ok
from rl.ranks.dist import Dist
from rl.renderers.qwen_image import qwen_image_components
from rl.renderers.qwen_image.fp8 import Fp8Linear
from rl.renderers.qwen_image.modulation import build_table
from rl.renderers.qwen_image.vae2d import FrameVae
from rl.renderers.qwen_image_21.qwen_image_21_denoiser import Row, Shown

LARGEST_MODEL_ERROR = {"bfloat16": 0.05, "float32": 1e-4}
"""Relative, of a whole small model: rounding adds up over its layers."""


class BothVaes(FrameVae):
    """Keeps the VAE as diffusers made it, too."""

    def __init__(self, vae: Any) -> None:
        stock = copy.deepcopy(vae)
        super().__init__(vae)
        self.__dict__["stock"] = stock  # no submodule


def load_renderer(asked: Asked, name: str) -> Any:
    """The loop of the shipped small config's renderer, on the device."""
    resolved = build.resolve(asked.config_of(name))
    with mock.patch.object(qwen_image_components, "FrameVae", BothVaes):
        renderer: Any = build.build_renderer(resolved, Dist.from_env(asked.device))
    return renderer.loop


@torch.no_grad()
def renderers(asked: Asked) -> Iterator[Line]:
    limit = LARGEST_MODEL_ERROR[asked.dtype]
    editor = load_renderer(asked, "quickstart")
    for what, error in (
        ("Edit's transformer", _edit_error(editor)),
        ("Qwen-Image-2.1's transformer", _error_21(load_renderer(asked, "tiny_qwen_image_21"))),
        ("VAE 2-D against 3-D, encoded", _vae_error(editor.parts.vae, "encode")),
        ("VAE 2-D against 3-D, decoded", _vae_error(editor.parts.vae, "decode")),
    ):
        if error <= limit:
            yield ok(what, f"error {error:.1e} of {limit:g}")
        else:
            fix = "no key avoids it: install requirements.lock, or report it with an issue"
            yield failed(what, f"is off by {error:.2g} of its size, allowed {limit:g}", fix)
    yield _fp8(asked)


def _drawn(like: Any, *shape: int, seed: int = 0) -> torch.Tensor:
    """The same numbers on every device and in every dtype, up to rounding."""
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(torch.bfloat16).to(like.device, like.dtype)


def _edit_error(loop: Any) -> float:
    """One step of three rows of different lengths, against float64."""

    def velocity(transformer: Any) -> torch.Tensor:
        config, denoiser = transformer.config, type(loop._denoiser)(transformer)
        states = [_drawn(transformer, n, config.joint_attention_dim, seed=n) for n in (9, 14, 14)]
        sources = _drawn(transformer, 3, 16, config.in_channels, seed=1)
        given = denoiser.prepare(states, sources, [(1, 4, 4), (1, 4, 4)])
        modulation = build_table(transformer, torch.tensor([800.0]))[0].to(transformer.device)
        latents = _drawn(transformer, 3, 16, config.in_channels, seed=2)
        found: torch.Tensor = denoiser.velocity(latents, given, modulation)
        return found

    return _against_double(loop.parts.transformer, velocity)


def _error_21(loop: Any) -> float:
    """One step of two groups, one of two rows with two source pictures, against float64."""

    def velocity(transformer: Any) -> torch.Tensor:
        config = transformer.config
        is_double = transformer.dtype == torch.float64
        kernel = attention_kernels.CPU if is_double else loop._denoiser._kernel
        denoiser = type(loop._denoiser)(transformer, kernel)

        def row(seed: int, num_words: int, num_shown: int) -> Row:
            start = _drawn(transformer, 12, config.context_in_dim, seed=num_shown)
            words = _drawn(transformer, num_words, config.context_in_dim, seed=seed)
            shown = [
                Shown(
                    range(3 + 5 * i, 4 + 5 * i),
                    _drawn(transformer, 4, config.in_channels, seed=7 + i),
                    (2, 2),
                    b"%d" % i,
                )
                for i in range(num_shown)
            ]
            return Row(torch.cat([start, words]), tuple(shown))

        groups = [[row(1, 6, 2), row(2, 9, 2)], [row(3, 4, 1)]]
        given = denoiser.prepare(groups, (4, 4))
        latents = _drawn(transformer, 3, 16, config.in_channels, seed=4)
        timestep = torch.tensor(800.0, device=transformer.device)
        found: torch.Tensor = denoiser.velocity(latents, given, timestep)
        return found

    return _against_double(loop.parts.transformer, velocity)


def _against_double(transformer: Any, velocity: Callable[[Any], torch.Tensor]) -> float:
    true = velocity(copy.deepcopy(transformer).cpu().double())
    return relative_error(velocity(transformer), true)


def _vae_error(vae: Any, direction: str) -> float:
    """Ours against diffusers' own, in float64 on the CPU."""
    stock = vae.stock.cpu().double()
    mean, std = vae.mean.cpu().double(), vae.std.cpu().double()
    if direction == "encode":
        pixels = _drawn(vae.mean, 2, 3, 32, 48).clamp(-1, 1)
        encoded = stock.encode(pixels.cpu().double().unsqueeze(2)).latent_dist.mode()
        return relative_error(vae.encode(pixels), (encoded.squeeze(2) - mean) / std)
    latents = _drawn(vae.mean, 2, mean.shape[1], 4, 6)
    given = latents.cpu().double() * std + mean
    decoded = stock.decode(given.unsqueeze(2)).sample.squeeze(2)
    return relative_error(vae.decode(latents), decoded.clamp(-1, 1))


def _fp8(asked: Asked) -> Line:
    """The device rounds to 8 bits as the CPU does, bit for bit."""
    layer = torch.nn.Linear(256, 64, dtype=getattr(torch, asked.dtype))
    expected = Fp8Linear(copy.deepcopy(layer))
    found = Fp8Linear(layer.to(asked.device))
    same = torch.equal(found.weight.cpu().view(torch.uint8), expected.weight.view(torch.uint8))
    tokens = _drawn(layer.weight, 32, 256)
    error = relative_error(found(tokens), layer(tokens))
    note = f"8-bit weights {'as' if same else 'not as'} on the CPU, error {error:.2g} of 0.04"
    if same and error <= 0.04:
        return ok("fp8 storage", note)
    return failed("fp8 storage", note, "leave renderer.fp8 off", renderer__fp8="off")
