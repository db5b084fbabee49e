"""Converts a Qwen-VL's prompts and completions to and from token ids, without weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from rl.api.types import Prompt, PromptTemplate, Sample, UnusableSampleError
from rl.policies.qwen_vl.qwen_vl_pictures import Picture
from rl.policies.shared import prompting

if TYPE_CHECKING:
    from PIL.Image import Image

STOP_TOKENS = ["<|im_end|>", "<|endoftext|>"]
MAX_SIDE_SUM = 14.3
"""(width + height) / sqrt(area) at an aspect of 200:1, the processor's limit."""


def after_rounding(area_px: int, added_px: int) -> int:
    """Upper limit of the area of a picture of `area_px`, of a shape that the processor accepts,
    after rounding adds up to `added_px` to each side. The template may round a thin side up to a
    whole multiple; the processor's rounding adds at most half a token's side."""
    return int(area_px + added_px * MAX_SIDE_SUM * area_px**0.5 + added_px**2)


def no_picture(sample: Sample) -> UnusableSampleError:
    return UnusableSampleError(
        f"sample {sample.id!r} has no source picture, but the prompt template has one; give it "
        "one, or leave it out"
    )


class QwenPrompts:
    """Builds prompts from one template, with a tokenizer and an image processor."""

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
        self.max_prompt_tokens = max_prompt_tokens
        self.stop_ids: tuple[int, ...] = tuple(tokenizer.convert_tokens_to_ids(STOP_TOKENS))
        """The first one ends the turn."""
        self._image_id = tokenizer.convert_tokens_to_ids(prompting.IMAGE_TOKEN)
        self._picture_keys: WeakKeyDictionary[Prompt, tuple[bytes, ...]] = WeakKeyDictionary()

    def prompt(self, sample: Sample, instruction: str) -> Prompt:
        """The prompt with `instruction` and the sample's pictures. Raises UnusableSampleError, with
        the sample's id, for a missing or unusable picture, for too many pictures, and for too long
        a prompt."""
        import torch

        has_picture = "{image}" in self._template.text
        max_pictures = self._template.max_pictures
        sources = prompting.sources_of(sample, max_pictures) if has_picture else ()
        bare = self.without_pictures(sample, instruction, [source.size for source in sources])
        images = tuple(map(self._sized, sources))
        # One call per picture: `pixel_values` [patches of all, C] and `image_grid_thw` [n, 3].
        processed = [self.image_processor(images=[image], return_tensors="pt") for image in images]
        names = processed[0] if processed else ()
        inputs = {name: torch.cat([features[name] for features in processed]) for name in names}
        return replace(bare, images=images, model_inputs=inputs)

    def without_pictures(
        self, sample: Sample, instruction: str, sizes: Sequence[tuple[int, int]]
    ) -> Prompt:
        """The prompt with the tokens of pictures of these sizes, (width, height) in px, but without
        the pictures. Raises UnusableSampleError as `prompt` does."""
        if "{image}" not in self._template.text:
            sizes = ()
        if self._needs_picture and not sizes:
            raise no_picture(sample)
        try:
            final_sizes = [self._final_size(*size) for size in sizes]
        except ValueError as error:
            given = ", ".join(f"{width}x{height}" for width, height in sizes)
            raise UnusableSampleError(
                f"sample {sample.id!r}: the image processor refuses a source picture ({given} px): "
                f"{error}; crop it, or drop the sample"
            ) from error
        lengths = [width * height // self._token_px**2 for width, height in final_sizes]
        return self._tokenized(sample, instruction, lengths, self.max_prompt_tokens)

    def picture_places(self, prompt: Prompt) -> tuple[range, ...]:
        """Where each picture's tokens are in the hidden states that the renderer reads."""
        kept = prompt.token_ids[prompt.num_dropped_tokens :]
        slots = [index for index, token in enumerate(kept) if token == self._image_id]
        ranges, start = [], 0
        for length in self._lengths(prompt.model_inputs if prompt.images else {}):
            ranges.append(range(slots[start], slots[start] + length))
            start += length
        return tuple(ranges)

    def _lengths(self, inputs: Mapping[str, Any]) -> list[int]:
        """Number of tokens of each picture in these `model_inputs`."""
        merged = self.image_processor.merge_size**2
        grids = inputs["image_grid_thw"].tolist() if inputs else []
        return [math.prod(grid) // merged for grid in grids]

    def with_instruction(self, prompt: Prompt, instruction: str) -> Prompt:
        """The same prompt with another instruction, of any length, whose pictures are not processed
        again."""
        lengths = self._lengths(prompt.model_inputs if prompt.images else {})
        bare = self._tokenized(prompt.sample, instruction, lengths, math.inf)
        return replace(bare, images=prompt.images, model_inputs=prompt.model_inputs)

    def _tokenized(
        self, sample: Sample, instruction: str, lengths: Sequence[int], limit: float
    ) -> Prompt:
        """The prompt with pictures of these numbers of tokens, but without the pictures."""
        template = prompting.for_pictures(self._template, len(lengths))
        short_ids = prompting.tokenize(self.tokenizer, template, instruction)
        token_ids = prompting.expand_images(short_ids, self._image_id, lengths)
        if len(token_ids) > limit:
            has_area = self._template.image_area_px is not None
            area = "renderer.policy_image_area_px" if has_area else "policy.image_max_pixels"
            raise UnusableSampleError(
                f"the prompt of sample {sample.id!r} has {len(token_ids)} tokens "
                f"({sum(lengths)} of them for pictures), more than policy.max_prompt_tokens = "
                f"{limit}: raise it, lower {area}, or drop the sample"
            )
        return Prompt(
            sample=sample,
            token_ids=tuple(token_ids),
            num_dropped_tokens=prompting.num_prefix_tokens(self.tokenizer, template, token_ids),
        )

    @property
    def _token_px(self) -> int:
        """Side of the square of pixels that becomes one image token."""
        return int(self.image_processor.patch_size * self.image_processor.merge_size)

    def _final_size(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) in px after BOTH resizes, the renderer's and the processor's. Raises
        ValueError for a picture that the processor refuses."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        if self._template.image_area_px is not None:
            width, height = prompting.size_of_area(
                width, height, self._template.image_area_px, self._template.image_multiple_px
            )
        size, before = (height, width), (0, 0)
        while size != before:  # of a thin picture, the processor shortens its own result again
            before = size
            size = smart_resize(
                *size,
                factor=self._token_px,
                min_pixels=self.image_processor.size["shortest_edge"],
                max_pixels=self.image_processor.size["longest_edge"],
            )
        return size[1], size[0]

    def _sized(self, image: Image) -> Image:
        """The picture after both resizes, so that the trainer's and the engine's processors, which
        resize differently, do not resize it."""
        from PIL import Image as PILImage

        from rl.files import over_white

        size = self._final_size(*image.size)
        # Treat every form of transparency as in the picture that the VAE gets.
        image = image.convert("RGBA" if image.has_transparency_data else "RGB")
        if self._template.image_area_px is not None:
            image = prompting.resize_to_area(
                image, self._template.image_area_px, self._template.image_multiple_px
            )
        image = over_white(image)  # after the resize, which needs the transparency at edges
        return image.resize(size, PILImage.Resampling(self.image_processor.resample))

    @property
    def picture_bounds(self) -> tuple[int, int]:
        """(smallest, largest) area of a prompt's picture, px: the processor's bounds; the upper one
        is lower if the template's area, after all rounding of the sides, stays below it."""
        size = self.image_processor.size
        smallest, largest = size["shortest_edge"], size["longest_edge"]
        if (area := self._template.image_area_px) is not None:
            multiple = self._template.image_multiple_px
            area = max(smallest, area)
            largest = min(largest, after_rounding(area, multiple + self._token_px // 2))
        return smallest, largest

    def num_tokens_after(self, prompt: Prompt) -> int:
        """Number of tokens of `prompt` after the instruction."""
        return prompting.num_suffix_tokens(self.tokenizer, self._template, prompt.token_ids)

    def completion_ids(self, text: str) -> tuple[int, ...]:
        """Ids of `text` and the stop token, as the policy would have written them."""
        return (*prompting.plain_ids(self.tokenizer, text), self.stop_ids[0])

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode without special tokens and surrounding white space."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True).strip()

    def pictures(self, prompts: Sequence[Prompt]) -> list[Picture]:
        """All pictures of the prompts, in order."""
        pictures = []
        for prompt in prompts:
            if not prompt.images:
                continue
            grids = prompt.model_inputs["image_grid_thw"].split(1)
            patches = [int(grid.prod()) for grid in grids]
            pixels = prompt.model_inputs["pixel_values"].split(patches)
            parts_of_each = zip(self.picture_keys(prompt), pixels, grids, strict=True)
            pictures += [Picture(*parts) for parts in parts_of_each]
        return pictures

    def picture_keys(self, prompt: Prompt) -> tuple[bytes, ...]:
        """A content hash of each picture of `prompt`: two data sets may use the same id for
        different pictures, and one picture may come with several instructions."""
        from rl.files import digest

        if prompt not in self._picture_keys:
            self._picture_keys[prompt] = tuple(map(digest, prompt.images))
        return self._picture_keys[prompt]
