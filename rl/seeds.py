"""Derives seeds from names; saves and restores the global random generators."""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any

SEED_LIMIT = 2**31 - 2**16
"""Derived seeds are below this, so that a seed plus a group member's index (< 65 536) still fits
the signed 32-bit seed of some samplers."""


def derive_seed(*parts: str | int) -> int:
    """A seed in [0, 2**31 - 2**16) for one purpose, e.g. `derive_seed(run_seed, "noise", 12)`.

    This is the ONLY source of seeds in the loop. A seed is a hash of its purpose, because a seed
    drawn from a stream would change with resumes, retries and the number of ranks.
    The parts are encoded as JSON, so ('a', 'bc') and ('ab', 'c') give different seeds, as do 1 and
    '1'. Every run's record contains these seeds; they never change between versions.
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
    """State of this rank's global generators, from which only dropout in model code draws. Tensors
    and plain values, so that loading needs no pickle. For CUDA: only the current device, which is
    the policy's. A CPU run does not touch the GPUs."""
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
    """Restore the state from `rng_state`; the CUDA part only if it was saved and CUDA is in use."""
    import numpy as np
    import torch

    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, np_keys, position, has_gauss, np_gauss = state["numpy"]
    np.random.set_state((name, np.array(np_keys, dtype=np.uint32), position, has_gauss, np_gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
