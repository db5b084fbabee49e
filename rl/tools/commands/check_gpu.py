"""Prove that this machine's GPUs run everything.

    rl check-gpu                                    on all visible GPUs
    rl check-gpu configs/qwen_image_21.jsonnet      and whether that config fits
    rl check-gpu --steps machine,kernels,renderers  some of the steps
    rl check-gpu --engine transformers              without vLLM
    rl check-gpu --tiny                             the same steps on a CPU

Each line is PASS, FAIL with a fix, SKIPPED with the reason, or NO TIME. Exit code 0 if all passed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from rl import build, printing
from rl.config.schema import load_config
from rl.tools.check_gpu.steps import ALONE, Step, add_options, run_all

_HERE = "rl.tools.check_gpu"
LOOP, ENGINE = f"{_HERE}.gpu_machine:loop", f"{_HERE}.gpu_steps:engine"
SLEEP = f"{_HERE}.gpu_steps:sleep"
KERNEL, NO_VLLM = {"policy.attn_implementation": "sdpa"}, {"engine.type": "transformers"}
TRANSFORMERS = "engine.type=transformers"


def _vllm(name: str, function: str, limit_s: float, *arguments: str) -> Step:
    return Step(name, function, limit_s, arguments, package="vllm", keys=NO_VLLM)


def _memory(name: str, function: str, *arguments: str, gb: float) -> Step:
    function = f"benchmarks.gpu_memory:{function}"
    return Step(name, function, 120, arguments, gb, needs_large_gpu=True)


STEPS = (
    Step("machine", f"{_HERE}.gpu_machine:machine", 60, gb=ALONE),
    Step("kernels", f"{_HERE}.gpu_steps:kernels", 120, keys=KERNEL),
    Step("renderers", f"{_HERE}.gpu_steps:renderers", 120),
    _vllm("vllm_adapter", ENGINE, 180, "adapter", "quickstart"),
    _vllm("vllm_deepstack", ENGINE, 180, "deepstack", "tiny_qwen_image_21"),
    _vllm("vllm_grammar", ENGINE, 180, "grammar", "tiny_earl"),
    _vllm("loop_vllm", LOOP, 240, "quickstart", "engine.type=vllm"),
    Step("loop_edit", LOOP, 180, ("quickstart", TRANSFORMERS)),
    Step("loop_image_21", LOOP, 180, ("tiny_qwen_image_21", TRANSFORMERS)),
    Step("loop_earl", LOOP, 180, ("tiny_earl", TRANSFORMERS)),
    Step("loop_prompts", LOOP, 180, ("tiny_prompts", TRANSFORMERS)),
    Step("loop_reasoning", LOOP, 180, ("tiny_reasoning", TRANSFORMERS)),
    Step("collectives", f"{_HERE}.gpu_machine:collectives", 180),
    _memory("memory_image_21", "transformer", "qwen_image_21", gb=30),
    _memory("memory_policy", "policy", gb=35),
    _memory("memory_edit", "transformer", "qwen_image_edit", gb=55),
    replace(_vllm("vllm_sleep", SLEEP, 120, "quickstart"), gb=ALONE, needs_gpu=True),
)
"""In order of worth. Most run side by side. vLLM's sleep asserts that the GPU's free memory grows,
so nothing else may allocate meanwhile."""


@printing.program
def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    printing.guard()
    parser = printing.Parser("rl check-gpu", f"{__doc__}{printing.KEY_VALUE}")
    parser.add_argument("config", nargs="?", default="", help="check whether it fits, too")
    parser.add_overrides()
    engines, text = ("vllm", "transformers"), "transformers: no step uses vLLM"
    parser.add_argument("--engine", choices=engines, default="vllm", help=text)
    add_options(parser, "steps", STEPS, 600)
    args = parser.parse_intermixed_args(argv)
    if args.config:
        build.resolve(load_config(args.config, args.overrides))
    steps = [step for step in STEPS if args.engine == "vllm" or step.package != "vllm"]
    return run_all(parser, args, steps, args.config, args.overrides)


if __name__ == "__main__":
    sys.exit(main())
