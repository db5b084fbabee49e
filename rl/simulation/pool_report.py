"""Lines of `rl check` about a pool of render workers."""

from __future__ import annotations

from dataclasses import replace

from rl.build import Resolved
from rl.config.schema import RenderPoolConfig
from rl.memory import footprint
from rl.memory.memory_plan import CONTEXT_GB
from rl.simulation.iteration_model import WORTH_IT, Machines, bound_by, enough_workers, simulate
from rl.simulation.phase_times import computed


def pool_lines(resolved: Resolved) -> list[str]:
    """Memory of a worker, transfer, and what the config's workers and more of them save."""
    pool = resolved.config.pool
    assert pool is not None
    workers, local = (None if pool.workers == "auto" else pool.workers), pool.local
    lines = [f"{pool.workers} workers, Ray at {pool.address}"]
    drawn_by_ranks = resolved.config.model_copy(update={"render_pool": RenderPoolConfig()})
    on_a_rank = replace(resolved, config=drawn_by_ranks)
    if planned := footprint.footprint(on_a_rank, resolved.config.gpu_gb):
        renderer = [row.gb for row in planned.rows if row.part.startswith(resolved.renderer.key)]
        lines.append(f"a worker takes {CONTEXT_GB + sum(renderer):.1f} GB of its GPU")
    try:
        times = computed(resolved)
    except ValueError as error:
        return [*lines, f"time not planned: {error}"]
    work, alone = times.iteration, Machines(judge_slots=times.slots_per_judge, local=local)
    gb = work.num_ranks * work.num_pictures * work.picture_bytes / 1e9
    lines.append(
        f"transfer: {gb:.2f} GB an iteration ({work.picture_bytes / 1e6:.1f} MB a picture)"
    )
    enough = enough_workers(work, alone)
    lines.append(f"an iteration, {times.source}:")
    for number in sorted({0, enough} | ({workers} if workers else set())):
        machines = replace(alone, workers=number)
        seconds = f"{simulate(work, machines).total_s:.4g} s"
        where = f"with {number} workers" if number else "without a pool"
        lines.append(f"  {seconds} {where}; {bound_by(work, machines)} bounds it")
    return [*lines, f"beyond {enough} workers, further ones together save less than {WORTH_IT:.0%}"]
