"""The savings one by one, and how each is defeated from outside a run that has them all.

What: `SAVINGS`; a defeat wraps objects of an opened run, sets a key of its config, or changes the
shape of its work. What not: switches in production code: there are none for these, because they
are exact. Called by `our_side.py` and `experiments.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from rl.run.run import Run


def _nothing(run: Run, folder: Path) -> None:
    """The config or the shape defeats it."""


@dataclass(frozen=True)
class Saving:
    """One thing that is not done twice."""

    title: str
    defeat: Callable[[Run, Path], None] = _nothing
    """Makes an opened run do it again and again; the folder holds the toy's models."""
    overrides: Sequence[str] = ()
    """`key=value` of the config that do so."""
    shape: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the shape whose work is what the run would do without the saving."""


def _prompt_per_completion(run: Run, folder: Path) -> None:
    """Each row brings a prompt of its own, so that none is shared."""
    policy: Any = run.policy
    collate = policy.collate
    policy.collate = lambda rows: collate([(replace(prompt), ids) for prompt, ids in rows])


def _tower_per_look(run: Run, folder: Path) -> None:
    """No two looks at a picture seem to be at the same one, and no features are kept."""
    features: Any = run.policy.module._features
    look, numbers = features.of, itertools.count()

    def of(pictures: Sequence[Any], vl_model: Any) -> Any:
        return look([replace(p, key=str(next(numbers)).encode()) for p in pictures], vl_model)

    features._max_kept, features.of = 0, of


def _source_per_picture(run: Run, folder: Path) -> None:
    """Sources are known by their objects: copies are strangers."""
    renderer: Any = run.context.renderer
    encode = renderer._encode_sources
    renderer._encode_sources = lambda pictures_B, size: encode([p.copy() for p in pictures_B], size)


def _negative_per_completion(run: Run, folder: Path) -> None:
    """Each completion's negative prompt is forwarded anew."""
    policy: Any = run.policy
    find = policy._negatives_of

    def negatives_of(prompts_B: Sequence[Any]) -> list[Any]:
        found = []
        for prompt in prompts_B:
            policy._negatives.clear()
            found += find([prompt])
        return found

    policy._negatives_of = negatives_of


class StockVae:
    """diffusers' AutoencoderKLQwenImage behind the doors of `FrameVae`."""

    def __init__(self, folder: Path) -> None:
        from diffusers import AutoencoderKLQwenImage

        vae = AutoencoderKLQwenImage.from_pretrained(folder / "editor" / "vae").eval()
        self._vae = vae.requires_grad_(False)
        self._mean, self._std = (
            torch.tensor(statistic).view(1, -1, 1, 1)
            for statistic in (vae.config.latents_mean, vae.config.latents_std)
        )

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """[B, 3, H, W] -> normalised [B, C, h, w]."""
        mode = self._vae.encode(pixels.unsqueeze(2)).latent_dist.mode().squeeze(2)
        return (mode - self._mean) / self._std

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Normalised [B, C, h, w] -> [B, 3, H, W]."""
        frames = self._vae.decode((latents * self._std + self._mean).unsqueeze(2)).sample
        return frames.squeeze(2).clamp(-1.0, 1.0)


def _stock_vae(run: Run, folder: Path) -> None:
    renderer: Any = run.context.renderer
    renderer.parts = replace(renderer.parts, vae=StockVae(folder))


class StockDenoiser:
    """diffusers' transformer behind the doors of `Denoiser`; its modulation is a timestep."""

    def __init__(self, folder: Path) -> None:
        from diffusers import QwenImageTransformer2DModel

        path = folder / "editor" / "transformer"
        self._model = QwenImageTransformer2DModel.from_pretrained(path).eval().requires_grad_(False)

    def prepare(
        self, states_R: Sequence[torch.Tensor], sources: torch.Tensor, shapes: Sequence[Any]
    ) -> Any:
        """The arguments that no step changes; words padded to the longest row."""
        num_words = tuple(len(states) for states in states_R)
        states = torch.nn.utils.rnn.pad_sequence(list(states_R), batch_first=True)
        mask = torch.arange(states.shape[1]) < torch.tensor(num_words)[:, None]
        return StockConditioning(num_words, states, mask, sources, [list(shapes)] * len(states))

    def velocity(
        self, latents: torch.Tensor, given: StockConditioning, timestep: torch.Tensor
    ) -> torch.Tensor:
        """[R, N, in_channels] noisy latents -> the same."""
        output = self._model(
            hidden_states=torch.cat([latents, given.sources], dim=1),
            timestep=timestep.expand(len(latents)) / 1000,
            encoder_hidden_states=given.states,
            encoder_hidden_states_mask=None if given.mask.all() else given.mask,
            img_shapes=given.shapes,
            return_dict=False,
        )[0]
        return output[:, : latents.shape[1]]


@dataclass(frozen=True, eq=False)
class StockConditioning:
    """What `StockDenoiser` needs beside latents and timestep."""

    num_words: tuple[int, ...]
    states: torch.Tensor
    """[R, L, D], padded on the right."""
    mask: torch.Tensor
    """[R, L] bool."""
    sources: torch.Tensor
    """[R, M, in_channels]."""
    shapes: list[list[tuple[int, int, int]]]


def _stock_denoiser(run: Run, folder: Path) -> None:
    renderer: Any = run.context.renderer
    renderer._denoiser = StockDenoiser(folder)
    renderer._modulation.of_schedule = list


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
