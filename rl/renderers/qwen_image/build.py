"""Load a Qwen-Image editor.

What: `build`, re-exported by the plugs. What not: their config (`config.py`), pictures (`loop.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl.ranks.placement import resolve_device
from rl.renderers.qwen_image.config import QwenImageConfig

if TYPE_CHECKING:
    from rl.renderers.qwen_image.loop import QwenImageRenderer


def build(config: QwenImageConfig, device: str) -> QwenImageRenderer:
    """Load the editor onto `config.device`, or onto `device` (the rank's) when that is 'auto'."""
    from rl.renderers.qwen_image.components import load_parts
    from rl.renderers.qwen_image.loop import QwenImageRenderer

    place = resolve_device(config.device, device)
    return QwenImageRenderer(config, load_parts(config, place))
