"""Bounds on the difference of two float32 computations of the same value, on any CPU.

The order of a sum depends on the CPU, the number of threads and the rows of a product, so a bound
is an error estimate and not a measurement. The errors of n roundings have random signs and add up
like a random walk: lambda sqrt(n) u times the summed numbers (Higham & Mary 2019, "A new approach
to probabilistic rounding error analysis"). Even a repeated forward may differ if its tensors have
other addresses. Bits are compared only where they are promised: after a resume, between ranks,
after a sync, after a file's round trip.
"""

from __future__ import annotations

import math
from typing import Any

UNIT = 2.0**-24
"""u: largest relative error of one float32 operation."""
MARGIN = 10
"""lambda: 1 is typical; tails, and layers that amplify errors, need more."""


def rounding(num_terms: float, largest: float = 1.0) -> float:
    """Bound on |one - other| for sums of `num_terms` numbers up to `largest` over all layers."""
    return MARGIN * math.sqrt(num_terms) * UNIT * largest


def apart(one: Any, other: Any) -> float:
    """The largest difference of two tensors of the same shape."""
    assert one.shape == other.shape
    return float((one - other).abs().max())


PRODUCT_TOL = rounding(256)
"""9.5e-6, for a few consecutive products of 64 terms: one layer, its attention, their gradient."""
FORWARD_TOL = rounding(1600, largest=4)
"""9.5e-5, for a log-prob (nats), a normed state or a cosine: 2 layers of 7 products of 64 terms, a
vocabulary of 700; logits reach 4. A stale adapter causes 1e-2."""
PICTURE_TOL = rounding(6000)
"""4.6e-5, for a picture in 0..1: 4 steps and a decoder, in all 100 products of 60 terms. Another
prompt causes 4e-2, one matrix in bfloat16 1e-3."""
GRADIENT_TOL = rounding(400)
"""1.2e-5 of the largest element, for a sum over 400 tokens. A wrongly masked token causes 2e-2, an
error of a thousandth in one of twelve advantages 2e-4."""
WEIGHT_TOL = 4 * GRADIENT_TOL
"""4.8e-5 of the largest weight, after some steps of AdamW, which divides each element's error by
the element's size. An error of a thousandth in the learning rate causes 7e-4."""
