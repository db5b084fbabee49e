"""The `rl` commands. None imports modules from the working folder, which may be another user's."""

import os
import sys

try:
    _relative_folders = {
        os.path.realpath(path)
        for path in ("", *os.environ.get("PYTHONPATH", "").split(os.pathsep))
        if not os.path.isabs(path)
    }
except FileNotFoundError:  # the working folder was deleted
    _relative_folders = set()
# Keep the clone's folder: if `rl` is not installed, it is imported from there.
_relative_folders.discard(
    os.path.realpath(os.path.join(os.path.dirname(__file__), "..", "..", ".."))
)
sys.path[:] = [path for path in sys.path if os.path.realpath(path) not in _relative_folders]
