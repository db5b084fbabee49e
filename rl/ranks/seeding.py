"""Randomness: seeds derived from names, and the global generators' state for checkpoints.

`derive_seed` is the ONLY source of seeds in the loop. A seed is a hash of what it is for, never the
next draw of a stream: a stream's position would depend on everything drawn before it, so a resume,
a retry, another batch order or another number of ranks would change all later draws. Model code's
dropout does draw from the global generators; their state is therefore saved per rank (`rng_state`).
"""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any

SEED_LIMIT = 2**31 - 2**16
"""Derived seeds are below this, so that adding a group member's index (< 65 536) still fits the
signed 32 bits that some samplers take."""


def derive_seed(*parts: str | int) -> int:
    """A seed in [0, 2**31 - 2**16) from what it is for, e.g. `derive_seed(run_seed, "noise", 12)`.

    JSON of the list is the encoding: ('a', 'bc') and ('ab', 'c'), or 1 and '1', are different.
    The value is part of every run's record, hence never changes between versions.
    """
    assert parts and all(type(part) in (str, int) for part in parts), parts
    encoded = json.dumps(parts, ensure_ascii=True).encode()
    digest = hashlib.blake2b(encoded, digest_size=8).digest()
    return int.from_bytes(digest, "big") % SEED_LIMIT


def seed_everything(seed: int) -> None:
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """State of the global generators, as tensors and plain values only.

    So `torch.load(weights_only=True)` reads it back and no pickle has to be trusted. CUDA: the
    current device, which is the policy's; a run on the CPU leaves the GPUs of its machine alone.
    """
    import numpy as np
    import torch

    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    plain_keys = [int(key) for key in keys]
    return {
        "python": random.getstate(),
        "numpy": [str(name), plain_keys, int(position), int(has_gauss), float(gauss)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Put the generators back to where `rng_state` found them.

    A checkpoint from a CPU run restores on CUDA (and the other way round) what both have.
    """
    import numpy as np
    import torch

    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, np_keys, position, has_gauss, np_gauss = state["numpy"]
    np.random.set_state((name, np.array(np_keys, dtype=np.uint32), position, has_gauss, np_gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
