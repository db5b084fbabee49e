"""Emu3's VQ decoder and encoder."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from cachetools import LRUCache
from PIL import Image

from rl.api.types import RenderFailure, RenderJob, Sample
from rl.files import over_white
from rl.model_files import align_weights
from rl.renderers.diffusion_loop import Fits, Outcome, batches_of, render_in_batches, to_pictures
from rl.renderers.vq_checkpoint import ORIGINAL, WEIGHTS, tensor_name, tokenizer_config

if TYPE_CHECKING:
    from transformers import Emu3ImageProcessor, Emu3VQVAE

# ---- codec ---------------------------------------------------------------------------------------
# Encodes pictures to codes and decodes them with transformers' Emu3VQVAE, as single frames.


class Emu3Codec:
    """Emu3's frozen picture tokenizer, in evaluation mode, with its image processor.

    The model is made for videos: its own `decode` decodes four frames and returns the first. This
    class runs the 2-D parts on one frame, in a quarter of the time and memory. The 3-D convolutions
    are causal and see the same values, so the results are equal up to float rounding.
    """

    def __init__(self, model: Emu3VQVAE, processor: Emu3ImageProcessor | None = None) -> None:
        """Without `processor`, pixels are scaled to -1..1, as the published tokenizer expects (the
        default of `Emu3ImageProcessor` is CLIP's mean and standard deviation)."""
        from transformers import Emu3ImageProcessor

        self.model = model.eval().requires_grad_(False)
        self.processor = processor or Emu3ImageProcessor(image_mean=[0.5] * 3, image_std=[0.5] * 3)

    @property
    def patch_px(self) -> int:
        """Side of the square that one code represents, px."""
        return int(self.model.spatial_scale_factor)

    @torch.no_grad()
    def decode_tensor(self, codes: torch.Tensor) -> torch.Tensor:
        """codes [B, h, w] int64 -> pixels [B, 3, h * patch_px, w * patch_px] float32, about -1..1
        (the processor's mean and std), not clamped, perhaps not finite.

        Equals the first frame of `Emu3VQVAE.decode`, up to rounding.
        """
        model, decoder = self.model, self.model.decoder
        embedded = model.quantize.embedding(codes.to(model.device)).permute(0, 3, 1, 2).unsqueeze(2)
        # Both halves pass the same 3-D layers, stacked along the batch.
        video = torch.cat([model.post_quant_conv(embedded), embedded])
        for layer in decoder.time_res_stack:
            video = layer(video)
        for layer in decoder.time_conv:
            video = layer(video)
            video = video * torch.sigmoid(video)
        hidden, condition = video[:, :, 0].chunk(2)
        hidden = decoder.conv_in(hidden)
        hidden = decoder.middle_block(hidden, condition)
        hidden = decoder.up_block(hidden, condition)
        hidden = decoder.norm_out(hidden, condition)
        hidden = hidden * torch.sigmoid(hidden)
        return decoder.conv_out(hidden).float()

    def to_pictures(self, pixels: torch.Tensor) -> list[Image.Image]:
        """Finite pixels of `decode_tensor` -> RGB pictures, as the stock processor makes them."""
        arrays = list(pixels.float().cpu().numpy())
        pictures: list[Image.Image] = self.processor.postprocess(arrays)["pixel_values"]
        return pictures

    @torch.no_grad()
    def encode(
        self, pictures: Sequence[Image.Image], area_px: int, batch_size: int
    ) -> list[np.ndarray]:
        """Scale each picture to about `area_px` and return its codes [h, w] int32.

        `batch_size`: most pictures of one size per forward.
        """
        scaled = [fit(picture, area_px, self.patch_px) for picture in pictures]
        codes: dict[int, np.ndarray] = {}
        # Pictures of one size together; {}: no smaller limit is known.
        for _, batch in batches_of(scaled, lambda picture: (picture.size, batch_size), {}):
            indices, pictures_B = zip(*batch, strict=True)
            inputs = self.processor(
                list(pictures_B), do_resize=False, do_pad=False, return_tensors="pt"
            )
            pixels = inputs["pixel_values"].to(self.model.device)
            grids = self.model.encode(pixels, inputs["image_sizes"]).image_tokens
            codes |= {
                index: grid.cpu().numpy().astype(np.int32)
                for index, grid in zip(indices, grids, strict=True)
            }
        return [codes[index] for index in range(len(pictures))]


def fit(picture: Image.Image, area_px: int, patch_px: int) -> Image.Image:
    """Scale the picture (bicubic) to about `area_px`; its sides become multiples of `patch_px`.

    The grids are as large as in the published data sets. Those crop up to one patch on the right
    and bottom after scaling; this function instead shrinks each side by less than one patch.
    """
    scale = math.sqrt(area_px / (picture.width * picture.height))
    sides = (max(round(side * scale) // patch_px, 1) * patch_px for side in picture.size)
    width, height = sides
    return over_white(picture).resize((width, height), Image.Resampling.BICUBIC)


def load_codec(model_path: str, revision: str | None, dtype: str, device: str) -> Emu3Codec:
    """Load the tokenizer of a hub id or folder; `vq_checkpoint.py` lists the supported checkpoints.

    Raises OSError if a file is missing, ValueError if the checkpoint holds no Emu3 tokenizer,
    RuntimeError if tensors are missing.
    """
    from transformers import Emu3ImageProcessor, Emu3VQVAE, Emu3VQVAEConfig

    with open(_file(model_path, revision, "config.json")) as stream:
        config = json.load(stream)
    with torch.device("meta"):
        model = Emu3VQVAE(Emu3VQVAEConfig(**tokenizer_config(config)))
    original = config["model_type"] == ORIGINAL
    tensors = _read_tensors(model_path, revision, original, device)
    model.load_state_dict(tensors, strict=True, assign=True)
    model.to(getattr(torch, dtype))
    align_weights(model, device)
    files = ("preprocessor_config.json", "processor_config.json")
    if not any(_file(model_path, revision, name, optional=True) for name in files):
        return Emu3Codec(model)
    processor = Emu3ImageProcessor.from_pretrained(model_path, revision=revision or "main")
    return Emu3Codec(model, processor)


def _read_tensors(
    model_path: str, revision: str | None, original: bool, device: str
) -> dict[str, torch.Tensor]:
    """The tokenizer's tensors under transformers' names."""
    from safetensors import safe_open

    tensors = {}
    with safe_open(_file(model_path, revision, WEIGHTS), framework="pt", device=device) as stored:
        for stored_name in stored.keys():  # noqa: SIM118 - not a mapping
            name, tensor = tensor_name(stored_name, original), stored.get_tensor(stored_name)
            # The original attention has 1x1 convolutions; transformers has linear layers.
            tensors[name] = tensor.flatten(1) if name.endswith("_proj.weight") else tensor
    return tensors


def _file(model_path: str, revision: str | None, name: str, optional: bool = False) -> Any:
    """Path of a checkpoint file, downloaded from a hub id; None for a missing `optional` one."""
    from transformers.utils import cached_file

    return cached_file(
        model_path, name, revision=revision, _raise_exceptions_for_missing_entries=not optional
    )


# ---- emu3 vq loop --------------------------------------------------------------------------------
# Grids of codes in, pictures out; sources and targets are kept between calls.

NUM_KEPT_PICTURES = 256
"""Decoded sources and targets cached between calls (0.2 MB each at 256^2)."""

BatchOf = Callable[[np.ndarray], tuple[Hashable, int]]
"""Codes -> (key of their batch, most jobs in it), as `Renderer.batch_of`."""


class Emu3VqLoop:
    """Decodes codes to RGB pictures. `render` never takes a picture from the cache: its last bits
    depend on its batch, which must not depend on what was decoded before."""

    def __init__(self, codec: Emu3Codec, batch_of: BatchOf, may_split: bool = True) -> None:
        self.codec = codec
        self._batch_of, self._may_split = batch_of, may_split
        self._cache: LRUCache[tuple[Hashable, bytes], Image.Image] = LRUCache(NUM_KEPT_PICTURES)
        self._fits: Fits = {}

    def render(self, jobs: Iterable[RenderJob]) -> Iterator[tuple[int, Outcome]]:
        """Yield `(number of the job, picture or failure)`, batch by batch, as they fill.

        A failure blames the policy for invalid codes, and the renderer if the decoder fails.
        """

        def refused(codes: np.ndarray) -> Outcome | None:
            reason = self._why_invalid(codes)
            return RenderFailure(reason, blame="policy") if reason else None

        payloads = (job.payload for job in jobs)
        return render_in_batches(
            payloads, self._batch_of, refused, self._draw_batch, self._fits, self._may_split
        )

    def decode_sources(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples, with missing `source` and `target` pictures decoded from their codes.

        Raises ValueError if this decoder does not know the codes, RuntimeError if it fails.
        """
        return [self._with_pictures(sample) for sample in samples]

    def _with_pictures(self, sample: Sample) -> Sample:
        sources, target = sample.sources, sample.target
        if not sources and sample.source_codes is not None:
            sources = (self._picture(sample, sample.source_codes),)
        if target is None and sample.target_codes is not None:
            target = self._picture(sample, sample.target_codes)
        return replace(sample, sources=sources, target=target)

    def _picture(self, sample: Sample, codes: np.ndarray) -> Image.Image:
        """Drawn alone: its bits do not depend on other samples."""
        if reason := self._why_invalid(codes):
            raise ValueError(
                f"sample {sample.id!r}: a picture of it cannot be drawn: {reason}; tokenise the "
                "data with the renderer's own model_path (rl prepare)"
            )
        key = codes.shape, codes.astype(np.int64).tobytes()
        if key not in self._cache:
            [outcome] = self._draw_batch([codes], None)
            if isinstance(outcome, RenderFailure):
                raise RuntimeError(f"a sample's picture cannot be decoded: {outcome.reason}")
            self._cache[key] = outcome
        return self._cache[key]

    def _why_invalid(self, codes: np.ndarray) -> str | None:
        if codes.ndim != 2 or not codes.size:
            return f"bad_grid: codes of shape {list(codes.shape)}, not [h, w]"
        low, high, last = codes.min(), codes.max(), self.codec.model.config.codebook_size - 1
        if low >= 0 and high <= last:
            return None
        return f"bad_code: {low if low < 0 else high} is not in the codebook's 0..{last}"

    def _draw_batch(self, grids: Sequence[np.ndarray], key: Hashable) -> list[Outcome]:
        codes = torch.from_numpy(np.stack(grids).astype(np.int64))
        return [*to_pictures(self.codec.decode_tensor(codes), self.codec.to_pictures)]
