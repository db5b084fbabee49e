"""EARL's name for `rl check-distributed`, not a test: `torchrun --nproc-per-node 4 rl/test_...`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # else `rl/data` hides other modules named `data`
    from rl.tools.commands.check_distributed import main

    main()
