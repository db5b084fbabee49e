"""Step `renderers`: the renderers' models against float64 on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from rl import build
from rl.algorithm.attention_kernels import CPU, choose_kernel
from rl.check_gpu.gpu_kernels import relative_error
from rl.check_gpu.lines import Line, Setup, result
from rl.config.schema import load_config
from rl.ranks.dist import Dist
from rl.renderers.qwen_image import qwen_image_denoiser, qwen_image_loop
from rl.renderers.qwen_image.qwen_image_denoiser import Fp8Linear, build_table
from rl.renderers.qwen_image.qwen_image_loop import FrameVae
from rl.renderers.qwen_image_21 import qwen_image_21_loop
from rl.renderers.qwen_image_21.qwen_image_21_loop import PromptImage, Row

LARGEST_ERROR = {"bfloat16": 0.05, "float32": 1e-4}
"""Relative, of a whole small model: rounding adds up over its layers."""
Forward = Callable[[], torch.Tensor]
"""One denoising step."""


class BothVaes(FrameVae):
    """Keeps the VAE as diffusers made it, too."""

    def __init__(self, vae: Any) -> None:
        stock = copy.deepcopy(vae)
        super().__init__(vae)
        self.__dict__["stock"] = stock  # no submodule


def small_parts(setup: Setup, name: str) -> Any:
    """The renderer's models of the shipped small config, on the device."""
    path, *overrides = setup.words(name)
    resolved = build.resolve(load_config(path, overrides))
    with mock.patch.object(qwen_image_loop, "FrameVae", BothVaes):
        renderer: Any = build.build_renderer(resolved, Dist.from_env(setup.device))
    return renderer.loop.parts


def drawn(like: Any, *shape: int, seed: int = 0) -> torch.Tensor:
    """The same numbers on every device and in every dtype."""
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return numbers.bfloat16().to(like.device, like.dtype)


def edit_step(transformer: Any, side: int, text_lens: Sequence[int]) -> Forward:
    """A picture of side x side tokens and a source of the same size per row."""
    config, denoiser = transformer.config, qwen_image_denoiser.Denoiser(transformer)
    states = [drawn(transformer, n, config.joint_attention_dim, seed=n) for n in text_lens]
    sources, latents = (
        drawn(transformer, len(text_lens), side**2, config.in_channels, seed=seed)
        for seed in (1, 2)
    )
    given = denoiser.prepare(states, sources, [(1, side, side)] * 2)
    modulation = build_table(transformer, torch.tensor([800.0]))[0].to(transformer.device)
    return lambda: denoiser.velocity(latents, given, modulation)


def step_21(
    transformer: Any, side: int, text_lens: Sequence[int], num_shown: tuple[int, int] = (2, 1)
) -> Forward:
    """All rows but the last are one group. `num_shown`: its source pictures, and the last row's."""
    is_double = transformer.dtype == torch.float64
    device, config = str(transformer.device), transformer.config
    kernel = choose_kernel("auto", device, transformer.dtype)
    denoiser = qwen_image_21_loop.Denoiser(transformer, CPU if is_double else kernel)
    slots = max(1, side**2 // 4)

    def row(length: int, num_shown: int) -> Row:
        pictures = [
            (range(at, at + slots), drawn(transformer, side**2, config.in_channels, seed=at))
            for at in range(3, 3 + num_shown * (slots + 2), slots + 2)
        ]
        shown = [PromptImage(place, x, (side, side), b"%d" % place[0]) for place, x in pictures]
        start = drawn(transformer, pictures[-1][0].stop, config.context_in_dim, seed=num_shown)
        words = drawn(transformer, length, config.context_in_dim, seed=length)
        return Row(torch.cat([start, words]), tuple(shown))

    first, last = num_shown
    groups = [[row(length, first) for length in text_lens[:-1]], [row(text_lens[-1], last)]]
    given = denoiser.prepare([group for group in groups if group], (side, side))
    latents = drawn(transformer, len(text_lens), side**2, config.in_channels)
    timestep = torch.tensor(800.0, device=device)
    return lambda: denoiser.velocity(latents, given, timestep)


@torch.no_grad()
def renderers(setup: Setup) -> Iterator[Line]:
    limit = LARGEST_ERROR[setup.dtype]
    parts = small_parts(setup, "quickstart")
    errors = {f"VAE {name}, 2-D against 3-D": e for name, e in _vae_errors(parts.vae).items()}
    for name, transformer, step in (
        ("Edit", parts.transformer, edit_step),
        ("Qwen-Image-2.1", small_parts(setup, "tiny_qwen_image_21").transformer, step_21),
    ):
        true = step(copy.deepcopy(transformer).cpu().double(), 4, (9, 14, 14))()
        found = step(transformer, 4, (9, 14, 14))()
        errors[f"denoiser of {name}"] = relative_error(found.cpu(), true)
    for what, error in errors.items():
        fix = "install requirements.lock into a new .venv; report it with an issue"
        yield result(what, error <= limit, f"error {error:.0e}, limit {limit:g}", fix)
    # The device rounds to 8 bits as the CPU does, bit for bit.
    layer = torch.nn.Linear(256, 64, dtype=getattr(torch, setup.dtype))
    expected = Fp8Linear(copy.deepcopy(layer)).weight.view(torch.uint8)
    rounded = Fp8Linear(layer.to(setup.device))
    same = torch.equal(rounded.weight.cpu().view(torch.uint8), expected)
    tokens = drawn(layer.weight, 32, 256)
    error = relative_error(rounded(tokens), layer(tokens))
    note = f"bits {'as' if same else 'not as'} on the CPU, error {error:.0e}, limit 0.04"
    keys = {"renderer.fp8": "off"}
    yield result("fp8 storage", same and error <= 0.04, note, "set renderer.fp8=off", keys)


def _vae_errors(vae: Any) -> dict[str, float]:
    """Ours against diffusers' own in float64 on the CPU."""
    stock, mean, std = (x.cpu().double() for x in (vae.stock, vae.mean, vae.std))
    pixels, latents = drawn(vae.mean, 2, 3, 32, 48).clamp(-1, 1), drawn(vae.mean, 2, 16, 4, 6)
    latents = latents[:, : mean.shape[1]]
    mode = stock.encode(pixels.cpu().double().unsqueeze(2)).latent_dist.mode().squeeze(2)
    decoded = stock.decode((latents.cpu().double() * std + mean).unsqueeze(2)).sample.squeeze(2)
    return {
        "encoder": relative_error(vae.encode(pixels).cpu(), (mode - mean) / std),
        "decoder": relative_error(vae.decode(latents).cpu(), decoded.clamp(-1, 1)),
    }
