"""The Qwen-Image-2.1 render loop: hidden states and source pictures in, pictures out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL.Image import Image

from rl.algorithm.attention_kernels import choose_kernel
from rl.api.types import HiddenStates, RenderJob
from rl.config.loading import is_folder
from rl.files import digest
from rl.renderers.qwen_image.denoising_config import PATCH_PX, Size
from rl.renderers.qwen_image.qwen_image_base_loop import QwenImageBaseLoop
from rl.renderers.qwen_image.qwen_image_components import EditorParts, load_modules, origin_of
from rl.renderers.qwen_image.vae2d import PictureVae
from rl.renderers.qwen_image_21.qwen_image_21_config import (
    NUM_POSITIONS,
    TOKENS_PER_SLOT,
    Config,
    condition_sizes,
    drawn_size,
    sigmas_of_folder,
    sigmas_of_index,
    wrong_steps,
)
from rl.renderers.qwen_image_21.qwen_image_21_denoiser import (
    Conditioning,
    Denoiser,
    PromptImage,
    Row,
    end_of,
)
from rl.renderers.shared.decoding import in_slices, seeded_noise
from rl.renderers.shared.scheduling import denoise


@dataclass(frozen=True)
class Bucket:
    """The settings that jobs must share to be drawn in one batch."""

    output: Size
    """Size of the rendered picture."""
    edits: bool
    """Whether there are sources."""


def load_parts(config: Config, device: str) -> EditorParts:
    """Load from a hub id or folder. Raises ValueError if the checkpoint's number of sigmas differs
    from the config's number of steps."""
    from diffusers import AutoencoderKLQwenImage21, DiffusionPipeline, QwenImage21Transformer2DModel

    sigmas = config.sigmas or (
        sigmas_of_folder(config)
        if is_folder(config.model_path)
        else sigmas_of_index(DiffusionPipeline.load_config(**origin_of(config)))
    )
    if problem := wrong_steps(config, sigmas):
        raise ValueError(f"renderer.{problem}")
    return load_modules(
        config,
        device,
        QwenImage21Transformer2DModel,
        AutoencoderKLQwenImage21,
        PictureVae,
        move=lambda model, to_device: model.to(to_device),
        sigmas=sigmas,
    )


class QwenImage21Loop(QwenImageBaseLoop[Config, Bucket]):
    """Equals `QwenImage21Pipeline`, called with one prompt at a time, up to float rounding.

    The other jobs of a batch change a picture (range 0..1), in float32, by about 5e-6, at most 8e-5
    (4e-4 with guidance 3). In half precision only the same batch reproduces a picture exactly.
    """

    def __init__(self, config: Config, parts: EditorParts) -> None:
        super().__init__(config, parts, config.max_pictures)
        transformer = parts.transformer
        self.state_dim = transformer.config.context_in_dim
        kernel = choose_kernel("auto", str(transformer.device), transformer.dtype)
        self._denoiser = Denoiser(transformer, kernel)
        self._rows_of_groups: list[int] = []

    def take_metrics(self) -> dict[str, float]:
        """The plugin's `metrics` since the last call; {} if no job had sources."""
        rows, self._rows_of_groups = self._rows_of_groups, []
        return {"rows_per_start": sum(rows) / len(rows)} if rows else {}

    @staticmethod
    def bucket_of(config: Config, job: RenderJob) -> Bucket:
        """The size of the job's picture, and whether it has sources."""
        sources = [source.size for source in job.sample.sources]
        return Bucket(drawn_size(config, sources), bool(sources))

    def _positions(self, job: RenderJob, bucket: Bucket) -> tuple[int, int, int]:
        """As in the base class. Raises ValueError if policy and VAE see a source at other sizes."""
        payload: HiddenStates = job.payload
        sizes = condition_sizes(self.config, [source.size for source in job.sample.sources])
        _check_picture_lengths(payload, sizes)
        negative = payload.negative_embeds
        num_states = max(len(payload.embeds), 0 if negative is None else len(negative))
        num_picture_states = sum(map(len, payload.pictures))
        start_len = payload.pictures[-1].stop if payload.pictures else 0
        pictures = [*map(latent_shape, sizes), latent_shape(bucket.output)]
        by_pictures = end_of([start_len - num_picture_states, *pictures])
        return end_of([num_states - num_picture_states, *pictures]), by_pictures, NUM_POSITIONS

    @torch.no_grad()
    def render_tensor(self, jobs: Sequence[RenderJob], bucket: Bucket) -> torch.Tensor:
        """Render jobs of one bucket: [B, 4, H, W], the renderer's dtype, -1..1.

        Adjacent jobs with equal starts (see `Row`) form a group. Groups are drawn together up to
        `max_pictures` sources in total, because the sources' attention keys take memory.
        """
        rows = [self._row(job, job.payload.embeds) for job in jobs]
        sizes = [len(part) for part in in_groups(rows)]
        self._rows_of_groups += sizes if bucket.edits else []
        drawn, start, end, num_sources = [], 0, 0, 0
        for size in sizes:
            group_sources = len(rows[end].sources)
            if end > start and num_sources + group_sources > self.config.max_pictures:
                drawn.append(self._draw(jobs[start:end], rows[start:end], bucket.output))
                start, num_sources = end, 0
            end, num_sources = end + size, num_sources + group_sources
        drawn.append(self._draw(jobs[start:], rows[start:], bucket.output))
        width, height = bucket.output
        return in_slices(torch.cat(drawn), self.parts.vae.decode, width * height)

    def _draw(self, jobs: Sequence[RenderJob], rows: Sequence[Row], size: Size) -> torch.Tensor:
        """Denoised latents [B, C, h, w] of the jobs' pictures."""
        transformer, shape = self.parts.transformer, latent_shape(size)
        channels = transformer.config.in_channels
        noise = seeded_noise((job.noise_seed for job in jobs), (channels, *shape))
        latents = noise.flatten(2).transpose(1, 2).to(transformer.device, transformer.dtype)
        if self.config.true_cfg_scale > 1:
            rows = [*rows, *(self._row(job, job.payload.negative_embeds) for job in jobs)]
        conditioning = self._denoiser.prepare(in_groups(rows), shape)
        scheduler = self._prepared_scheduler(latents.shape[1])
        latents = denoise(
            latents,
            scheduler,
            lambda step, x: self._predict(x, conditioning, scheduler.timesteps[step]),
        )
        return latents.transpose(1, 2).unflatten(2, shape)

    def _row(self, job: RenderJob, states: torch.Tensor) -> Row:
        transformer = self.parts.transformer
        sources = job.sample.sources
        sizes = condition_sizes(self.config, [source.size for source in sources])
        pictures = tuple(
            PromptImage(indices, self._source_latents([p], size)[0], latent_shape(size), digest(p))
            for indices, p, size in zip(job.payload.pictures, sources, sizes, strict=True)
        )
        return Row(states.to(transformer.device, transformer.dtype), pictures)

    def _predict(
        self, latents: torch.Tensor, conditioning: Conditioning, timestep: torch.Tensor
    ) -> torch.Tensor:
        """Velocity [B, tokens, channels]; under guidance (Ho & Salimans 2022, eq. 6) one forward
        computes each row twice, with its prompt and with the negative prompt."""
        scale = self.config.true_cfg_scale
        if scale == 1:
            return self._denoiser.velocity(latents, conditioning, timestep)
        rows = self._denoiser.velocity(torch.cat([latents, latents]), conditioning, timestep)
        positive, negative = rows.chunk(2)
        return negative + scale * (positive - negative)

    def _encode(self, picture: Image, size: Size) -> torch.Tensor:
        """VAE latents [1, tokens, channels], alpha channel included."""
        width, height = size
        pixels = self._pixels.preprocess(picture.convert("RGBA"), height, width)
        latents: torch.Tensor = self.parts.vae.encode(pixels)
        return latents.flatten(2).transpose(1, 2)


def _check_picture_lengths(payload: HiddenStates, sizes: Sequence[Size]) -> None:
    slots = [width * height // PATCH_PX**2 // TOKENS_PER_SLOT for width, height in sizes]
    if list(map(len, payload.pictures)) == slots:
        return
    lengths = ", ".join(str(len(indices)) for indices in payload.pictures) or "no"
    needed = ", ".join(map(str, slots)) or "no"
    raise ValueError(
        f"the policy has {lengths} tokens for the pictures, the renderer needs {needed} (32x32 px "
        "each): set renderer.policy_image_area_px to renderer.condition_area_px, and leave "
        "policy.image_min_pixels and image_max_pixels null"
    )


def in_groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Groups of adjacent rows with equal starts; all rows without pictures have equal starts."""
    groups: list[list[Row]] = []
    for row in rows:
        if groups and groups[-1][0].starts_like(row):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def latent_shape(size: Size) -> tuple[int, int]:
    """(width, height) in px -> (rows, columns) of latents."""
    width, height = size
    return height // PATCH_PX, width // PATCH_PX
