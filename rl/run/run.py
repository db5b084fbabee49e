"""Everything around an iteration: the run in the loop's order, and its records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from shlex import quote

from rl.algorithm.metrics import Metrics
from rl.api.engine import Engine
from rl.api.types import Completion, Episode, Prompt, Sample
from rl.config.schema import RunConfig
from rl.judge.client import JudgeClient, JudgeStats
from rl.learner.learner import Learner, SyncReport, sync
from rl.learner.train_step import TrainStep
from rl.meter import take_peak_memory_gb
from rl.progress import Console, PhaseTimer, warn
from rl.ranks import signals
from rl.ranks.dist import Dist
from rl.record.run_record import BackgroundWriter, RunRecord
from rl.rollout.episodes import Interrupted, PromptOrder, raise_if_interrupted
from rl.rollout.stream import (
    Advantages,
    GradedGroup,
    PendingRollout,
    Rollout,
    RolloutContext,
    Sampled,
    begin,
)
from rl.run.checks import Checks, TooManyFailuresError
from rl.run.evaluation import evaluate
from rl.run.follower import Follower
from rl.run.saving import Checkpointing, save_before_leaving

# ---- recording -----------------------------------------------------------------------------------
# Writes and prints a run's iterations: metrics, episodes.


@dataclass(eq=False)
class Recording:
    """Writes a run's metrics and episodes to disk and console; every rank has one."""

    console: Console
    record: RunRecord
    follower: Follower
    """Shows the run, in a process of its own that reads these files."""
    writer: BackgroundWriter
    """Writes everything about an iteration in the background, in order."""
    num_iterations: int
    last_metrics: Mapping[str, float] = field(default_factory=dict)
    """The last line of metrics that was written."""

    def write_line(self, done: int, line: Mapping[str, float]) -> None:
        """Write the line to the record, and print it."""
        self.last_metrics = line
        write = partial(self.record.write_metrics, done, line)
        self.writer.put(f"the metrics of iteration {done}", write)
        self.console.iteration(done, self.num_iterations, line)
        self.follower.look()

    def write_episodes(
        self, done: int, groups_P: Sequence[GradedGroup], bare_P: Sequence[Episode | None] = ()
    ) -> None:
        """Write provenance and pictures of an iteration. `bare_P`: bare variants by `group.p`."""
        episodes_PG = [[_off_device(episode) for episode in group.episodes] for group in groups_P]
        advantages_PG = [group.advantages for group in groups_P]
        arms_P = [bare_P[group.p] if bare_P else None for group in groups_P]
        bare_arms_P = [None if arm is None else _off_device(arm) for arm in arms_P]
        write = partial(self.record.write_episodes, done, episodes_PG, advantages_PG, bare_arms_P)
        self.writer.put(f"the record of iteration {done}", write)

    def end(self) -> None:
        """Wait until everything is on disk, then print what comes next."""
        self.writer.flush()
        run = quote(str(self.record.run_dir))
        if self.follower.makes_page:
            self.console.say(f"page: {run}/report/index.html")
        self.console.say(f"what it learnt: rl report {run}\nuse it: rl edit --run {run} ...")


def _off_device(episode: Episode) -> Episode:
    """The episode without its tensors on the device, which would stay there until it is written."""
    return replace(episode, prompt=replace(episode.prompt, images=(), model_inputs={}))


# ---- run -----------------------------------------------------------------------------------------
# One run: its parts, and the steps of an iteration (iteration 0 is before training).

OF_ONE = (
    "the judge was asked for scores from 0 to 10, and all of the first iteration are at most 1, "
    "some of them fractions: it seems to grade from 0 to 1, so each reward is a tenth of what it "
    "means; use a judge that keeps to the scale, or a prompt that states it more clearly"
)


@dataclass(frozen=True, eq=False)
class PendingStep:
    """A rolled-out iteration whose optimizer step has not run; judge replies may be outstanding."""

    iteration: int
    rollout: PendingRollout
    train_step: TrainStep

    def is_waiting(self) -> bool:
        """Whether a grade is missing and no stop is requested."""
        return self.rollout.still_waiting() and not signals.stop_received()


@dataclass(eq=False)
class Run:
    """All parts of one run."""

    config: RunConfig
    dist: Dist
    timer: PhaseTimer
    judges: Mapping[str, JudgeClient]
    """By the keys of `Resolved.by_judge`."""
    judge_passed: bool | None
    """Whether all judges that train have passed an audit; None: they need not."""
    context: RolloutContext
    """Policy, renderer and rewards."""
    engine: Engine
    learner: Learner
    prompt_order: PromptOrder
    held_out: Sequence[Sample]
    probe: Prompt
    """Prompt on which the inference engine and the trainer are compared after every sync."""
    checks: Checks
    recording: Recording
    checkpointing: Checkpointing
    num_iterations: int
    sync_dtype: str
    num_skipped_rows: int
    """Rows of the training data that cannot be used, under `data.on_bad_row: 'skip'`."""
    start: int = 0
    """Iterations finished when the run was opened."""
    metrics_line_missing: bool = True
    """Whether the last finished iteration has no line of metrics: no iteration is finished, or the
    run ended between writing its checkpoint and its line."""
    last_sync: SyncReport | None = None
    """The sync that gave the engine its current weights."""

    def sync_engine(self) -> Metrics:
        """Send the learner's weights to the engine and verify that they arrived."""
        report = sync(
            self.engine,
            self.learner,
            self.probe,
            self.sync_dtype,
            self.config.sampling.temperature,
            self.last_sync,
            self.config.sampling.max_completion_tokens,
        )
        if self.last_sync is None and not report.read_back and self.dist.is_main:
            warn(
                "the inference engine cannot read back the weights it holds "
                "(Engine.held_fingerprint), so a sync that loses some of them is not noticed"
            )
        self.last_sync = report
        metrics = Metrics()
        metrics.add("sync/mean_abs_dlogp", report.mean_dlogp_nats)
        return metrics

    def bare_arms(self, prompts_P: Sequence[Prompt]) -> list[Completion | None]:
        """Each prompt's bare variant (the user's own words); None unless bare_arm is 'always'."""
        always = self.config.bare_arm == "always" and self.context.makes_images
        policy = self.context.policy
        return [policy.pass_through_completion(p.sample) if always else None for p in prompts_P]

    def render(self, sampled: Sampled, train_step: TrainStep) -> PendingRollout:
        """Render every picture and submit it to the rewards. Raises `Interrupted` on every rank if
        any was asked to stop."""
        pending = None
        with suppress(Interrupted):
            pending = begin(self.context, sampled, train_step, self.timer, signals.stop_received)
        if signals.stop_requested(self.dist):
            if pending is not None:
                pending.cancel()
            raise Interrupted
        assert pending is not None, "interrupted without a signal"
        if self.config.max_staleness:
            with self.timer.phase("condition"):
                train_step.compute_old_logprobs()
        return pending

    def graded_groups(self, pending: PendingStep) -> Iterator[GradedGroup]:
        """Yield each group as soon as its grades have arrived and its advantages are known.

        Raises on every rank: `Interrupted` once any was asked to stop, `TooManyFailuresError` if
        the judge or the renderer fails too often. Raises `JudgeRefused` if the judge is set up
        wrongly.
        """
        advantages = Advantages(self.config, self.context.policy, pending.iteration, self.dist)
        with suppress(Interrupted):
            for p, episodes_G in pending.rollout.groups(self.timer, signals.stop_received):
                yield from advantages.add(p, episodes_G)
        raise_if_interrupted(self.dist)
        self.checks.check_failures(pending.rollout.finished())
        yield from advantages.rest()

    def rollout_metrics(self, rollout: Rollout, iteration: int) -> Metrics:
        """Metrics of an iteration's episodes and those that its plugins report. Collective."""
        self.timer.model_flops += sum(
            self.context.policy.train_flops(
                len(episodes_G[0].prompt.token_ids),
                [len(episode.completion.token_ids) for episode in episodes_G],
            )
            for episodes_G in rollout.episodes
        )
        metrics = self.checks.metrics(rollout)
        ids = [episodes_G[0].prompt.sample.id for episodes_G in rollout.episodes]
        by_rank = self.dist.gather((ids, self.prompt_order.num_replaced))
        num_ids = len({each for ids, _ in by_rank for each in ids})
        # A row that replaces an unusable one may be drawn by itself, too.
        num_expected = self.prompt_order.num_distinct(iteration) - sum(num for _, num in by_rank)
        metrics.maximum("data/repeated_prompts", max(0, num_expected - num_ids))
        return metrics

    def may_sample(self, sampled: int, done: int) -> bool:
        """Whether iteration `sampled` may be rolled out when `done` iterations are applied.

        At most `max_staleness` ahead, and not across a checkpoint or an evaluation: a resumed run
        has no pending rollout there, so an uninterrupted run must not have one either.
        """
        if sampled == done:
            return True
        if sampled - done > self.config.max_staleness or sampled >= self.num_iterations:
            return False
        return not (self.checkpointing.checkpoints.due(sampled) or self._evaluation_due(sampled))

    def evaluate_if_due(self, done: int) -> Metrics:
        """Evaluate the held-out samples after `done` iterations, if due; returns the metrics."""
        if not self._evaluation_due(done):
            return Metrics()
        self.open_journal("evaluation", done)
        metrics = evaluate(
            self.context,
            self.engine,
            self.held_out,
            done,
            self.config.run_dir,
            self.dist,
            self.timer,
            self.checkpointing.writer,
            self.learner,
        )
        metrics.update(self.checks.plugin_metrics.after_evaluation())
        return metrics

    def _evaluation_due(self, done: int) -> bool:
        every = self.config.evaluation.every_n_iterations
        if not every or not self.held_out:
            return False
        return done % every == 0 or done == self.num_iterations

    def open_journal(self, name: str, iteration: int) -> None:
        """Open the files of the judges' replies, which a repeated iteration reuses."""
        for key, judge in self.judges.items():
            prefix = "" if key == "judge" else f"{key}."
            file = f"{prefix}{name}_{iteration:06d}.rank{self.dist.rank}.jsonl"
            judge.open_journal(self.config.run_dir / "judge" / file)

    def log(self, done: int, metrics: Metrics) -> None:
        """Write a line of metrics of all ranks to record and console. Collective."""
        for key, judge in self.judges.items():
            stats = judge.take_stats()
            _add_judge_stats(metrics, stats)
            is_of_one = max(stats.of_ten, default=2) <= 1 and any(0 < s < 1 for s in stats.of_ten)
            if is_of_one and done == self.start + 1 and self.dist.is_main:
                warn(f"{key}: {OF_ONE}")
        metrics.maximum("judge/audit_passed", self.judge_passed)
        metrics.maximum("data/skipped_rows", self.num_skipped_rows)
        metrics.total("data/replaced_rows", self.prompt_order.num_replaced)
        metrics.maximum("memory/peak_gb", take_peak_memory_gb(self.dist.device))
        finished = self.checkpointing.last_finished.latest.metrics
        line = {**self.dist.reduce(metrics), **finished, **self.timer.lap()}
        self.checks.check_line(line)
        self.recording.write_line(done, line)
        self.checkpointing.publish(done, line)

    def stop(self) -> None:
        """Save, and print how to continue. Collective."""
        done = self.checkpointing.last_finished.latest.done
        self.checkpointing.save(final=True)
        self.checkpointing.publish(done, self.recording.last_metrics, final=True)
        self.recording.console.say(
            f"stopped after {done} iterations; the same command resumes from here"
        )

    def save_before_leaving(self, error: BaseException) -> None:
        """Save the last finished iteration when an error ends the run."""
        if isinstance(error, TooManyFailuresError):
            for judge in self.judges.values():
                judge.drop_unusable()  # a judge that was fixed is asked these questions again
        save_before_leaving(
            self.checkpointing.last_finished, self.checkpointing.checkpoints, self.dist, error
        )


def _add_judge_stats(metrics: Metrics, stats: JudgeStats) -> None:
    counts = {
        "requests": stats.requests,
        "reused_replies": stats.reused,
        "retries": sum(stats.retries.values()),
        "breaker_openings": stats.breaker_openings,
        "throttled_requests": stats.throttled,
        "failed_transport": stats.failed["transport"],
        "failed_unreadable": stats.failed["unreadable"],
        "other_model_replies": stats.other_model,
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.completion_tokens,
    }
    for name, count in counts.items():
        metrics.total(f"judge/{name}", count)
    if stats.latencies_s:
        ordered = sorted(stats.latencies_s)
        metrics.maximum("judge/latency_p50_s", ordered[len(ordered) // 2])
        metrics.maximum("judge/latency_p95_s", ordered[int(len(ordered) * 0.95)])
        metrics.maximum("judge/latency_max_s", ordered[-1])
