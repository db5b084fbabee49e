"""Pictures on their way out: smaller, encoded, or side by side.

What: what the record, wandb and the before/after grid need of PIL. What not: reading users' files
(`rl/data`) or what the policy sees (`rl/policies`). PIL is imported on use.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

_CAPTION_PX = 14
_GAP_PX = 4


def downscale(image: Image, side_px: int) -> Image:
    """`image` with its longer side at most `side_px`, aspect kept; never enlarged."""
    from PIL.Image import Resampling

    scale = side_px / max(image.size)
    if scale >= 1:
        return image
    width, height = (max(1, round(length * scale)) for length in image.size)
    return image.resize((width, height), Resampling.LANCZOS)


def png_bytes(image: Image) -> bytes:
    """Lossless and free of metadata: a judge sees the pixels and nothing else."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def grid(
    rows: Sequence[Sequence[Image | None]],
    captions: Sequence[Sequence[str]],
    cell_px: int = 160,
) -> Image:
    """Pictures in rows and columns, each centred in a square cell with a caption line under it.

    `captions[r][c]` belongs to `rows[r][c]`; lines longer than the cell are cut. A None leaves its
    cell empty. Raises ValueError when there is nothing to draw.
    """
    import PIL.Image
    from PIL import ImageDraw

    num_columns = max((len(row) for row in rows), default=0)
    if num_columns == 0:
        raise ValueError("a grid needs at least one picture")
    width, height = cell_px + _GAP_PX, cell_px + _CAPTION_PX + _GAP_PX
    sheet = PIL.Image.new("RGB", (num_columns * width, len(rows) * height), "white")
    draw = ImageDraw.Draw(sheet)
    for r, (row, captions_r) in enumerate(zip(rows, captions, strict=True)):
        for c, (image, caption) in enumerate(zip(row, captions_r, strict=True)):
            left, top = c * width, r * height
            if image is not None:
                thumb = _fit(image.convert("RGB"), cell_px)
                offset = ((cell_px - thumb.width) // 2, (cell_px - thumb.height) // 2)
                sheet.paste(thumb, (left + offset[0], top + offset[1]))
            draw.text((left + 2, top + cell_px + 1), _cut(draw, caption, cell_px), fill="black")
    return sheet


def _fit(image: Image, side_px: int) -> Image:
    """Like `downscale`, but small pictures are enlarged too, by whole pixels' repetition."""
    from PIL.Image import Resampling

    if max(image.size) >= side_px:
        return downscale(image, side_px)
    scale = side_px / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Resampling.NEAREST)


def _cut(draw: object, text: str, width_px: int) -> str:
    line = " ".join(text.split())
    while line and draw.textlength(line) > width_px - 4:  # type: ignore[attr-defined]
        line = line[:-1]
    return line
