"""Renderer plugin: Emu3's picture tokenizer, which draws the codes that a policy writes."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rl.api.plugin import Dtype, FrozenModelConfig, ModelCost, ModelFiles, Resources, SavesMemory
from rl.api.renderer import Renderer
from rl.api.types import RenderJob, Sample
from rl.config.schema import AtLeast1
from rl.ranks.dist import resolve_device
from rl.renderers.vq_checkpoint import ORIGINAL, STANDALONE, count_parameters, tokenizer_config

if TYPE_CHECKING:
    import numpy as np

    from rl.renderers.diffusion_loop import Outcome


UNIT_CODES = 32 * 32
"""Codes of 256x256 px, the area to which `batch_size` applies."""


class Config(FrozenModelConfig):
    """`renderer: { type: 'emu3_vq', ... }`."""

    model_path: str = "BAAI/Emu3-VisionTokenizer"
    """Hub id or local folder (safetensors): BAAI's tokenizer, or an `Emu3VQVAE`."""
    dtype: Dtype = "float32"
    """Data type of the decoder; weights stored in another one are converted when loaded."""
    batch_size: Annotated[AtLeast1, SavesMemory(1)] = 16
    """Pictures of 256x256 px per batch, proportionally fewer of larger ones; halved for a batch
    that does not fit in memory."""


def batch_of(batch_size: int, codes: np.ndarray) -> tuple[Hashable, int]:
    """Pictures of one shape share a batch; of larger ones it has fewer, in proportion."""
    limit = batch_size * UNIT_CODES // max(1, codes.size)
    return codes.shape, min(batch_size, max(1, limit))


class Emu3Vq(Renderer[Config]):
    """Emu3's picture tokenizer: decodes the grids of codes that a policy writes, and encodes source
    pictures to codes."""

    accepts = "image_tokens"

    def __init__(self, config: Config, resources: Resources) -> None:
        from rl.renderers.emu3_vq_loop import Emu3VqLoop, load_codec

        super().__init__(config, resources)
        device = resolve_device(config.device, resources.device)
        codec = load_codec(config.model_path, config.revision, config.dtype, device)
        self.loop = Emu3VqLoop(codec, partial(batch_of, config.batch_size), resources.may_split)

    def encode_sources(self, samples: Sequence[Sample], area_px: int) -> list[Sample]:
        pictures = [sample.source for sample in samples if sample.source is not None]
        if len(pictures) < len(samples):
            raise ValueError("renderer 'emu3_vq' needs a source picture in every sample; add it")
        codes = self.loop.codec.encode(pictures, area_px, self.config.batch_size)
        pairs = zip(samples, codes, strict=True)
        return [replace(sample, source_codes=grid) for sample, grid in pairs]

    def decode_sources(self, samples: Sequence[Sample]) -> list[Sample]:
        return self.loop.decode_sources(samples)

    @classmethod
    def batch_of(cls, config: Config, job: RenderJob) -> tuple[Hashable, int]:
        return batch_of(config.batch_size, job.payload)

    def render(self, jobs: Iterable[RenderJob]) -> Iterator[tuple[int, Outcome]]:
        return self.loop.render(jobs)

    @classmethod
    def models(cls, config: Config) -> Sequence[ModelFiles]:
        kinds = frozenset({ORIGINAL, STANDALONE})
        return [ModelFiles("model_path", config.model_path, kinds, revision=config.revision)]

    @classmethod
    def cost(cls, config: Config) -> ModelCost:
        """At the peak of a decode about six full-size feature maps with twice the base channels
        are alive, in the block that halves their channels."""
        file, count = Path(config.model_path) / "config.json", count_parameters(config.model_path)
        tokenizer = tokenizer_config(json.loads(file.read_text())) if file.is_file() else {}
        values = 12.0 * tokenizer.get("base_channels", 256) * config.batch_size * 256 * 256
        return ModelCost({} if count is None else {"vq": count}, {"vq": values})
