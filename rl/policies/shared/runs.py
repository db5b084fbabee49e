"""Where the runs of a packed row lie: what every attention kernel is told."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Runs:
    """Attention in pieces: run i of the queries sees run i of the keys and nothing else."""

    query_lens: tuple[int, ...]
    """Together they cover the queries."""
    key_lens: tuple[int, ...]
    causal: bool
    """Within a run, query n sees keys up to n; else all of them. Causal runs are square."""

    @cached_property
    def num_queries(self) -> int:
        return sum(self.query_lens)
