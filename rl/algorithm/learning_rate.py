"""The learning rate as a pure function of the iteration: nothing to save, nothing to restore."""

from __future__ import annotations


def learning_rate(
    iteration: int, num_iterations: int, peak: float, warmup_iterations: int, final_fraction: float
) -> float:
    """Linear warm-up to `peak`, then linear decay to `final_fraction * peak` at the last iteration.

        i < W:  peak * (i + 1) / W              (the first iteration already learns)
        i >= W: peak * (1 - (1 - f) * (i - W) / (N - 1 - W))

    `iteration` counts from 0 over the whole run, so a resumed run continues the same line.
    """
    if iteration < warmup_iterations:
        return peak * (iteration + 1) / warmup_iterations
    progress = (iteration - warmup_iterations) / max(1, num_iterations - 1 - warmup_iterations)
    return peak * (1.0 - (1.0 - final_fraction) * min(1.0, progress))
