"""The training loop, in the order in which things happen. `examples/nano.py` is the whole method in
one file; here are its steps, on all ranks and overlapping. docs/glossary.md explains the words.

Axes: `_P` prompts on this rank, `_G` completions in a group. Iterations count from 0; metrics and
checkpoints are numbered by how many iterations are done.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections import deque
from collections.abc import Sequence

from rl import build, printing
from rl.algorithm.metrics import Metrics
from rl.api.types import SamplingParams
from rl.config.schema import RunConfig
from rl.ranks import signals
from rl.ranks.dist import Dist
from rl.ranks.worker import leave
from rl.rollout.episodes import Interrupted, raise_if_interrupted
from rl.rollout.stream import Sampled
from rl.run.episode_metrics import size_text
from rl.run.follower import wait_for_last_rows
from rl.run.run import PendingStep, Run
from rl.run.set_up import NothingToDoError, load_in_rank, open_run
from rl.seeds import derive_seed


def main(argv: Sequence[str] | None = None) -> None:
    """Start or resume the run that the config names."""
    printing.guard(keeps_going=True)
    args = list(sys.argv[1:] if argv is None else argv)
    if not args:
        sys.exit("usage: python -m rl.train config.jsonnet [key=value ...]")
    config = load_in_rank(args[0], args[1:])
    signals.install()
    dist = Dist.from_env(str(config.policy.get("device", "auto")))
    try:
        with build.naming_plugins(build.resolve(config)), open_run(config, dist) as run:
            gc.set_threshold(700)  # rl/__init__.py raised it; frees tensors in cycles early
            train(run)
    except NothingToDoError as reason:
        if dist.is_main:
            print(reason)
    dist.close()
    if dist.is_main:
        wait_for_last_rows(config.run_dir, signals.stop_received)


def train(run: Run) -> None:
    """Run the iterations after the last finished one, to the end or until a request to stop.

    On-policy, `roll_out` and `learn_from` alternate. Under `max_staleness: 1`, iteration i + 1 is
    rolled out while the judge grades iteration i; the old log-probs are then computed at rollout.
    """
    num_done = num_sampled = run.start
    pending_steps: deque[PendingStep] = deque()
    try:
        metrics = run.sync_engine()
        if run.metrics_line_missing:
            # Line 0 is the state before training. A resumed run writes the line that a kill lost,
            # whose metrics came with the checkpoint.
            measure(run, num_done, Metrics() if num_done else metrics)
        while num_done < run.num_iterations:
            while run.may_sample(num_sampled, num_done):
                pending_steps.append(roll_out(run, num_sampled))
                num_sampled += 1
            learn_from(run, pending_steps.popleft())
            num_done += 1
            raise_if_interrupted(run.dist)
    except Interrupted:
        for pending in pending_steps:
            pending.rollout.cancel()
        run.stop()
    except BaseException as error:
        run.save_before_leaving(error)
        raise
    run.recording.end()


def roll_out(run: Run, iteration: int) -> PendingStep:
    """Sample completions and start rendering and grading. Raises `Interrupted` if asked to stop."""
    config, dist, timer = run.config, run.dist, run.timer
    run.open_journal("iteration", iteration)
    with timer.phase("prompts"):
        prompts_P = run.prompt_order.shard(
            iteration, dist.rank, dist.world_size, run.context.policy.build_prompt
        )
        first = dist.rank * len(prompts_P)  # ids, and so seeds, do not depend on the ranks
        group_ids_P = [f"{iteration}/{first + p}" for p in range(len(prompts_P))]
    run.engine.wake()
    with timer.phase("generate") as phase:
        seeds_P = [derive_seed(config.seed, "sampling", group) for group in group_ids_P]
        completions_PG = run.engine.generate(prompts_P, sampling_params(config), seeds_P)
        phase.note(size_text(completions_PG))
    run.engine.sleep()
    noise_seeds_P = [derive_seed(config.seed, "noise", group) for group in group_ids_P]
    # Beside each group the user's own words are drawn and judged: a baseline, never trained.
    bare_P = run.bare_arms(prompts_P)
    sampled = Sampled(prompts_P, completions_PG, noise_seeds_P, group_ids_P, bare_P)
    num_trained_P = [len(completions_G) for completions_G in completions_PG]
    train_step = run.learner.begin(iteration, prompts_P, sampled.token_ids, num_trained_P)
    # The renderer pulls jobs; each pull runs the train step's forward, whose hidden states it draws
    # from, and whose graph the backward uses.
    return PendingStep(iteration, run.render(sampled, train_step), train_step)


def sampling_params(config: RunConfig) -> SamplingParams:
    """How training completions are drawn."""
    return SamplingParams(
        temperature=config.sampling.temperature,
        top_p=config.sampling.top_p,
        top_k=config.sampling.top_k,
        max_tokens=config.sampling.max_completion_tokens,
        num_completions=config.generations_per_prompt,
    )


def learn_from(run: Run, pending: PendingStep) -> None:
    """Take the optimizer steps, sync the engine, and record. Raises `Interrupted` if asked to stop.

    A group's backward runs while the judge grades others, unless the ranks must run it together. It
    divides by the planned number of tokens; `step` rescales the gradient to the graded ones.
    """
    timer, train_step, done = run.timer, pending.train_step, pending.iteration + 1
    with timer.phase("learn"):  # the wait for the judge is a phase inside it
        train_step.work_ahead(pending.is_waiting)
        groups = []  # as they are graded
        for group in run.graded_groups(pending):
            train_step.accumulate(group.p, group.sequences)
            groups.append(group)
        rollout = pending.rollout.finished()
        metrics = run.rollout_metrics(rollout, pending.iteration)
        metrics.update(train_step.step())
    run.engine.wake()  # until the next rollout has sampled
    with timer.phase("sync"):
        metrics.update(run.sync_engine())
    with timer.phase("record"):
        # Keeps the metrics, too; `run.log` writes them.
        run.checkpointing.last_finished.note(done, run.dist.reduce(metrics))
        run.recording.write_episodes(done, groups, rollout.bare_episodes)
    run.checkpointing.save_if_due(done, timer)
    measure(run, done, Metrics())


def measure(run: Run, done: int, metrics: Metrics) -> None:
    """Run the evaluation if it is due, write the metrics line, and publish both."""
    metrics.update(run.evaluate_if_due(done))
    run.log(done, metrics)


if __name__ == "__main__":
    sys.excepthook = signals.excepthook
    exit_codes: list[int] = []
    if "TORCHELASTIC_RUN_ID" in os.environ:  # by torchrun; in a worker, that leaves itself
        atexit.register(leave, exit_codes)
    main()
    exit_codes.append(0)
