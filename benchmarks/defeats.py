"""This project's savings, and how each is disabled in an opened run, its config or its shape."""

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
    """For savings that the config or the shape disables."""


@dataclass(frozen=True)
class Saving:
    """One kind of work that is not repeated."""

    title: str
    defeat: Callable[[Run, Path], None] = _nothing
    """Makes an opened run repeat the work; the folder has the toy's models."""
    overrides: Sequence[str] = ()
    """`key=value` of the config that disable the saving."""
    shape: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the shape after which the work is that of a run without the saving."""


def _prompt_per_completion(run: Run, folder: Path) -> None:
    """Each row has a separate prompt object, so that no prompt is shared."""
    policy: Any = run.context.policy
    collate = policy.collate
    policy.collate = lambda rows: collate([(replace(prompt), ids) for prompt, ids in rows])


def _tower_per_look(run: Run, folder: Path) -> None:
    """A picture gets a new cache key whenever it is read."""
    features: Any = run.context.policy.module._features
    original, numbers = features.of, itertools.count()

    def of(pictures: Sequence[Any], vl_model: Any) -> Any:
        return original([replace(p, key=str(next(numbers)).encode()) for p in pictures], vl_model)

    features.of = of


def _source_per_picture(run: Run, folder: Path) -> None:
    """Copies of a source are encoded again, as sources are cached by object identity."""
    loop: Any = run.context.renderer.loop
    encode = loop._source_latents
    loop._source_latents = lambda pictures_B, size: encode([p.copy() for p in pictures_B], size)


def _negative_per_completion(run: Run, folder: Path) -> None:
    """Each completion's negative prompt is forwarded again."""
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
    "tower": Saving("vision tower once per picture", _tower_per_look),
    "graph": Saving(
        "one forward for conditioning, log-probs and backward",
        overrides=["optimizer.max_kept_tokens=0"],
    ),
    "source": Saving("source latents once per picture", _source_per_picture),
    "negative": Saving("negative prompt once per picture", _negative_per_completion),
    "vae": Saving("VAE as 2-D convolutions", _stock_vae),
    "denoiser": Saving(
        "DiT: modulation table, dead tokens, unpadded words, text projected once", _stock_denoiser
    ),
    "equal": Saving("equal completions rendered and judged once", shape={"num_equal": 1}),
}
"""In the order in which they are stacked."""
