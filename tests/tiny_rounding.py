"""How far two float32 computations of the same thing may be apart, on whatever CPU.

In which order a sum is added up is the kernels' affair: it hangs on the CPU, the number of threads,
how many rows share a product. So a bound here is an error estimate, and no machine's figure. The
errors of n roundings are of either sign and add up like a walk: lambda sqrt(n) u of what was summed
(Higham & Mary 2019, "A new approach to probabilistic rounding error analysis"). One
forward done twice may differ as well, where its tensors lie otherwise in memory. Bits are compared
only where they are promised: a resume, ranks with one another, a sync, a file's round trip.
"""

from __future__ import annotations

import math
from typing import Any

UNIT = 2.0**-24
"""Float32: largest relative error of one operation."""
MARGIN = 10
"""lambda: 1 is what is usual; tails, and layers that amplify what comes in, want more."""


def rounding(num_terms: float, largest: float = 1.0) -> float:
    """Bound on |one - other|: `num_terms` numbers up to `largest` added up, through all layers."""
    return MARGIN * math.sqrt(num_terms) * UNIT * largest


def apart(one: Any, other: Any) -> float:
    """The largest difference of two tensors of one shape."""
    assert one.shape == other.shape
    return float((one - other).abs().max())


PRODUCT = rounding(256)
"""9.5e-6. A few products of 64 terms in a row: one layer, its attention, their gradient."""
NATS = rounding(1600, largest=4)
"""9.5e-5. Of a log-prob or a normed state: 2 layers of 7 products of 64 terms, a vocabulary of 700;
logits reach 4. A stale adapter is off by 1e-2."""
PICTURE = rounding(6000)
"""4.6e-5. Of a picture's 0..1: 4 steps and a decoder, together 100 products of 60 terms. Other
words are off by 4e-2, one matrix in bfloat16 by 1e-3."""
GRADIENT = rounding(400)
"""1.2e-5, of the largest element: 400 tokens add up. A masked token is off by 2e-2,
one advantage of twelve that is wrong by a thousandth by 2e-4."""
STEPPED = 4 * GRADIENT
"""4.8e-5, of the largest weight after some steps of AdamW, which divides each element's error by
that element's own size. A learning rate that is wrong by a thousandth is off by 7e-4."""
