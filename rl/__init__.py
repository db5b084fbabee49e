"""RL for vision-language models that write the edit while a frozen generator draws it."""

import sys

if not (3, 11, 4) <= sys.version_info[:3] < (3, 14):  # no f-string: any Python gets this far
    found = sys.version.split()[0] + " (" + sys.executable + ")"
    sys.exit("rl needs Python 3.11.4 to 3.13; this is " + found + ". Start it with one of those.")

if sys.argv[:1] == ["-m"]:  # a program of this package starts: no traceback for an early Ctrl-C
    _hook = sys.excepthook
    sys.excepthook = lambda kind, *rest: (
        print("interrupted", file=sys.stderr)
        if issubclass(kind, KeyboardInterrupt)
        else _hook(kind, *rest)
    )

from rl.ranks import package_fixes

package_fixes.install()
