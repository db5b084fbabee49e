"""Draws one panel of a figure: a title, and a picture with a text below it or the text alone."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from rl.config.printing import printable
from rl.files.images import over_white

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from PIL.Image import Image

CRISP_BELOW_PX = 256
"""Pictures smaller than this are enlarged pixel by pixel."""
PICTURE_CHARS, PICTURE_LINES = 34, 4
WORDS_CHARS, WORDS_LINES = 22, 10


def pyplot() -> Any:
    """`matplotlib.pyplot`, drawing to files. It ignores a `matplotlibrc` in the working folder,
    which could start LaTeX."""
    import matplotlib

    matplotlib.rcdefaults()
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def panel(axes: Axes, image: Image | None, title: str, text: str | None) -> None:
    """Draw one panel; `image` and `text` are left out if None."""
    axes.axis("off")
    if image is not None:
        crisp = max(image.size) < CRISP_BELOW_PX
        axes.imshow(over_white(image), interpolation="nearest" if crisp else "antialiased")
    axes.set_title(printable(title), fontsize=13)
    if text is None:
        return
    below = image is not None
    num_chars, num_lines = (PICTURE_CHARS, PICTURE_LINES) if below else (WORDS_CHARS, WORDS_LINES)
    lines = textwrap.wrap(
        printable(text, keep="\n\t"), num_chars, max_lines=num_lines, placeholder=" ..."
    )
    # `parse_math`: a dollar sign in a user's instruction must not start a formula.
    axes.text(
        0.5,
        -0.04 if below else 0.5,
        "\n".join(lines) or "(no words)",
        ha="center",
        va="top" if below else "center",
        fontsize=11,
        transform=axes.transAxes,
        parse_math=False,
    )
