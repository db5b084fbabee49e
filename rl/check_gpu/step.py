"""The child of `rl check-gpu`: `python -m rl.check_gpu.step <module:function> <Asked as JSON>`.

Each `Line` that the function yields is printed as JSON; what libraries print goes to stderr.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
from dataclasses import asdict

from rl.check_gpu.lines import Asked
from rl.ranks import signals
from rl.text import terminal


def main() -> None:
    terminal.guard()
    signals.die_with_parent()
    asked = Asked(**json.loads(sys.argv[2]))
    with os.fdopen(os.dup(1), "w") as results:
        os.dup2(2, 1)
        # Where it hangs, just before the parent ends it.
        faulthandler.dump_traceback_later(asked.limit_s - 1, file=2)
        module, _, function = sys.argv[1].partition(":")
        for line in getattr(importlib.import_module(module), function)(asked):
            print(json.dumps(asdict(line)), file=results, flush=True)


if __name__ == "__main__":
    main()
