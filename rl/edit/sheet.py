"""One edit on one sheet: the source, what was drawn before training and after, and beside them what
the user's own words and the renderer's stock pipeline give; under each the words that it was drawn
of. All under the same noise."""

from __future__ import annotations

import io
import textwrap
from typing import TYPE_CHECKING

from rl.config.printing import printable
from rl.edit.editor import OWN_WORDS, STOCK, UNTRAINED, Arm, EditResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from PIL.Image import Image

PANEL_IN, LINE_IN, TITLE_IN = 3.2, 0.17, 0.9
"""Side of a picture, height of a line below it and of what is above the row, inches."""
DPI = 110
MAX_LINES, LINE_CHARS = 5, 38
CRISP_BELOW_PX = 256
"""Pictures smaller than this are enlarged pixel by pixel."""
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
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib import font_manager

    panels: list[tuple[str, Image | None, str]] = []
    if result.source is not None:
        panels.append(("source", result.source, result.request.instruction))
    edit = Arm(result.words, result.image, result.failure)
    for name, title in TITLES.items():
        arm = edit if name == TRAINED else result.arms.get(name)
        if arm is not None:
            panels.append((title, arm.image, arm.failure or arm.words))
    most_lines = max(len(lines(words)) for _, _, words in panels)
    installed = {font.name for font in font_manager.fontManager.ttflist}
    fonts = [name for name in FONTS if name in installed]
    words_in = LINE_IN * (most_lines + 2)
    height_in = TITLE_IN + PANEL_IN + words_in
    with plt.rc_context({"font.family": fonts or ["sans-serif"]}):
        figure = plt.figure(figsize=(PANEL_IN * len(panels) + 0.4, height_in), dpi=DPI)
        grid = figure.add_gridspec(1, len(panels))
        top, bottom = 1 - TITLE_IN / height_in, words_in / height_in
        grid.update(left=0.02, right=0.98, top=top, bottom=bottom, wspace=0.06)
        for number, panel in enumerate(panels):
            _show(figure.add_subplot(grid[0, number]), *panel)
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


def _show(axes: Axes, title: str, image: Image | None, words: str) -> None:
    axes.axis("off")
    if image is not None:
        crisp = max(image.size) < CRISP_BELOW_PX
        axes.imshow(image, interpolation="nearest" if crisp else "antialiased")
    axes.set_title(title, fontsize=12)
    # `parse_math`: a dollar sign in the words is a dollar sign.
    axes.text(
        0.5,
        -0.05 if image is not None else 0.5,
        "\n".join(lines(words)) or "(no words)",
        ha="center",
        va="top" if image is not None else "center",
        fontsize=10,
        transform=axes.transAxes,
        parse_math=False,
    )


def lines(words: str) -> list[str]:
    """At most `MAX_LINES` printable ones."""
    told = printable(" ".join(words.split()))
    return textwrap.wrap(told, LINE_CHARS, max_lines=MAX_LINES, placeholder=" ...")
