"""Randomness: seeds derived from names, and the global generators' state for checkpoints.

`derive_seed` is the ONLY source of seeds in the loop. A seed hashes its purpose: the next draw of a
stream would depend on all draws before it, so on a resume, a retry or the number of ranks. Only
model code's dropout draws from the global generators, whose state is saved per rank (`rng_state`).
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

    The parts are encoded as JSON: ('a', 'bc') and ('ab', 'c'), or 1 and '1', differ. The value is
    part of every run's record and never changes between versions.
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
    """State of the global generators, as tensors and plain values, so that no pickle has to be
    trusted. CUDA: of the current device, the policy's; a CPU run leaves the GPUs alone."""
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
    """Restore what `rng_state` returned; between CPU and CUDA, what both have."""
    import numpy as np
    import torch

    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, np_keys, position, has_gauss, np_gauss = state["numpy"]
    np.random.set_state((name, np.array(np_keys, dtype=np.uint32), position, has_gauss, np_gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
