"""Compiles and loads `cuda_guard.cpp`, a CUDA device that computes nothing, before torch starts."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


class CannotRehearseError(Exception):
    """What this machine lacks for a rehearsal, and the fix."""


def load() -> None:
    """Call it before the first `import torch`: autograd looks the hooks up once.

    Raises CannotRehearseError without a C++ compiler, and on a CUDA build of PyTorch, which has a
    device guard of its own.
    """
    assert "torch" not in sys.modules, "torch was imported before the fake GPU was loaded"
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise CannotRehearseError("PyTorch is not installed: scripts/_install.sh installs it")
    root = Path(spec.origin).parent
    if (root / "lib" / "libtorch_cuda.so").exists():
        raise CannotRehearseError(
            "a rehearsal needs the CPU build of PyTorch, and this is the CUDA build: install "
            "requirements-cpu.lock in a clone of its own (REQUIREMENTS=requirements-cpu.lock)"
        )
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise CannotRehearseError(
            "a rehearsal compiles 35 lines of C++, and there is no g++: apt install g++"
        )
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        library = Path(folder, "cuda_guard.so")
        includes = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
        source = str(Path(__file__).with_suffix(".cpp"))
        command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", *includes, source]
        command += ["-o", str(library), f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"]
        built = subprocess.run(command, capture_output=True, text=True)
        if built.returncode:
            raise CannotRehearseError(f"{compiler} could not compile {source}:\n{built.stderr}")
        for file in (root / "lib/libc10.so", root / "lib/libtorch_cpu.so", library):
            ctypes.CDLL(str(file), ctypes.RTLD_GLOBAL)
