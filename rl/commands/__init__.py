"""Programs that people run. None imports from the working folder, which may be a stranger's run."""

import os
import sys

try:
    _here = {
        os.path.realpath(path)
        for path in ("", *os.environ.get("PYTHONPATH", "").split(os.pathsep))
        if not os.path.isabs(path)
    }
except FileNotFoundError:  # a working folder that is gone, and has no modules
    _here = set()
# In a clone that is not installed `rl` itself is imported from there.
_here.discard(os.path.realpath(os.path.join(os.path.dirname(__file__), "..", "..")))
sys.path[:] = [path for path in sys.path if os.path.realpath(path) not in _here]
