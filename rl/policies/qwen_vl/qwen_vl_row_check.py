"""Tells before a Qwen-VL's weights are loaded which rows it could build no prompt for."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.api.types import PromptTemplate, Sample, UnusableSampleError
from rl.files import read_object
from rl.policies.qwen_vl.qwen_vl_loading import FILES, Config, load_image_processor, load_tokenizer
from rl.policies.qwen_vl.qwen_vl_prompts import QwenPrompts, after_rounding, no_picture
from rl.policies.qwen_vl.qwen_vl_thought import Thinking
from rl.policies.shared import prompting
from rl.policies.shared.model_loading import folder_here

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

MAX_SAFE_RATIO = 100
"""Largest ratio of a picture's sides that no rounding brings to the processor's limit of 200."""
MIN_PX = 2**16
"""The largest minimal area of a published image processor, Qwen3-VL's."""
MARGIN = 16
"""Tokens by which a text may grow where the template and the instruction meet."""
_SPECIAL = re.compile(r"<\|\w+\|>")


class QwenRowCheck:
    """A `RowCheck`. A prompt is built, which imports transformers, torch and their 400 MB, for rows
    alone that may be too long by two faster rules: a token has at least one byte; the file of the
    tokenizer counts the tokens of a text."""

    def __init__(self, config: Config, template: PromptTemplate | None, slot_px: int) -> None:
        """`slot_px`: side of the square of pixels that becomes one image token, where the image
        processor's file is not here."""
        self._config = config
        self._template = template or prompting.chat_template(config.system_prompt)
        self._needs_picture = template is not None and template.needs_picture
        self._default_slot_px = slot_px
        self._most = lru_cache(maxsize=2**16)(self._most_tokens)
        self._num_bytes = cache(lambda num: len(_SPECIAL.sub(" ", self._text(num)).encode()))
        self._num_tokens = cache(lambda num: self._count(self._text(num)))

    def __call__(
        self,
        identity: str,
        instruction: str,
        sizes: Sequence[tuple[int, int] | None],
        codes: np.ndarray | None,
    ) -> bool:
        if self._needs_picture and not sizes:
            raise no_picture(Sample(identity, instruction))
        most = self._config.max_prompt_tokens - sum(map(self._most, sizes)) - MARGIN
        if self._is_short(instruction, len(sizes), most):
            return True
        if self._builder is None:
            least = self._typical() * len(sizes)
            if least >= self._config.max_prompt_tokens:
                raise UnusableSampleError(
                    f"its {len(sizes)} source pictures of some {self._typical()} tokens each fill "
                    f"the prompt, and policy.max_prompt_tokens is {self._config.max_prompt_tokens}:"
                    " raise it, or lower renderer.policy_image_area_px"
                )
        known = [size for size in sizes if size is not None]
        if self._builder is None or len(known) < len(sizes):
            return False
        prompts, thinking = self._builder
        sample = Sample(identity, instruction)
        thinking.prompt_to_sample(prompts.without_pictures(sample, instruction, known))
        return True

    def _is_short(self, instruction: str, num_pictures: int, most: float) -> bool:
        """Whether the prompt's text certainly has at most `most` tokens."""
        instruction = unicodedata.normalize("NFC", instruction)
        num_bytes = len(instruction.encode())
        if self._num_bytes(num_pictures) + num_bytes <= most:
            return True
        most -= self._num_tokens(num_pictures)
        if num_bytes <= most or most < 0:
            return num_bytes <= most
        # In an instruction, the text of a special token is ordinary text, which is longer.
        is_plain = not any(special in instruction for special in self._specials)
        return is_plain and self._count(instruction) <= most

    def _text(self, num_pictures: int) -> str:
        """All text of a prompt but its instruction."""
        thought = self._config.thought
        request = thought.instruction.replace("{marker}", thought.marker) if thought else ""
        words = ["\n", request, thought.marker] if thought else []
        template = prompting.for_pictures(self._template, num_pictures)
        text = template.text.replace("{image}", prompting.PICTURE).replace("{instruction}", "")
        return " ".join([text, *words])

    def _count(self, text: str) -> float:
        counter = self._counter
        return len(counter.encode(text, add_special_tokens=False)) if counter else math.inf

    def _most_tokens(self, size: tuple[int, int] | None) -> float:
        """Upper limit of the tokens of a picture."""
        token_px, area = self._slot_px, self._template.image_area_px
        most_px = self._config.image_max_pixels or math.inf
        if size is not None:
            if max(size) > MAX_SAFE_RATIO * min(size):
                return math.inf
            width, height = size
            if area is not None:
                multiple_px = self._template.image_multiple_px
                width, height = prompting.size_of_area(*size, area, multiple_px)
            scale = max(1.0, math.sqrt(self._least_px / (width * height)))
            added_px = token_px if scale > 1 else token_px / 2
            most_px = min(most_px, (width * scale + added_px) * (height * scale + added_px))
        elif area is not None:
            added_px = self._template.image_multiple_px + token_px // 2
            most_px = min(most_px, after_rounding(max(area, self._least_px), added_px))
        return most_px // token_px**2

    def _typical(self) -> int:
        """Tokens of a picture that the renderer's template brings to its area; 0 without one."""
        most_px = self._config.image_max_pixels or math.inf
        return int(min(self._template.image_area_px or 0, most_px) // self._slot_px**2)

    @cached_property
    def _numbers(self) -> Mapping[str, Any]:
        """Those of the image processor's file; {} if it is not here."""
        for name in reversed(FILES[1]):  # the order of transformers
            folder = folder_here(self._config.model_path, self._config.revision, [[name]])
            if numbers := folder and read_object(folder / name):
                inner = numbers.get("image_processor", numbers)
                return inner if isinstance(inner, Mapping) else {}
        return {}

    @cached_property
    def _slot_px(self) -> int:
        """Side of the square of pixels that becomes one image token."""
        sides = [self._numbers.get(key) or 0 for key in ("patch_size", "merge_size")]
        return math.prod(sides) or self._default_slot_px

    @cached_property
    def _least_px(self) -> int:
        """The smallest area of a picture that the model sees."""
        size = self._numbers.get("size") or {}
        least = self._numbers.get("min_pixels") or size.get("shortest_edge")
        return self._config.image_min_pixels or least or MIN_PX

    @cached_property
    def _counter(self) -> Tokenizer | None:
        if self._folder is None or not (file := self._folder / FILES[0][0]).is_file():
            return None
        try:
            from tokenizers import Tokenizer

            counter = Tokenizer.from_file(str(file))
        except Exception:  # a laptop may lack the package; it has no other class of errors
            return None
        counter.no_truncation()
        counter.no_padding()
        return counter

    @cached_property
    def _specials(self) -> list[str]:
        tokens = self._counter.get_added_tokens_decoder() if self._counter else {}
        return [token.content for token in tokens.values()]

    @cached_property
    def _folder(self) -> Path | None:
        return folder_here(self._config.model_path, self._config.revision, FILES)

    @cached_property
    def _builder(self) -> tuple[QwenPrompts, Thinking] | None:
        """What builds the prompts in a run; None if its files or packages are not here. Raises
        ValueError for a config with which no run can build any."""
        if self._folder is None:
            return None
        here = self._config.model_copy(update={"model_path": str(self._folder), "revision": None})
        try:
            tokenizer, processor = load_tokenizer(here), load_image_processor(here)
        except (ImportError, OSError):
            return None
        limit = here.max_prompt_tokens
        prompts = QwenPrompts(tokenizer, processor, self._template, self._needs_picture, limit)
        return prompts, Thinking(prompts, here.thought, renderer_reads_text=False)
