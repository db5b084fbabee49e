"""THE LOOP: sample, render, judge, learn, sync. Read this file first.

What: one iteration, in the order things happen; each line is a verb, and who holds the device is
visible. What not: what any verb does (see the rooms), or which system runs (see the config).
Started on every rank by `simple_launch.py`: `python -m rl.train config.jsonnet [key=value ...]`.

Left out on purpose: callbacks, a registry, a trainer class to subclass. A new policy, renderer,
reward or data source is a file in its room.

Axes: `_P` prompts on this rank, `_G` completions in a group.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rl import build, summary
from rl.config import load_config
from rl.opening import RunFinishedError, open_run
from rl.rollout import training_sequences
from rl.run import Run
from rl.system import mistakes, signals
from rl.system.dist import Dist
from rl.system.seeding import derive_seed


def main(argv: Sequence[str] | None = None) -> None:
    """Train, or go on training, the run that the config names."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args:
        sys.exit("usage: python -m rl.train config.jsonnet [key=value ...]")
    config = load_config(args[0], args[1:])
    signals.install()
    dist = Dist.from_env(str(config.policy.get("device", "auto")))
    try:
        with open_run(config, dist) as run:
            train(run)
    except RunFinishedError as finished:
        if dist.is_main:
            print(finished)
    dist.close()


def train(run: Run) -> None:
    """From where the run stands to its last iteration, or until it is asked to stop."""
    config, dist, timer = run.config, run.dist, run.timer
    policy, engine, learner = run.policy, run.engine, run.learner
    sampling = build.sampling_params(config)

    metrics = run.sync_engine()
    if run.start == 0:
        metrics.update(run.evaluate_if_due(0))
        run.log(0, metrics)
    done = run.start
    for iteration in range(run.start, run.num_iterations):
        run.open_journal("iteration", iteration)
        with timer.phase("prompts"):
            prompts_P = run.sampler.shard(
                iteration, dist.rank, dist.world_size, policy.build_prompt
            )
            first = dist.rank * len(prompts_P)
            groups_P = [f"{iteration}/{first + p}" for p in range(len(prompts_P))]
        with timer.phase("generate") as phase:
            seeds_P = [derive_seed(config.seed, "sampling", group) for group in groups_P]
            completions_PG = engine.generate(prompts_P, sampling, seeds_P)
            phase.note(summary.size_of(completions_PG))
        engine.sleep()
        noise_P = [derive_seed(config.seed, "noise", group) for group in groups_P]
        rollout = run.collect(prompts_P, completions_PG, noise_P, groups_P, done)
        if rollout is None:
            break
        episodes_PG = rollout.episodes
        advantages_PG, metrics = summary.group_rewards(config, iteration, rollout, dist)
        with timer.phase("learn") as phase:
            sequences = training_sequences(config, policy, iteration, episodes_PG, advantages_PG)
            metrics.update(learner.update(sequences, iteration))
            phase.note(f"{len(sequences)} completions")
        engine.wake()
        with timer.phase("sync"):
            metrics.update(run.sync_engine())
        done = iteration + 1
        with timer.phase("record"):
            run.log_episodes(done, episodes_PG, advantages_PG)
        metrics.update(run.evaluate_if_due(done))
        run.log(done, metrics)
        run.save_if_due(done)
        if signals.stop_requested(dist):
            break
    if done < run.num_iterations:
        run.save(done, final=True)
        run.console.say(f"stopped after {done} iterations; the same command goes on from here")
    run.console.where_time_went(timer)


if __name__ == "__main__":
    sys.excepthook = mistakes.excepthook
    main()
