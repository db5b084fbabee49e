"""Reads and fills prompt files, and encodes the texts and pictures of a question."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from pathlib import Path

from PIL import Image

from rl.config.loading import read_text
from rl.files import downscale, over_white, padded, png_bytes
from rl.printing import excerpt

INSTRUCTION = "{instruction}"
"""The one placeholder of a prompt file."""

MIN_SIDE_PX = 28
"""Qwen2-VL's picture processors fail on a shorter side, and so do judges that are built on them."""
MAX_PROMPT_BYTES = 100_000
MAX_PATH_CHARS = 300


def read_prompt(path: str, default: Path | None, key: str) -> str:
    """The text of the prompt file `path`, or of the file `default` if `path` is ''.

    Raises ValueError naming `key` if `path` cannot be used, or lacks the `{instruction}` that
    `default` has. A prompt without default must have it.
    """
    text = default_text = default.read_text(encoding="utf-8").strip() if default else INSTRUCTION
    if path:
        try:
            text = read_text(path, MAX_PROMPT_BYTES).strip()
        except ValueError as error:
            name = excerpt(path, MAX_PATH_CHARS)
            raise ValueError(f"{key}: the prompt file {name} {error}") from None
    if not text:
        raise ValueError(f"{key}: the prompt file {path} is empty")
    if INSTRUCTION in default_text and INSTRUCTION not in text:
        raise ValueError(
            f"{key}: the prompt file {path} has no {INSTRUCTION}; put it where the instruction goes"
        )
    return text


def fill_prompt(text: str, instruction: str) -> str:
    """`text` with the user's instruction inserted. The '<' of the file's tags (`</instruction>`) is
    escaped in it, so that it cannot close a tag. Other braces of `text` (JSON examples) stay."""
    for tag in set(re.findall(r"</?(\w+)>", text)):
        instruction = re.sub(rf"(?i)<(?=\s*/?\s*{tag}\b)", "&lt;", instruction)
    return text.replace(INSTRUCTION, instruction)


def picture_part(image: Image.Image, side_px: int) -> bytes:
    """The picture as JSON, in PNG: JPEG would add artefacts, which the judge might penalise. Its
    longer side is at most `side_px`; a side below `MIN_SIDE_PX` is padded with white."""
    if max(image.size) > side_px or min(image.size) < MIN_SIDE_PX:
        image = padded(downscale(over_white(image), side_px), MIN_SIDE_PX)
    url = "data:image/png;base64," + base64.b64encode(png_bytes(image)).decode("ascii")
    return json.dumps({"type": "image_url", "image_url": {"url": url}}).encode()


async def encoded(part: str | Image.Image, side_px: int) -> bytes:
    """A part of a question as JSON for a request; a picture is encoded in a thread."""
    if isinstance(part, str):
        return json.dumps({"type": "text", "text": part}).encode()
    return await asyncio.to_thread(picture_part, part, side_px)
