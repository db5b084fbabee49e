"""The reading and spelling half of a Qwen2.5-VL policy; no weights.

What: samples to prompts (template, resize, image processor, ids), rows to padded micro-batches, ids
to text and back. What not: the model. Called by `qwen2_5_vl.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rl.policies import _prompting
from rl.types import Prompt, PromptTemplate, Sample, TokenBatch, UnusableSampleError

if TYPE_CHECKING:
    from PIL.Image import Image

STOP_TOKENS = ("<|im_end|>", "<|endoftext|>")
MAX_ROUNDING_PX = 46
"""Two roundings, to multiples of 32 (a thin side may be lifted to 32) and of 28, lengthen a side by
less than this."""
THINNEST = 14.3
"""(width + height) / sqrt(area) at 200:1, beyond which the processor refuses a picture."""


class QwenPrompts:
    """A tokenizer and an image processor under one prompt template."""

    def __init__(
        self,
        tokenizer: Any,
        image_processor: Any,
        template: PromptTemplate,
        needs_picture: bool,
        max_prompt_tokens: int,
    ) -> None:
        """`needs_picture`: a sample without one is an error, not a text-only prompt."""
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self._template = template
        self._needs_picture = needs_picture
        self._max_prompt_tokens = max_prompt_tokens
        self._image_id = tokenizer.convert_tokens_to_ids(_prompting.IMAGE_TOKEN)

    def prompt(self, sample: Sample, words: str) -> Prompt:
        """`words` about the sample's picture. Raises ValueError naming the sample when a picture is
        missing or the prompt is too long."""
        template = self._template
        if self._needs_picture and sample.source is None:
            raise UnusableSampleError(
                f"sample {sample.id!r} has no source picture, but the renderer's prompt shows one"
            )
        if sample.source is None:
            template = PromptTemplate(template.text.replace("{image}", ""), template.drop_prefix)
        images: tuple[Image, ...] = ()
        inputs: dict[str, Any] = {}
        lengths: list[int] = []
        if sample.source is not None and "{image}" in template.text:
            images = (self._sized(sample.source),)
            inputs = dict(self.image_processor(images=list(images), return_tensors="pt"))
            lengths = [int(inputs["image_grid_thw"].prod()) // self.image_processor.merge_size**2]
        short_ids = _prompting.tokenize(self.tokenizer, template, words)
        token_ids = _prompting.expand_images(short_ids, self._image_id, lengths)
        if len(token_ids) > self._max_prompt_tokens:
            raise UnusableSampleError(
                f"the prompt of sample {sample.id!r} has {len(token_ids)} tokens "
                f"({sum(lengths)} of them picture), more than policy.max_prompt_tokens = "
                f"{self._max_prompt_tokens}: raise it, lower policy.image_max_pixels, or drop the "
                "sample"
            )
        return Prompt(
            sample=sample,
            token_ids=tuple(token_ids),
            engine_token_ids=tuple(short_ids),
            images=images,
            model_inputs=inputs,
            num_dropped_tokens=_prompting.num_prefix_tokens(self.tokenizer, template, token_ids),
        )

    def _sized(self, image: Image) -> Image:
        """The picture after BOTH resizes (the renderer's and the processor's), so that the
        trainer's and the sampler's processors, which resize differently, find nothing to do."""
        from PIL import Image as PILImage
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        image = image.convert("RGB")
        if self._template.image_area_px is not None:
            image = _prompting.resize_to_area(
                image, self._template.image_area_px, self._template.image_multiple_px
            )
        processor = self.image_processor
        height, width = smart_resize(
            image.height,
            image.width,
            factor=processor.patch_size * processor.merge_size,
            min_pixels=processor.size["shortest_edge"],
            max_pixels=processor.size["longest_edge"],
        )
        return image.resize((width, height), PILImage.Resampling(processor.resample))

    @property
    def picture_bounds(self) -> tuple[int, int]:
        """(smallest, largest) area of a prompt's picture, px: the processor's bounds, the upper one
        narrowed to what the template's area can become by rounding its sides."""
        size = self.image_processor.size
        smallest, largest = size["shortest_edge"], size["longest_edge"]
        if self._template.image_area_px is not None:
            area = max(smallest, self._template.image_area_px)
            sides = THINNEST * area**0.5
            largest = min(largest, int(area + MAX_ROUNDING_PX * sides + MAX_ROUNDING_PX**2))
        return smallest, largest

    def completion_ids(self, text: str) -> tuple[int, ...]:
        """`text` as the policy would have spelt it, and its stop token."""
        stop = self.tokenizer.convert_tokens_to_ids(STOP_TOKENS[0])
        return (*_prompting.plain_ids(self.tokenizer, text), stop)

    def text(self, token_ids: Sequence[int]) -> str:
        """Without special tokens and surrounding white space."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True).strip()

    def token_roles(self, vocab_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(stop ids, the turn's own end first; banned ids: the other specials and the vocabulary's
        unused tail, which no text decodes to)."""
        stops = tuple(self.tokenizer.convert_tokens_to_ids(list(STOP_TOKENS)))
        added = self.tokenizer.added_tokens_decoder.items()
        specials = {token_id for token_id, token in added if token.special}
        unused = set(range(len(self.tokenizer), vocab_size))
        return stops, tuple(sorted((specials | unused) - set(stops)))

    def collate(self, rows: Sequence[tuple[Prompt, Sequence[int]]], device: str) -> TokenBatch:
        """Right-padded rows on `device`. A picture shared by several rows (a group) is there once;
        `image_index` says which row looks at which."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        ids_B = [torch.tensor([*prompt.token_ids, *ids]) for prompt, ids in rows]
        pad_id = self.tokenizer.pad_token_id
        input_ids = pad_sequence(ids_B, batch_first=True, padding_value=pad_id)
        mask = pad_sequence([torch.ones_like(ids) for ids in ids_B], batch_first=True)
        inputs = {"mm_token_type_ids": ((input_ids == self._image_id) & mask.bool()).long()}
        pictured = [prompt for prompt, _ in rows if prompt.images]
        if pictured:
            unique = list({id(prompt): prompt for prompt in pictured}.values())
            place = {id(prompt): i for i, prompt in enumerate(unique)}
            for name in ("pixel_values", "image_grid_thw"):
                inputs[name] = torch.cat([prompt.model_inputs[name] for prompt in unique])
            inputs["image_index"] = torch.tensor([place[id(prompt)] for prompt in pictured])
        return TokenBatch(
            input_ids=input_ids.to(device),
            attention_mask=mask.to(device),
            prompt_lens=torch.tensor([len(p.token_ids) for p, _ in rows], device=device),
            completion_lens=torch.tensor([len(ids) for _, ids in rows], device=device),
            model_inputs={name: tensor.to(device) for name, tensor in inputs.items()},
        )
