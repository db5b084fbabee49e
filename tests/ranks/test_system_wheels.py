"""Wheels built for another torch: importable in a fresh interpreter, left alone when they work."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def run(script: str) -> None:
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, check=True)


def test_what_needs_vision_and_audio_imports_after_rl() -> None:
    """As a plugin or a notebook writes it; fails without `rl/ranks/wheels.py` wherever the wheels
    do not match (`torchvision::nms`)."""
    run("""
        import rl
        from transformers import CLIPModel
        import transformers.image_utils, transformers.audio_utils, torchvision.transforms
    """)


@pytest.mark.parametrize("order", ["import rl; import datasets", "import datasets; import rl"])
def test_a_broken_torchaudio_looks_uninstalled_and_a_working_one_stays(tmp_path, order):
    broken, working = tmp_path / "torchaudio.py", tmp_path / "torchcodec.py"
    broken.write_text("raise OSError('Could not load this library')")
    working.write_text("answer = 42")
    (tmp_path / "datasets.py").write_text("")
    run(f"""
        import sys, importlib.util
        sys.path.insert(0, {str(tmp_path)!r})
        {order}
        assert importlib.util.find_spec("torchaudio") is None
        import torchcodec
        assert torchcodec.answer == 42
        try:
            import torchaudio
        except ImportError:
            pass
        else:
            raise AssertionError
    """)


def test_a_failure_of_another_kind_is_not_hidden(tmp_path):
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('disk on fire')")
    run(f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import rl
        try:
            import torchvision
        except RuntimeError as error:
            assert "disk on fire" in str(error)
        else:
            raise AssertionError
    """)
