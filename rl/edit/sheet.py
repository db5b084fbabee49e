"""Draws one edit on one sheet: the sources, and what was drawn, each above its words."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rl.config.printing import printable
from rl.edit.editor import OWN_WORDS, STOCK, UNTRAINED, Arm, EditResult
from rl.files.panels import panel, pyplot

if TYPE_CHECKING:
    from PIL.Image import Image

PANEL_IN, WORDS_IN, TITLE_IN = 3.2, 0.9, 0.9
"""Side of a picture, height of what is below it and above the row, inches."""
DPI = 110
TRAINED = ""
TITLES = {
    UNTRAINED: "before training",
    TRAINED: "after training",
    OWN_WORDS: "your words as they are",
    STOCK: "the stock pipeline",
}
FONTS = ("DejaVu Sans", "Noto Sans CJK JP", "Noto Sans CJK SC", "WenQuanYi Zen Hei")
"""Those that are installed are asked in this order for a character."""


def draw_sheet(result: EditResult, made_by: str) -> bytes:
    """PNG. `made_by`: the run and how far it was trained."""
    from matplotlib import font_manager

    plt = pyplot()
    panels: list[tuple[Image | None, str, str | None]] = []
    for number, source in enumerate(result.sources, 1):
        title = "source" if len(result.sources) == 1 else f"source {number}"
        # Under the last one, beside what was made of them.
        words = result.request.instruction if number == len(result.sources) else None
        panels.append((source, title, words))
    edit = Arm(result.words, result.image, result.failure)
    for name, title in TITLES.items():
        arm = edit if name == TRAINED else result.arms.get(name)
        if arm is not None:
            panels.append((arm.image, title, arm.failure or arm.words))
    installed = {font.name for font in font_manager.fontManager.ttflist}
    fonts = [name for name in FONTS if name in installed]
    height_in = TITLE_IN + PANEL_IN + WORDS_IN
    with plt.rc_context({"font.family": fonts or ["sans-serif"]}):
        figure = plt.figure(figsize=(PANEL_IN * len(panels) + 0.4, height_in), dpi=DPI)
        grid = figure.add_gridspec(1, len(panels))
        top, bottom = 1 - TITLE_IN / height_in, WORDS_IN / height_in
        grid.update(left=0.02, right=0.98, top=top, bottom=bottom, wspace=0.06)
        for number, shown in enumerate(panels):
            panel(figure.add_subplot(grid[0, number]), *shown)
        figure.text(
            0.02,
            1 - 0.32 / height_in,
            printable(f"{made_by}, seed {result.seed}"),
            fontsize=11,
            color="0.35",
            parse_math=False,
        )
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        plt.close(figure)
    return buffer.getvalue()
