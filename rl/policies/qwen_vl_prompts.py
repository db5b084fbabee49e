"""Qwen-VL's prompts, pictures and files; thoughts; rows of which no prompt can be built."""

from __future__ import annotations

import math
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal
from weakref import WeakKeyDictionary

from cachetools import LRUCache, cachedmethod
from pydantic import Field

from rl.api.policy import NO_STATES, ThoughtSection
from rl.api.types import (
    NO_MARKER,
    UNFINISHED_THOUGHT,
    Action,
    Completion,
    Prompt,
    PromptTemplate,
    Row,
    Sample,
    UnusableSampleError,
)
from rl.config.schema import MAX_COUNT, AtLeast1
from rl.files import MAX_SIDE_SUM, digest, over_white, size_of_area
from rl.policies import prompting
from rl.policies.policy_base import TrainedPolicyConfig, folder_here, load_tokenizer
from rl.progress import weights_counted
from rl.ranks.dist import calls_in_step

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL.Image import Image

# ---- qwen vl thought -----------------------------------------------------------------------------
# Asks for a thought in the prompt, and splits a completion into its thought and its words.
#
# Axes: `_B` rows of a micro-batch, `_T` tokens of a completion.

NO_WORDS = "empty: the completion holds no words"


class Thinking:
    """Handles one policy's thoughts. Without `policy.thought`, everything it writes is words."""

    def __init__(self, prompts: QwenPrompts, section: ThoughtSection | None) -> None:
        """Raises ValueError for a marker that changes when the tokenizer encodes and decodes it: no
        completion would match it."""
        self._prompts = prompts
        self._section = section
        self._request_ids: list[int] = []
        self._marker_ids: list[int] = []
        after = prompts.template.text.partition("{instruction}")[2]
        self._ids_after = prompting.ids_of(prompts.tokenizer, after)
        """Ids of the template's text behind the instruction."""
        if section is None:
            return
        self._marker_ids = prompting.ids_of(prompts.tokenizer, section.marker)
        if section.instruction:
            request = "\n" + section.instruction.replace("{marker}", section.marker)
            self._request_ids = prompting.ids_of(prompts.tokenizer, request)
        decoded = self._decoded(self._marker_ids)
        if decoded != section.marker:
            raise ValueError(
                f"policy.thought.marker: {section.marker!r} is read back as {decoded!r} by the "
                "tokenizer in policy.model_path: it is a special token, or has characters that the "
                "tokenizer normalises; give a marker that it keeps, such as 'Answer:'"
            )

    def prompt_to_sample(self, plain: Prompt) -> Prompt:
        """The prompt to sample from: `plain` with the request to think inserted after the
        instruction. Raises UnusableSampleError if it is too long, and ValueError if the tokenizer
        merges the instruction with what follows."""
        if self._section is None:
            return plain
        end = len(plain.token_ids) - len(self._ids_after)
        if list(plain.token_ids[end:]) != self._ids_after:
            raise ValueError(
                "policy.thought: the tokenizer merges the instruction with what the prompt "
                "template has behind it; begin that with a special token"
            )
        ids = (*plain.token_ids[:end], *self._request_ids, *plain.token_ids[end:])
        length = len(ids) + len(self._marker_ids)  # as in `cut_short`
        limit = self._prompts.max_prompt_tokens
        if length > limit:
            raise UnusableSampleError(
                f"the prompt of sample {plain.sample.id!r} has {length} tokens with "
                f"policy.thought.instruction and its marker ({length - len(plain.token_ids)} of "
                f"them), more than policy.max_prompt_tokens = {limit}: raise it, shorten the "
                "instruction, or drop the sample"
            )
        return replace(plain, token_ids=ids, without_thought=plain)

    def cut_short(self, prompt: Prompt) -> Prompt | None:
        """A prompt that asks for a thought, with the marker appended: the policy then writes only
        words. None for a prompt that asks for no thought."""
        if prompt.without_thought is None:
            return None
        return replace(prompt.plain, token_ids=(*prompt.token_ids, *self._marker_ids))

    def words_of_cut(self, completion: Completion) -> Completion:
        """The words in a completion of `cut_short`'s prompt; log-probs 0, meaningless."""
        ids = self._words_after(completion.token_ids, 0)[1]
        return replace(completion, token_ids=ids, logprobs=(0.0,) * len(ids))

    def read(self, prompt: Prompt, ids: Sequence[int]) -> Action:
        """Parse a completion; empty `ids` stand for the instruction. If the prompt asks for no
        thought, the completion has none, even if it contains the marker. The action has no payload
        yet; its `drawn_from` are the ids of the words and the stop token (`_words_after`)."""
        if self._section is not None and prompt.without_thought is not None:
            return self.split(ids, self._section)
        text = self._decoded(ids).strip() if ids else prompt.sample.instruction
        return Action(text, None, None if text else NO_WORDS, drawn_from=tuple(ids))

    def split(self, ids: Sequence[int], section: ThoughtSection) -> Action:
        """Split a completion at the last marker, which is searched in the decoded text, because it
        may end inside a token ('</think>' and two line breaks are three tokens of Qwen2.5's, the
        last of them '>' with the breaks)."""
        decoded = self._decoded(ids)
        text, marker = decoded.strip(), section.marker
        marker_start = decoded.rfind(marker)
        if marker_start >= 0:
            end = marker_start + len(marker)
            num_before, word_ids = self._words_after(ids, end)
            words = decoded[end:].strip()
            failure = None if words else "empty: no words behind the thought"
            thought = text.removesuffix(words) if words else text
            return Action(text, None, failure, thought, num_before, word_ids)
        if section.without_marker == "words":
            return Action(text, None, None if text else NO_WORDS, drawn_from=tuple(ids))
        if not text:
            failure = NO_WORDS
        elif ids[-1] in self._prompts.stop_ids:
            failure = f"{NO_MARKER}: the completion ends without {marker!r} (policy.thought.marker)"
        else:
            failure = (
                f"{UNFINISHED_THOUGHT}: cut off at {len(ids)} tokens without {marker!r} "
                "(sampling.max_completion_tokens)"
            )
        return Action(text, None, failure, text, len(ids), ())

    def _words_after(self, ids: Sequence[int], end: int) -> tuple[int, tuple[int, ...]]:
        """(number of tokens before the first one that holds part of the words, ids of the words),
        where the words start after the first `end` characters and white space. If they start inside
        a token, the part up to its end is tokenized again, so that the same words have the same
        ids after any thought."""
        decoded = self._decoded(ids)
        words = decoded[end:].lstrip()
        before = decoded.removesuffix(words)
        # The fewest tokens whose text begins with `before`.
        lengths = range(len(ids) + 1)
        low = bisect_left(
            lengths, True, key=lambda length: self._decoded(ids[:length]).startswith(before)
        )
        if self._decoded(ids[:low]) == before:
            return low, tuple(ids[low:])
        # Ids that start inside a multi-token character do not decode to a suffix of `words`.
        after = next(n for n in range(low, len(ids) + 1) if words.endswith(self._decoded(ids[n:])))
        beginning = words.removesuffix(self._decoded(ids[after:]))
        retokenized = prompting.plain_ids(self._prompts.tokenizer, beginning)
        # The token before `low` holds the border.
        return low - 1, (*retokenized, *ids[after:])

    def _decoded(self, ids: Sequence[int]) -> str:
        text: str = self._prompts.tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    @property
    def reads_again(self) -> bool:
        """Whether the policy encodes the words again without the thought, for the renderer."""
        return self._section is not None

    def words_alone(self, rows: Sequence[Row]) -> tuple[list[Row], list[int]]:
        """(rows of each group's distinct words after its plain prompt, [B] each row's index into
        them). A row without words becomes its plain prompt with an empty completion."""
        words_B: list[Row] = [
            (prompt.plain, self.read(prompt, ids).drawn_from or ()) for prompt, ids in rows
        ]
        index_of = {row: index for index, row in enumerate(dict.fromkeys(words_B))}
        return list(index_of), [index_of[row] for row in words_B]


# ---- qwen vl pictures ----------------------------------------------------------------------------
# The vision tower's features of pictures; a frozen tower encodes each picture only once.
#
# Axes: `N_img` image tokens of a picture, `W` values of a token's features.

MAX_KEPT_PICTURES = 64
"""Entries of each of two caches on the device: features of pictures (while the vision tower is
frozen), and embeddings of negative prompts. A picture of 1024 x 1024 px takes about 10 MB (34 MB in
Qwen3-VL 8B). If a rank has more prompts than this in an iteration, their pictures are encoded
again."""


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture of a prompt, on the CPU."""

    key: bytes
    """A content hash: equal exactly for equal pictures."""
    pixel_values: torch.Tensor
    """[patches, C] float32, as transformers' image processor gives them."""
    grid: torch.Tensor
    """[1, 3] int64: frames, rows and columns of patches."""


class Tower:
    """Converts between the output of transformers' vision tower and features per picture, for
    Qwen2.5-VL; other families override it."""

    linear_layers: ClassVar[Set[str]] = frozenset({"qkv", "proj"})
    """Names of the tower's linear layers; `lora` may name them if the tower is trained."""

    def geometry(self, grid: torch.Tensor, visual: Any) -> Mapping[str, torch.Tensor]:
        """What transformers' `visual` derives from `grid` [n, 3], under its names, on the CPU: from
        a grid on the GPU each of its layers would make the host wait."""
        from transformers import vision_utils

        window_index, cu_window_seqlens = vision_utils.get_vision_window_index(
            grid,
            spatial_merge_size=visual.spatial_merge_size,
            window_size=visual.window_size,
            patch_size=visual.patch_size,
        )
        positions = vision_utils.get_vision_position_ids(grid, visual.spatial_merge_size)
        return {
            "position_ids": positions,
            "window_index": window_index,
            "cu_window_seqlens": cu_window_seqlens,
        }

    def features(self, encoded: Any) -> Sequence[torch.Tensor]:
        """[N_img, W] of each picture, from the tower's output for all pictures; W as in an
        inference engine's tower."""
        pictures: Sequence[torch.Tensor] = encoded.pooler_output
        return pictures

    def encoded(self, features: Sequence[torch.Tensor], config: Any) -> Any:
        """The inverse of `features`: the tower output that transformers' model accepts instead of
        pictures. `config`: the tower's."""
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        return BaseModelOutputWithPooling(pooler_output=tuple(features))


class PictureFeatures:
    """The features of one vision tower; while it is frozen, those of the last pictures are kept."""

    def __init__(self, tower: Tower, trained: bool) -> None:
        """`trained`: whether any weight of the tower is trained. Stated once, because inside
        `Policy.reference` the adapter looks frozen."""
        self._tower = tower
        self._trained = trained
        self._kept: LRUCache[bytes, torch.Tensor] = LRUCache(MAX_KEPT_PICTURES)

    def of(self, pictures: Sequence[Picture], vl_model: Any) -> list[torch.Tensor] | None:
        """Each picture's [N_img, W] features; None if there are no features.

        A frozen tower encodes each missing picture alone: in a batch its last bits could differ,
        and a resumed run, which has other pictures cached, would not be exact. Under ZeRO-3 each
        call gathers weights from all ranks, so a rank that misses fewer pictures encodes blanks. A
        trained tower encodes all of them together and always runs: in ZeRO-2 the backward has to
        reach the same parameters on all ranks.
        """
        visual = vl_model.model.visual
        picture_of = {picture.key: picture for picture in pictures}
        features_of = {key: self._kept[key] for key in picture_of if key in self._kept}
        missing = [picture for key, picture in picture_of.items() if key not in features_of]
        blank = _blank(visual)
        if self._trained:
            batches = [missing or [blank]]
        else:
            num_blanks = calls_in_step(len(missing), visual) - len(missing)
            batches = [[picture] for picture in [*missing, *[blank] * num_blanks]]
        for batch in batches:
            encoded = self._encode(batch, vl_model)
            features_of |= zip((picture.key for picture in batch), encoded, strict=True)
        of_blank = features_of.pop(blank.key, None)
        if self._trained and of_blank is not None:
            return [of_blank[:0]]  # no feature is used, but the backward reaches the tower
        if not self._trained:
            self._kept.update(features_of)
        return [features_of[picture.key] for picture in pictures] or None

    def _encode(self, pictures: Sequence[Picture], vl_model: Any) -> list[torch.Tensor]:
        import torch

        device = vl_model.device
        pixel_values = torch.cat([picture.pixel_values for picture in pictures])
        pixel_values = pixel_values.to(device, non_blocking=True)
        grid = torch.cat([picture.grid for picture in pictures])
        geometry = {
            # Lengths of attention's runs are read on the host.
            f"image_{name}": value if "seqlens" in name else value.to(device, non_blocking=True)
            for name, value in self._tower.geometry(grid, vl_model.model.visual).items()
        }
        with torch.set_grad_enabled(self._trained and torch.is_grad_enabled()):
            encode = vl_model.model.get_image_features
            encoded = encode(pixel_values, grid, return_dict=True, **geometry)
            return list(self._tower.features(encoded))


def _blank(visual: Any) -> Picture:
    """The smallest possible picture, all zeros."""
    import torch

    side, embed = visual.spatial_merge_size, visual.patch_embed
    num_values = embed.in_channels * embed.temporal_patch_size * embed.patch_size**2
    grid = torch.tensor([[1, side, side]])
    return Picture(b"", torch.zeros(side * side, num_values), grid)


# ---- qwen vl loading -----------------------------------------------------------------------------
# The keys of the Qwen-VL policies; loads their weights, tokenizer and image processor.

FILES = (("tokenizer.json", "vocab.json"), ("preprocessor_config.json", "processor_config.json"))
"""Kinds of files; each model has one file of each: tokenizer, image processor."""

TEXT_ENCODER = "text_encoder"
"""Subfolder of an editor's text encoder."""


class Config(TrainedPolicyConfig):
    """The policy section."""

    model_path: str
    """Folder or hub id: tokenizer, image processor and (usually) weights."""
    init_text_encoder_from: str = ""
    """Folder or hub id of an editor whose own text encoder gives the weights; '' = model_path's."""
    freeze_vision_tower: bool = True
    """False: also train the vision tower (full), or adapt those of its layers that `lora` names."""
    system_prompt: str = "You are a helpful assistant."
    """For renderers that bring no template of their own; '' = no system turn."""
    conditioning: Annotated[Literal["policy", "base"], NO_STATES] = "policy"
    """Weights that make the renderer's hidden states: 'policy', the trained ones (the same forward
    gives the old log-probs), or 'base', the untrained ones (the renderer sees no drifted state)."""
    image_min_pixels: AtLeast1 | None = None
    """Smallest picture area the model sees, px; null = the processor's own."""
    image_max_pixels: Annotated[int, Field(ge=28 * 28, le=MAX_COUNT)] | None = None
    """Largest picture area the model sees, px; null = the processor's own."""


def load_image_processor(config: Config) -> Any:
    """The PIL image processor: needs no torchvision, and gives equal pixels on all machines."""
    from transformers import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil.from_pretrained(
        config.model_path, revision=config.revision
    )
    if config.image_min_pixels is not None:
        processor.size["shortest_edge"] = config.image_min_pixels
    if config.image_max_pixels is not None:
        processor.size["longest_edge"] = config.image_max_pixels
    least_px, most_px = processor.size["shortest_edge"], processor.size["longest_edge"]
    if most_px < least_px:
        raise ValueError(
            f"policy.image_max_pixels: {most_px}, below the smallest area, {least_px} (that of "
            "policy.image_min_pixels, or the processor's own): raise it, or lower "
            "policy.image_min_pixels"
        )
    return processor


def load_model(config: Config) -> Any:
    """The `...ForConditionalGeneration` that its files name, on the CPU, in the configured dtype,
    without an adapter."""
    import torch
    from transformers import AutoModelForImageTextToText

    from rl.policies.attention import register

    source: dict[str, Any] = {"revision": config.revision}
    path = config.model_path
    if config.init_text_encoder_from:
        path = config.init_text_encoder_from
        source = {"subfolder": TEXT_ENCODER}
    with weights_counted():
        return AutoModelForImageTextToText.from_pretrained(  # nosec B615 # its `revision`
            path,
            dtype=getattr(torch, config.dtype),
            attn_implementation={"text_config": register(), "vision_config": "sdpa"},
            trust_remote_code=False,
            **source,
        )


# ---- qwen vl prompts -----------------------------------------------------------------------------
# Converts a Qwen-VL's prompts and completions to and from token ids, without weights.

STOP_TOKENS = ["<|im_end|>", "<|endoftext|>"]
MAX_RESIZES = 20
"""A size that changes after so many resizes never settles; the thinnest pictures need six."""


def no_picture(sample: Sample) -> UnusableSampleError:
    return UnusableSampleError(
        f"sample {sample.id!r} has no source picture, but the prompt template has one; give it "
        "one, or leave it out"
    )


class QwenPrompts:
    """Builds prompts from one template, with a tokenizer and an image processor."""

    def __init__(
        self, tokenizer: Any, image_processor: Any, template: PromptTemplate, max_prompt_tokens: int
    ) -> None:
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.template = template
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

        has_picture = "{image}" in self.template.text
        max_pictures = self.template.max_pictures
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
        if "{image}" not in self.template.text:
            sizes = ()
        if self.template.needs_picture and not sizes:
            raise no_picture(sample)
        try:
            lengths = [self._num_tokens(self._final_size(*size)) for size in sizes]
        except ValueError as error:
            given = ", ".join(f"{width}x{height}" for width, height in sizes)
            raise UnusableSampleError(
                f"sample {sample.id!r}: the image processor refuses a source picture ({given} px): "
                f"{error}; crop it, or drop the sample"
            ) from error
        return self._tokenized(sample, instruction, lengths, self.max_prompt_tokens)

    def picture_places(self, prompt: Prompt) -> tuple[range, ...]:
        """Where each picture's tokens are in the hidden states that the renderer reads."""
        kept = prompt.token_ids[prompt.num_dropped_tokens :]
        slots = [index for index, token in enumerate(kept) if token == self._image_id]
        ranges, start = [], 0
        for image in prompt.images:
            length = self._num_tokens(image.size)
            ranges.append(range(slots[start], slots[start] + length))
            start += length
        return tuple(ranges)

    def _num_tokens(self, size: tuple[int, int]) -> int:
        """Number of tokens of a picture that has its final size."""
        return math.prod(size) // self._token_px**2

    def with_instruction(self, prompt: Prompt, instruction: str) -> Prompt:
        """The same prompt with another instruction, of any length, whose pictures are not processed
        again."""
        lengths = [self._num_tokens(image.size) for image in prompt.images]
        bare = self._tokenized(prompt.sample, instruction, lengths, math.inf)
        return replace(bare, images=prompt.images, model_inputs=prompt.model_inputs)

    def _tokenized(
        self, sample: Sample, instruction: str, lengths: Sequence[int], limit: float
    ) -> Prompt:
        """The prompt with pictures of these numbers of tokens, but without the pictures."""
        template = prompting.for_pictures(self.template, len(lengths))
        short_ids = prompting.tokenize(self.tokenizer, template, instruction)
        token_ids = prompting.expand_images(short_ids, self._image_id, lengths)
        if len(token_ids) > limit:
            has_area = self.template.image_area_px is not None
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

        if self.template.image_area_px is not None:
            width, height = size_of_area(
                width, height, self.template.image_area_px, self.template.image_multiple_px
            )
        size, bounds = (height, width), self.image_processor.size
        least_px, most_px = bounds["shortest_edge"], bounds["longest_edge"]
        # The processor may shrink its own result of a thin picture again.
        for _ in range(MAX_RESIZES):
            before, size = size, smart_resize(*size, self._token_px, least_px, most_px)
            if size == before:
                return size[1], size[0]
        raise ValueError(
            f"no multiple of {self._token_px} px has an area between policy.image_min_pixels "
            f"({least_px}) and policy.image_max_pixels ({most_px}) at its ratio of sides"
        )

    def _sized(self, image: Image) -> Image:
        """The picture after both resizes, so that the trainer's and the engine's processors, which
        resize differently, do not resize it."""
        from PIL import Image as PILImage

        size = self._final_size(*image.size)
        # Treat every form of transparency as in the picture that the VAE gets.
        image = image.convert("RGBA" if image.has_transparency_data else "RGB")
        if (area := self.template.image_area_px) is not None:  # as in diffusers' pipelines
            area_size = size_of_area(*image.size, area, self.template.image_multiple_px)
            image = image.resize(area_size, PILImage.Resampling.LANCZOS)
        image = over_white(image)  # after the resize, which needs the transparency at edges
        return image.resize(size, PILImage.Resampling(self.image_processor.resample))

    @property
    def picture_bounds(self) -> tuple[int, int]:
        """(smallest, largest) area of a prompt's picture, px: the processor's bounds. With a
        template's area, the upper one is at most that area plus the rounding of the sides."""
        size = self.image_processor.size
        smallest, largest = size["shortest_edge"], size["longest_edge"]
        if (area := self.template.image_area_px) is not None:
            # The template may round a thin side up to a whole multiple; the processor's rounding
            # adds at most half a token's side.
            added_px = self.template.image_multiple_px + self._token_px // 2
            area = max(smallest, area)
            rounded = int(area + added_px * MAX_SIDE_SUM * area**0.5 + added_px**2)
            largest = min(largest, rounded)
        return smallest, largest

    def completion_ids(self, text: str) -> tuple[int, ...]:
        """Ids of `text` and the stop token, as the policy would have written them."""
        return (*prompting.plain_ids(self.tokenizer, text), self.stop_ids[0])

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

    @cachedmethod(lambda self: self._picture_keys, lambda self, prompt: prompt)
    def picture_keys(self, prompt: Prompt) -> tuple[bytes, ...]:
        """A content hash of each picture of `prompt`: two data sets may use the same id for
        different pictures, and one picture may come with several instructions."""
        return tuple(map(digest, prompt.images))


def load_prompts(config: Config, template: PromptTemplate) -> QwenPrompts:
    """Raises OSError naming a file that is missing."""
    tokenizer, image_processor = load_tokenizer(config), load_image_processor(config)
    return QwenPrompts(tokenizer, image_processor, template, config.max_prompt_tokens)


# ---- qwen vl row check ---------------------------------------------------------------------------
# Tells before a Qwen-VL's weights are loaded which rows it could build no prompt for.

MAX_SAFE_RATIO = 100
"""Largest ratio of a picture's sides that no rounding brings to the processor's limit of 200."""
MAX_MIN_PX = 2**16
"""The largest minimal area of a published image processor, px: Qwen3-VL's."""
MARGIN = 16
"""Tokens by which a text may grow where the template and the instruction meet."""
_SPECIAL = re.compile(r"<\|\w+\|>")


class QwenRowCheck:
    """A `RowCheck`. It builds a prompt, which imports transformers and torch (400 MB), only for
    rows that may be too long by a faster rule: a token has at least one byte."""

    def __init__(self, config: Config, template: PromptTemplate | None, slot_px: int) -> None:
        """`slot_px`: side of the square of pixels that becomes one image token."""
        self._config = config
        self._template = template or prompting.chat_template(config.system_prompt)
        self._slot_px = slot_px

    def __call__(
        self,
        identity: str,
        instruction: str,
        sizes: Sequence[tuple[int, int] | None],
        codes: np.ndarray | None,
    ) -> bool:
        if self._template.needs_picture and not sizes:
            raise no_picture(Sample(identity, instruction))
        # NFC, as Qwen's tokenizer does.
        text = unicodedata.normalize("NFC", instruction) + self._text(len(sizes))
        most = len(text.encode()) + sum(map(self._most_tokens, sizes)) + MARGIN
        if most <= self._config.max_prompt_tokens:
            return True
        known = [size for size in sizes if size is not None]
        if self._builder is None or len(known) < len(sizes):
            return False
        prompts, thinking = self._builder
        sample = Sample(identity, instruction)
        thinking.prompt_to_sample(prompts.without_pictures(sample, instruction, known))
        return True

    def _text(self, num_pictures: int) -> str:
        """All text of a prompt but its instruction, with a character for each special token."""
        thought = self._config.thought
        request = thought.instruction.replace("{marker}", thought.marker) if thought else ""
        words = [request, thought.marker] if thought else []
        template = prompting.for_pictures(self._template, num_pictures)
        return _SPECIAL.sub(" ", " ".join([template.text, *words]))

    def _most_tokens(self, size: tuple[int, int] | None) -> float:
        """Upper limit of the tokens of a picture."""
        most_px = self._config.image_max_pixels or math.inf
        if size is not None and max(size) > MAX_SAFE_RATIO * min(size):
            return math.inf
        if size is not None:
            if (area := self._template.image_area_px) is not None:
                size = size_of_area(*size, area, self._template.image_multiple_px)
            least_px = self._config.image_min_pixels or MAX_MIN_PX
            scale = max(1.0, math.sqrt(least_px / math.prod(size)))
            most_px = min(most_px, math.prod(side * scale + self._slot_px for side in size))
        return most_px // self._slot_px**2 if most_px < math.inf else math.inf

    @cached_property
    def _builder(self) -> tuple[QwenPrompts, Thinking] | None:
        """What builds the prompts in a run; None if its files or packages are not here. Raises
        ValueError for a config with which no run can build any."""
        folder = folder_here(self._config.model_path, self._config.revision, FILES)
        if folder is None:
            return None
        here = self._config.model_copy(update={"model_path": str(folder), "revision": None})
        try:
            prompts = load_prompts(here, self._template)
        except (ImportError, OSError):
            return None
        return prompts, Thinking(prompts, here.thought)
