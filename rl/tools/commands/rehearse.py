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

import sys
import traceback
from collections.abc import Sequence

from rl import printing
from rl.config.schema import ConfigError, load_config
from rl.tools.commands.edit import at_least_one
from rl.tools.skeletons import CannotRehearseError, load


@printing.program
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 an error in the rehearsed code, 2 nothing could be rehearsed."""
    printing.guard()
    parser = printing.Parser("rl rehearse", f"{__doc__}{printing.KEY_VALUE}")
    parser.add_config()
    depth = "N layers (at least 1) in every model, at their real widths"
    parser.add_argument("--depth", type=at_least_one, metavar="N", help=depth)
    args = parser.parse_intermixed_args(argv)
    try:
        config = load_config(args.config, args.overrides)
        load()
        # These import torch, after the guard.
        from rl.tools import rehearsal

        done = rehearsal.rehearse(config, args.depth)
    except (ConfigError, ValueError, CannotRehearseError) as error:
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


if __name__ == "__main__":
    sys.exit(main())
