"""diffusers' models with the interfaces of this project's replacements."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch


class StockVae:
    """AutoencoderKLQwenImage with the interface of `FrameVae`."""

    def __init__(self, vae: Any) -> None:
        self._vae = vae
        self._mean, self._std = (
            torch.tensor(statistic, device=vae.device, dtype=vae.dtype).view(1, -1, 1, 1)
            for statistic in (vae.config.latents_mean, vae.config.latents_std)
        )

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """[B, 3, H, W] -> normalised [B, C, h, w]."""
        mode = self._vae.encode(pixels.unsqueeze(2)).latent_dist.mode().squeeze(2)
        return (mode - self._mean) / self._std

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Normalised [B, C, h, w] -> [B, 3, H, W]."""
        one_frame = (latents / (1 / self._std) + self._mean).unsqueeze(2)
        return self._vae.decode(one_frame).sample.squeeze(2).clamp(-1.0, 1.0)


class StockDenoiser:
    """QwenImageTransformer2DModel with `Denoiser`'s interface; `velocity` takes a timestep."""

    def __init__(self, transformer: Any) -> None:
        self._transformer = transformer

    def prepare(
        self, states_R: Sequence[torch.Tensor], sources: torch.Tensor, shapes: Sequence[Any]
    ) -> SimpleNamespace:
        """The arguments that are the same in all steps. States are padded to the longest row, with
        a mask if lengths differ."""
        text_lens = tuple(len(states) for states in states_R)
        states = torch.nn.utils.rnn.pad_sequence(list(states_R), batch_first=True)
        at = torch.arange(states.shape[1], device=states.device)
        mask = at < torch.tensor(text_lens, device=states.device)[:, None]
        return SimpleNamespace(
            text_lens=text_lens,
            sources=sources,
            states=states,
            mask=mask if len(set(text_lens)) > 1 else None,
            shapes=[list(shapes)] * len(states),
        )

    def velocity(
        self, latents: torch.Tensor, prepared: SimpleNamespace, timestep: torch.Tensor
    ) -> torch.Tensor:
        """[R, N, in_channels] noisy latents -> [R, N, in_channels]; `timestep`: 1000 down to 0."""
        [velocity] = self._transformer(
            hidden_states=torch.cat([latents, prepared.sources], dim=1),
            timestep=timestep.expand(len(latents)) / 1000,
            encoder_hidden_states=prepared.states,
            encoder_hidden_states_mask=prepared.mask,
            img_shapes=prepared.shapes,
            return_dict=False,
        )
        return velocity[:, : latents.shape[1]]
