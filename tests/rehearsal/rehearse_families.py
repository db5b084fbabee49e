"""Rehearses each family at its real widths with two layers, and prints the result as JSON; a script
of its own, because the fake GPU has to be loaded before torch is."""

from __future__ import annotations

import json
import sys
from unittest import mock

from rl.check.memory_plan import PHASES
from rl.tools.commands.rehearse import load_cuda_guard

SMALL = ["prompts_per_iteration=1", "world_size=1", "generations_per_prompt=3"]
FULL_BATCH = "renderer.batch_size=4"  # three completions and the bare arm
DEPTH = 2  # of a case with a planted fault: 1


def main(cases: list[str]) -> None:
    """`cases`: 'config', or 'config, planted fault'."""
    load_cuda_guard()
    from rl.config.schema import load_config
    from rl.tools.rehearsal import lines, peaks_gb, rehearse

    results = {}
    for case in cases:
        name, _, fault = case.partition(", ")
        changes = [*SMALL, "base_exp_dir=nothing", "run_name=rehearsed"]
        if name != "vlm_reasoning":
            changes.append(FULL_BATCH)
        try:
            with planted(fault):
                config = load_config(f"configs/{name}.jsonnet", changes)
                done = rehearse(config, 1 if fault else DEPTH)
        except RuntimeError as error:
            results[case] = {"error": str(error)}
            continue
        assert done.plan is not None
        results[case] = {
            "rehearsed": peaks_gb(done),
            "planned": {phase: done.plan.total_gb(phase) for phase in PHASES},
            "tflop": {phase: count / 1e12 for phase, count in done.tally.flops.items()},
            "text": list(lines(done)),
        }
    print(json.dumps(results))


def planted(fault: str) -> mock._patch[object]:
    """A fault in the render loop of Qwen-Image-Edit; '': none."""
    from rl.renderers.qwen_image_denoiser import Denoiser, StepModulation

    velocity = Denoiser.velocity

    def float32(self, latents, conditioning, step):  # type: ignore[no-untyped-def]
        return velocity(self, latents.float(), conditioning, step)

    if fault == "on the CPU":
        return mock.patch.object(StepModulation, "to", lambda self, device: self)
    return mock.patch.object(Denoiser, "velocity", float32 if fault else velocity)


if __name__ == "__main__":
    main(sys.argv[1:])
