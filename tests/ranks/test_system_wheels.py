"""With a CPU torch, packages with CUDA wheels can be imported in a fresh interpreter."""

import subprocess
import sys
import textwrap
from importlib.metadata import version
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not version("torch").endswith("+cpu"), reason="needs a CPU torch"),
]

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("order", ["import rl, datasets", "import datasets, rl"])
def test_modules_that_need_torchvision_or_torchaudio_can_be_imported_with_rl(order: str) -> None:
    """A plugin or a notebook may import in either order; where wheels do not match, this fails
    without `rl/ranks/package_fixes.py` (`torchvision::nms`)."""
    script = f"""
        {order}
        from importlib.metadata import version
        from importlib.util import find_spec
        from transformers import CLIPModel
        import transformers.image_utils, transformers.audio_utils, torchvision.transforms
        for package in ("torchaudio", "torchcodec"):
            assert find_spec(package) is None or version(package).endswith("+cpu")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, check=True)
