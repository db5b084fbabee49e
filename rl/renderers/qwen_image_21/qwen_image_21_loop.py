"""The Qwen-Image-2.1 render loop: hidden states and source pictures in, pictures out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from PIL import Image

from rl.algorithm.attention_kernels import choose_kernel
from rl.api.types import HiddenStates, RenderFailure, RenderJob
from rl.files.images import digest, over_white
from rl.renderers.qwen_image.denoising import denoise, prepared
from rl.renderers.qwen_image.sources import SourceLatents
from rl.renderers.qwen_image_21.layout import end_of
from rl.renderers.qwen_image_21.qwen_image_21_components import Parts
from rl.renderers.qwen_image_21.qwen_image_21_config import (
    NUM_POSITIONS,
    PATCH_PX,
    TOKENS_PER_SLOT,
    Config,
    Size,
    condition_sizes,
    drawn_size,
)
from rl.renderers.qwen_image_21.qwen_image_21_denoiser import Conditioning, Denoiser, Group, Shown
from rl.renderers.shared.batches import Fits, render_in_batches
from rl.renderers.shared.decoding import in_slices, seeded_noise, to_pictures


@dataclass(frozen=True)
class Bucket:
    """What jobs must agree on to share a batch."""

    output: Size
    """Size of the rendered picture."""
    edits: bool
    """Whether there are sources."""


@dataclass(frozen=True, eq=False)
class Row:
    """What one forward's row is conditioned on."""

    states: torch.Tensor
    """[L, C]."""
    shown: tuple[Shown, ...]
    digests: tuple[bytes, ...]
    """The `digest` of each source picture."""

    @property
    def start(self) -> int:
        """States up to the end of its last picture."""
        return self.shown[-1].place.stop if self.shown else 0

    def begins_like(self, other: Row) -> bool:
        """The same pictures in the same places, and the same states between them, bit for bit."""
        return (
            self.digests == other.digests
            and [one.place for one in self.shown] == [one.place for one in other.shown]
            and torch.equal(self.states[: self.start], other.states[: self.start])
        )


class QwenImage21Loop:
    """Equals `QwenImage21Pipeline`, asked for one prompt at a time, up to float rounding.

    A picture depends on its job alone: batch mates move it by float rounding, in float32 about 5e-6
    of the 0..1 range, 8e-5 at worst, 4e-4 under guidance of 3. In half precision a picture repeats
    exactly only in the same batch.
    """

    def __init__(self, config: Config, parts: Parts) -> None:
        from diffusers.image_processor import VaeImageProcessor

        self.config = config
        self.parts = parts
        transformer = parts.transformer
        self.state_dim = transformer.config.context_in_dim
        kernel = choose_kernel("auto", str(transformer.device), transformer.dtype)
        self._denoiser = Denoiser(transformer, kernel, compiled=config.compile_blocks)
        self._pixels = VaeImageProcessor(vae_scale_factor=PATCH_PX)
        self._sources = SourceLatents(self._encode)
        self._fits: Fits = {}
        self._rows_of_groups: list[int] = []

    def render(
        self, jobs: Iterable[RenderJob]
    ) -> Iterator[tuple[int, Image.Image | RenderFailure]]:
        """Yield `(number of the job, picture or failure)`, batch by batch, as batches fill.

        Pictures are RGB, over white where they are transparent. A failing batch fails its own jobs
        only; one that does not fit in memory is halved until it does. Raises ValueError where the
        policy does not fit this renderer: no negative states under guidance, or pictures of another
        size than the VAE's.
        """
        return render_in_batches(
            jobs,
            self._place,
            size_of=lambda bucket: self.config.batch_size,
            render=lambda batch, bucket: [
                outcome if isinstance(outcome, RenderFailure) else over_white(outcome)
                for outcome in to_pictures(self.render_tensor(batch, bucket), self._pixels)
            ],
            fits=self._fits,
        )

    def take_metrics(self) -> dict[str, float]:
        """Since the last call."""
        rows, self._rows_of_groups = self._rows_of_groups, []
        return {"rows_per_start": sum(rows) / len(rows)} if rows else {}

    def _place(self, job: RenderJob) -> Bucket | RenderFailure:
        """Where a job waits for its batch, or why it never will."""
        payload: HiddenStates = job.payload
        if self.config.true_cfg_scale > 1 and payload.negative_embeds is None:
            raise ValueError(
                "true_cfg_scale > 1 needs negative_embeds from the policy; set true_cfg_scale: 1 "
                "or use a policy that encodes the renderer's negative prompt"
            )
        sources = [source.size for source in job.sample.sources]
        if len(sources) > self.config.max_pictures:
            return RenderFailure(
                f"too_many_sources: {len(sources)}; renderer.max_pictures is "
                f"{self.config.max_pictures}"
            )
        sizes = condition_sizes(self.config, sources)
        self._check_places(payload, sizes)
        bucket = self.bucket_of(job)
        negative = payload.negative_embeds
        longest = max(len(payload.embeds), 0 if negative is None else len(negative))
        shown = sum(map(len, payload.pictures))
        start = payload.pictures[-1].stop if payload.pictures else 0
        pictures = [*map(in_latents, sizes), in_latents(bucket.output)]
        if (end := end_of([longest - shown, *pictures])) <= NUM_POSITIONS:
            return bucket
        if (alone := end_of([start - shown, *pictures])) > NUM_POSITIONS:
            return RenderFailure(
                f"sources_too_long: {alone} positions of pictures, room for {NUM_POSITIONS}; show "
                "fewer, or less elongated ones"
            )
        reason = f"too_long: {end} positions of text and pictures, room for {NUM_POSITIONS}"
        return RenderFailure(reason, blame="policy")

    def _check_places(self, payload: HiddenStates, sizes: Sequence[Size]) -> None:
        slots = [width * height // PATCH_PX**2 // TOKENS_PER_SLOT for width, height in sizes]
        if list(map(len, payload.pictures)) == slots:
            return
        places = ", ".join(str(len(place)) for place in payload.pictures) or "no"
        wanted = ", ".join(map(str, slots)) or "no"
        raise ValueError(
            f"the policy shows pictures in {places} places, the renderer wants {wanted} (32x32 px "
            "each): set renderer.policy_image_area_px to renderer.condition_area_px, and leave "
            "policy.image_min_pixels and image_max_pixels null"
        )

    def bucket_of(self, job: RenderJob) -> Bucket:
        """The bucket of a job: the size of its picture, and whether it has sources."""
        sources = [source.size for source in job.sample.sources]
        return Bucket(drawn_size(self.config, sources), bool(sources))

    @torch.no_grad()
    def render_tensor(self, jobs: Sequence[RenderJob], bucket: Bucket) -> torch.Tensor:
        """Render jobs of one bucket: [B, 4, H, W], the renderer's dtype, -1..1.

        Neighbours that begin alike are a group. Groups go together as long as they show no more
        pictures than `max_pictures`, whose keys fill the memory.
        """
        rows = [self._row(job, job.payload.embeds) for job in jobs]
        sizes = [len(part) for part in in_groups(rows)]
        self._rows_of_groups += sizes if bucket.edits else []
        drawn, at, turn, shown = [], 0, 0, 0
        for size in sizes:
            more = len(rows[at + turn].shown)
            if turn and shown + more > self.config.max_pictures:
                drawn.append(self._draw(jobs[at : at + turn], rows[at : at + turn], bucket.output))
                at, turn, shown = at + turn, 0, 0
            turn, shown = turn + size, shown + more
        drawn.append(self._draw(jobs[at:], rows[at:], bucket.output))
        latents = torch.cat(drawn)
        width, height = bucket.output
        return in_slices(latents, self.parts.vae.decode, width * height)

    def _draw(self, jobs: Sequence[RenderJob], rows: Sequence[Row], size: Size) -> torch.Tensor:
        """Latents [B, C, h, w]."""
        transformer, shape = self.parts.transformer, in_latents(size)
        channels = transformer.config.in_channels
        noise = seeded_noise((job.noise_seed for job in jobs), (channels, *shape))
        latents = noise.flatten(2).transpose(1, 2).to(transformer.device, transformer.dtype)
        forwards_of = [rows]
        if self.config.true_cfg_scale > 1:
            negative = [self._row(job, job.payload.negative_embeds) for job in jobs]
            both = [*rows, *negative]
            forwards_of = [both] if self.config.cfg_in_one_forward else [rows, negative]
        forwards = [self._forward(part, shape) for part in forwards_of]
        scheduler = prepared(
            self.parts.scheduler,
            self.config.num_steps,
            latents.shape[1],
            transformer.device,
            self.parts.sigmas,
        )
        latents = denoise(
            latents,
            scheduler,
            lambda step, x: self._predict(x, forwards, scheduler.timesteps[step]),
            self.config.step_cache_interval,
        )
        return latents.transpose(1, 2).unflatten(2, shape)

    def _row(self, job: RenderJob, states: torch.Tensor) -> Row:
        transformer = self.parts.transformer
        sources = job.sample.sources
        sizes = condition_sizes(self.config, [source.size for source in sources])
        shown = tuple(
            Shown(place, self._sources.of([source], size)[0], in_latents(size))
            for place, source, size in zip(job.payload.pictures, sources, sizes, strict=True)
        )
        digests = tuple(map(digest, sources))
        return Row(states.to(transformer.device, transformer.dtype), shown, digests)

    def _forward(self, rows: Sequence[Row], shape: tuple[int, int]) -> Conditioning:
        groups = [
            Group(
                part[0].states[: part[0].start],
                part[0].shown,
                tuple(row.states[row.start :] for row in part),
            )
            for part in in_groups(rows)
        ]
        return self._denoiser.prepare(groups, shape)

    def _predict(
        self, latents: torch.Tensor, forwards: Sequence[Conditioning], timestep: torch.Tensor
    ) -> torch.Tensor:
        """Velocity [B, tokens, channels], guided if there are negative rows."""
        outputs: list[torch.Tensor] = []
        for forward in forwards:
            repeats = len(forward.num_words) // len(latents)
            rows = latents.repeat(repeats, 1, 1)
            velocity = self._denoiser.velocity(rows, forward, timestep)
            outputs.extend(velocity.chunk(repeats))
        if len(outputs) == 1:
            return outputs[0]
        positive, negative = outputs
        return negative + self.config.true_cfg_scale * (positive - negative)

    def _encode(self, pictures: list[Image.Image], size: Size) -> torch.Tensor:
        """VAE latents [B, tokens, channels], transparency and all."""
        width, height = size
        rgba = [picture.convert("RGBA") for picture in pictures]
        pixels = self._pixels.preprocess(rgba, height, width)
        latents = in_slices(pixels, self.parts.vae.encode, width * height)
        return latents.flatten(2).transpose(1, 2)


def in_groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Neighbours that begin alike, together; all of those without pictures."""
    groups: list[list[Row]] = []
    for row in rows:
        if groups and groups[-1][0].begins_like(row):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def in_latents(size: Size) -> tuple[int, int]:
    """(width, height) in px -> (rows, columns)."""
    width, height = size
    return height // PATCH_PX, width // PATCH_PX
