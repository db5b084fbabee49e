"""Renderer plugin: Stable Diffusion 3 and 3.5, from a written prompt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rl.api.metric import Metric
from rl.api.plug import DIFFUSERS_SAFETENSORS, ModelFiles, Resources, unread
from rl.api.renderer import Renderer
from rl.api.types import RenderJob
from rl.config.schema import RunConfig
from rl.files.weights import num_parameters
from rl.ranks.placement import resolve_device
from rl.renderers.sd3.sd3_config import PATCH_PX, Config
from rl.renderers.shared.sides import side_problems

if TYPE_CHECKING:
    from rl.renderers.shared.batches import Outcome

TEXT_TOKENS_CLIP = 77
"""CLIP's context, markers included."""

_ENCODERS = {"text_encoder": 123.65e6, "text_encoder_2": 694.66e6, "text_encoder_3": 4.762e9}
HUB_PARAMETERS: Mapping[str, Mapping[str, float]] = {
    f"stabilityai/stable-diffusion-{name}": {"transformer": size, **_ENCODERS, "vae": 83.82e6}
    for name, size in (
        ("3-medium-diffusers", 2.028e9),
        ("3.5-medium", 2.243e9),
        ("3.5-large", 8.057e9),
        ("3.5-large-turbo", 8.057e9),
    )
}


class SD3(Renderer[Config]):
    """Draws what was written."""

    accepts = "text"
    metrics: ClassVar[Mapping[str, Metric]] = {
        "clip_cut_share": Metric(
            "0..1", "share of prompts longer than CLIP's 77 tokens, whose end it does not read"
        ),
        "clip_cut_tokens": Metric("tokens", "mean tokens cut so per picture"),
        "t5_cut_share": Metric("0..1", "share longer than renderer.max_t5_tokens"),
    }

    def __init__(self, config: Config, resources: Resources) -> None:
        from rl.renderers.sd3.sd3_loop import SD3Loop, load_parts

        super().__init__(config, resources)
        device = resolve_device(config.device, resources.device)
        self.loop = SD3Loop(config, load_parts(config, device))

    def render(self, jobs: Iterable[RenderJob]) -> Iterator[tuple[int, Outcome]]:
        return self.loop.render(jobs)

    def take_metrics(self) -> dict[str, float]:
        return self.loop.take_metrics()

    @classmethod
    def problems(cls, config: Config, run: RunConfig) -> list[str]:
        return side_problems(config, PATCH_PX)

    @classmethod
    def no_effect(cls, config: Config) -> Iterable[str]:
        yield from super().no_effect(config)
        if config.guidance_scale == 1:
            yield from unread(config, "negative_prompt cfg_in_one_forward", "guidance_scale is 1")

    @classmethod
    def models(cls, config: Config) -> Sequence[ModelFiles]:
        """The pipeline's parts, those that `use_t5` leaves out apart."""

        def part(subfolder: str, *kinds: str, **more: Any) -> ModelFiles:
            return ModelFiles(
                "model_path",
                config.model_path,
                frozenset(kinds),
                subfolder=subfolder,
                revision=config.revision,
                **more,
            )

        def tokenizer(name: str) -> ModelFiles:
            return part(name, config="tokenizer_config.json", weights=())

        projecting = frozenset({"CLIPTextModelWithProjection"})
        found = [
            part("transformer", "SD3Transformer2DModel", weights=DIFFUSERS_SAFETENSORS),
            part("vae", "AutoencoderKL", weights=DIFFUSERS_SAFETENSORS),
            part("scheduler", config="scheduler_config.json", weights=()),
            part("text_encoder", "clip_text_model", classes=projecting),
            part("text_encoder_2", "clip_text_model", classes=projecting),
            tokenizer("tokenizer"),
            tokenizer("tokenizer_2"),
        ]
        third = [part("text_encoder_3", "t5"), tokenizer("tokenizer_3")]
        return [*found, *third] if config.use_t5 else found

    @classmethod
    def parameter_counts(cls, config: Config) -> dict[str, float]:
        """Parameters per resident part, for a memory plan.

        Known hub ids by table, a local folder by its safetensors headers; {} for an unknown hub id.
        """
        folder = Path(config.model_path)
        parts = ["transformer", *_ENCODERS, "vae"]
        if not config.use_t5:
            parts.remove("text_encoder_3")
        if folder.is_dir():
            return {part: num_parameters(folder / part) for part in parts}
        known = HUB_PARAMETERS.get(config.model_path)
        return {part: known[part] for part in parts} if known else {}

    @classmethod
    def activation_counts(cls, config: Config) -> dict[str, float]:
        """Values alive at the peak of a forward, per part, for a memory plan.

        About 20 tensors of [tokens, 1536] in the transformer, 8 feature maps of 128 channels in the
        VAE, one 1024^2 picture (or as many smaller ones) at once.
        """
        rows = config.batch_size * (
            2 if config.guidance_scale > 1 and config.cfg_in_one_forward else 1
        )
        area_px = config.height_px * config.width_px
        num_tokens = area_px / PATCH_PX**2 + TEXT_TOKENS_CLIP + config.max_t5_tokens
        decoded_px = max(area_px, min(config.batch_size * area_px, 1024 * 1024))
        return {"transformer": 20 * 1536 * rows * num_tokens, "vae": 8 * 128 * decoded_px}
