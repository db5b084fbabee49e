"""Run one iteration of a config at real size on a fake GPU.

    rl rehearse configs/qwen_image_edit.jsonnet
    rl rehearse configs/qwen_image_21.jsonnet renderer.batch_size=2
    rl rehearse configs/qwen_image_21.jsonnet --depth 2

The last is faster, because every model has only two layers.

Policy, renderer, loss, backward, optimizer step and export run through the
project's own code, on tensors that have shapes and dtypes but no values. It reports
peak memory beside the plan of rl check, and operations; it stops, and names the
operation, where tensors of different devices or dtypes meet. It needs the CPU build of PyTorch
and g++, no weights, no judge and no data, and takes minutes. It samples nothing and
cannot see kernels, their speed, NCCL or vLLM: rl check-gpu does. The exit code is 1
where tensors do not go together.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

from rl import printing
from rl.config.schema import ConfigError, load_config
from rl.tools.commands.edit import at_least_one


@printing.program
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 an error in the rehearsed code, 2 nothing could be rehearsed."""
    parser = printing.Parser("rl rehearse", __doc__)
    parser.add_config()
    parser.add_argument(
        "--depth",
        type=at_least_one,
        metavar="N",
        help="N layers (at least 1) in every model, at their real widths",
    )
    args = parser.parse_intermixed_args(argv)
    try:
        config = load_config(args.config, args.overrides)
        load_cuda_guard()
        # These import torch, after the guard.
        from rl.tools import rehearsal

        done = rehearsal.rehearse(config, args.depth)
    except (ConfigError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    except (RuntimeError, NotImplementedError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "/rl/" in frame.filename]
        where = f"{ours[-1].filename}, line {ours[-1].lineno}" if ours else "PyTorch"
        print(f"{where}: {str(error).partition(chr(10))[0]}", file=sys.stderr)
        return 1
    print(*rehearsal.lines(done), sep="\n")
    return 0


def load_cuda_guard() -> None:
    """Compile and load `cuda_guard.cpp`, a CUDA device that computes nothing. Call it before the
    first `import torch`: autograd looks the hooks up once.

    Raises ValueError without a C++ compiler, and on a CUDA build of PyTorch, which has a
    device guard of its own.
    """
    assert "torch" not in sys.modules, "torch was imported before the fake GPU was loaded"
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None, "PyTorch is not installed"
    root = Path(spec.origin).parent
    if (root / "lib" / "libtorch_cuda.so").exists():
        raise ValueError(
            "a rehearsal needs the CPU build of PyTorch, and this is the CUDA build: install "
            "requirements-cpu.lock in a clone of its own (REQUIREMENTS=requirements-cpu.lock)"
        )
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise ValueError(
            "a rehearsal compiles 35 lines of C++, and there is no g++: apt install g++"
        )
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        library = Path(folder, "cuda_guard.so")
        includes = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
        source = str(Path(__file__).with_name("cuda_guard.cpp"))
        command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", *includes, source]
        command += ["-o", str(library), f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"]
        built = subprocess.run(command, capture_output=True, text=True)
        if built.returncode:
            raise ValueError(f"{compiler} could not compile {source}:\n{built.stderr}")
        for file in (root / "lib/libc10.so", root / "lib/libtorch_cpu.so", library):
            ctypes.CDLL(str(file), ctypes.RTLD_GLOBAL)


if __name__ == "__main__":
    sys.exit(main())
