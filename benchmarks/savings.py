"""Computations that this project does not repeat, and patches that make a run repeat them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.stock import StockDenoiser, StockVae

if TYPE_CHECKING:
    from rl.run.run import Run


def _nothing(run: Run, folder: Path) -> None:
    """Patches nothing: `overrides` or `shape` disable the saving."""


@dataclass(frozen=True)
class Saving:
    """One computation that is not repeated, and how to make a run repeat it."""

    title: str
    disable: Callable[[Run, Path], None] = _nothing
    """Patches a `Run` so that it repeats the work; the folder has the models of `toy.py`."""
    overrides: Sequence[str] = ()
    """Config overrides (`key=value`) that disable the saving."""
    shape: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `toy.Shape` with which a run does the work that it would do without the saving."""


def _prompt_per_completion(run: Run, folder: Path) -> None:
    """Gives each row a separate prompt object, so that no prompt is shared."""
    policy: Any = run.context.policy
    collate = policy.collate
    policy.collate = lambda rows: collate([(replace(prompt), ids) for prompt, ids in rows])


def _tower_per_read(run: Run, folder: Path) -> None:
    """Gives a picture a new cache key whenever it is read."""
    features: Any = run.context.policy.module._features
    original, numbers = features.of, itertools.count()

    def of(pictures: Sequence[Any], vl_model: Any) -> Any:
        return original([replace(p, key=str(next(numbers)).encode()) for p in pictures], vl_model)

    features.of = of


def _source_per_picture(run: Run, folder: Path) -> None:
    """Encodes the source again for each row."""
    import torch

    loop: Any = run.context.renderer.loop
    encode = loop._source_latents

    def source_latents(pictures_B: Sequence[Any], size: Any) -> Any:
        latents = []
        for picture in pictures_B:
            loop._cache.clear()
            latents.append(encode([picture], size))
        return torch.cat(latents)

    loop._source_latents = source_latents


def _negative_per_completion(run: Run, folder: Path) -> None:
    """Forwards the negative prompt again for each completion."""
    policy: Any = run.context.policy
    original = policy._negatives_of

    def negatives_of(prompts_B: Sequence[Any]) -> list[Any]:
        negatives = []
        for prompt in prompts_B:
            policy._negatives.clear()
            negatives += original([prompt])
        return negatives

    policy._negatives_of = negatives_of


def _stock_vae(run: Run, folder: Path) -> None:
    from diffusers import AutoencoderKLQwenImage

    loop: Any = run.context.renderer.loop
    vae = AutoencoderKLQwenImage.from_pretrained(folder / "editor" / "vae").eval()
    loop.parts = replace(loop.parts, vae=StockVae(vae.requires_grad_(False)))


def _stock_denoiser(run: Run, folder: Path) -> None:
    from diffusers import QwenImageTransformer2DModel

    loop: Any = run.context.renderer.loop
    model = QwenImageTransformer2DModel.from_pretrained(folder / "editor" / "transformer").eval()
    loop._denoiser = StockDenoiser(model.requires_grad_(False))
    loop._modulation.of_schedule = list


SAVINGS: Mapping[str, Saving] = {
    "prompt": Saving("prompt forwarded once per group", _prompt_per_completion),
    "padding": Saving("packed, not padded", shape={"ragged": False}),
    "tower": Saving("vision tower once per picture", _tower_per_read),
    "graph": Saving(
        "one forward for conditioning, log-probs and backward",
        overrides=["optimizer.max_kept_tokens=0"],
    ),
    "source": Saving("source latents once per picture", _source_per_picture),
    "negative": Saving("negative prompt once per picture", _negative_per_completion),
    "vae": Saving("VAE as 2-D convolutions", _stock_vae),
    "denoiser": Saving(
        "DiT: modulation table, no unused tokens, no padding, text projected once", _stock_denoiser
    ),
    "equal": Saving("equal completions rendered and judged once", shape={"num_equal": 1}),
}
"""Name -> saving, in the order in which `experiments.savings` adds them."""
