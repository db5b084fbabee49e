"""Runs one step of `rl check-gpu` in this process: `python -m rl.check_gpu.step <name> <JSON>`.

The name is `module:function`; the function yields `Line`s. Each is printed as a line of JSON; what
libraries print goes to standard error.
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

BEFORE_LIMIT_S = 1.0
"""So long before it is killed, a step writes where it hangs."""


def main() -> None:
    terminal.guard()
    signals.die_with_parent()
    name, text = sys.argv[1:]
    asked = Asked(**json.loads(text))
    with os.fdopen(os.dup(1), "w") as results:
        os.dup2(2, 1)
        faulthandler.dump_traceback_later(asked.limit_s - BEFORE_LIMIT_S, file=sys.__stderr__)
        module, _, function = name.partition(":")
        for line in getattr(importlib.import_module(module), function)(asked):
            print(json.dumps(asdict(line)), file=results, flush=True)


if __name__ == "__main__":
    main()
