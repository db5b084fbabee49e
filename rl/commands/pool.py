"""Plan a pool of render workers.

rl pool plan configs/qwen_image_edit.jsonnet
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rl.commands import pool_plan
from rl.text import command_line, terminal


@command_line.program
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 if the config or run cannot be planned with."""
    terminal.guard()
    parser = command_line.Parser("rl pool plan", pool_plan.__doc__)
    parser.add_argument("action", choices=["plan"])
    pool_plan.add_arguments(parser)
    return pool_plan.main(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
