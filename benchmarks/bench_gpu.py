"""Measure this project's speed on one GPU at real size, with random weights, without network.

    rl bench-gpu                                all cases
    rl bench-gpu --cases ceilings,dit           some of them
    rl bench-gpu --tiny                         the same code on a CPU

Each case is a process of its own and runs alone. "floor": the time of the same FLOPs at the rate of
large matrix products. Exit code 1 if a case failed, a result is wrong, or the time was too short.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rl import printing
from rl.tools import gpu_checks
from rl.tools.gpu_checks import Step


def _case(name: str, function: str, limit_s: float, *arguments: str, package: str = "") -> Step:
    function = f"benchmarks.{function}"
    return Step(name, function, limit_s, arguments, is_alone=True, package=package)


CASES = (
    _case("ceilings", "gpu_render:ceilings", 60),
    _case("iteration", "gpu_iteration:iteration", 180),
    _case("dit", "gpu_render:dit", 120),
    _case("policy", "gpu_policy:policy", 180),
    _case("sync_transformers", "gpu_iteration:sync_transformers", 90),
    _case("sync_vllm_eager", "gpu_iteration:sync_vllm", 240, "eager", package="vllm"),
    _case("sync_vllm_graphs", "gpu_iteration:sync_vllm", 240, "graphs", package="vllm"),
    _case("vae", "gpu_render:vae", 60),
    _case("attention", "gpu_render:attention_backends", 60),
)
"""In order of worth."""


@printing.program
def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    printing.guard()
    parser = printing.Parser("rl bench-gpu", __doc__)
    gpu_checks.add_options(parser, "cases", CASES, 1200)
    return gpu_checks.run_all(parser, parser.parse_args(argv), CASES, all_good="DONE")


if __name__ == "__main__":
    sys.exit(main())
