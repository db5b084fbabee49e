"""One run: its parts, and what happens around an iteration rather than in it.

Iterations are counted from 1 on disk and on screen: `step_000010` holds ten finished ones, and
iteration 0 is what was measured before training.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

from rl.algorithm.metrics import Metrics
from rl.api.engine import Engine
from rl.api.policy import Policy
from rl.api.types import Completion, Episode, Prompt, Sample, Status
from rl.config.schema import RunConfig
from rl.judge.client import JudgeClient
from rl.learner.learner import Learner
from rl.learner.train_step import TrainStep
from rl.learner.weight_sync import SyncReport, sync
from rl.meter.device import take_peak_memory_gb
from rl.ranks import signals
from rl.ranks.dist import Dist
from rl.record.checkpoint import Checkpoints, ResumePoint
from rl.record.console import Console, PhaseTimer, warn
from rl.record.group_panel import GroupPanel
from rl.record.model_card import model_card
from rl.record.run_record import RunRecord
from rl.record.tracking import Tracker
from rl.record.writer import BackgroundWriter
from rl.rollout.consensus import Interrupted, leave_together
from rl.rollout.graded_groups import Advantages, GradedGroup
from rl.rollout.prompt_order import PromptOrder
from rl.rollout.stream import PendingRollout, Rollout, RolloutContext, Sampled, begin
from rl.run.contents import HeldOutContents
from rl.run.episode_metrics import (
    TooManyFailuresError,
    check_failure_rate,
    check_rewards,
    failure_causes,
    rollout_metrics,
)
from rl.run.evaluation import evaluate
from rl.run.last_finished import LastFinished, save_before_leaving
from rl.run.lost_pictures import LostPictures
from rl.run.metric_table import check_known
from rl.run.page import Page
from rl.run.plug_metrics import PlugMetrics
from rl.run.rank_times import rank_times
from rl.run.watch import Watch

_JOURNAL = re.compile(r"(?:iteration|evaluation)_(\d{6,})\.rank\d+\.jsonl")


@dataclass(frozen=True, eq=False)
class PendingStep:
    """An iteration between its rollout and its optimiser step: the judge has the word."""

    iteration: int
    rollout: PendingRollout
    train_step: TrainStep

    def is_waiting(self) -> bool:
        """Whether a verdict is missing, and nobody asks to stop."""
        return self.rollout.still_waiting() and not signals.stop_heard()


@dataclass(eq=False)
class Run:
    """Everything one run holds."""

    config: RunConfig
    dist: Dist
    run_dir: Path
    console: Console
    timer: PhaseTimer
    record: RunRecord
    tracker: Tracker
    checkpoints: Checkpoints
    writer: BackgroundWriter
    """Through which all that is written of an iteration goes, in order."""
    page: Page
    judge: JudgeClient | None
    context: RolloutContext
    policy: Policy
    engine: Engine
    learner: Learner
    last_finished: LastFinished
    prompt_order: PromptOrder
    held_out: Sequence[Sample]
    probe: Prompt
    """What the inference engine and the trainer are compared on after every sync."""
    plug_metrics: PlugMetrics
    num_iterations: int
    sync_dtype: str
    num_skipped_rows: int
    """Rows of the training data that cannot be used, under `data.on_bad_row: 'skip'`."""
    start: int = 0
    """Iterations finished when the run was opened."""
    lacks_line: bool = True
    """Whether the last of them has no line of metrics: none is finished, or the run ended between
    its checkpoint and its line."""
    last_sync: SyncReport | None = None
    """What the engine holds."""
    last_metrics: Mapping[str, float] = field(default_factory=dict)
    """The last line written, for the model card."""
    last_line: int = -1
    """Iterations done when it was."""
    last_save: Future[None] | None = None
    """The last checkpoint that was handed to the writer."""
    said: set[str] = field(default_factory=set)
    """What was said and need not be said again: causes of ungraded episodes, shared samples."""

    @cached_property
    def held_out_contents(self) -> HeldOutContents:
        """What no training prompt should show."""
        return HeldOutContents(self.held_out)

    @cached_property
    def lost_pictures(self) -> LostPictures:
        """What was not drawn or not graded."""
        return LostPictures(self.config.max_render_failure_rate)

    @cached_property
    def watch(self) -> Watch:
        """Conditions over several iterations."""
        lora = self.policy.config.lora
        dropout = 0.0 if lora is None else lora.dropout
        return Watch(self.context.config, self.sync_dtype, dropout)

    @cached_property
    def group_panel(self) -> GroupPanel:
        """One group, to be read on the console."""
        return GroupPanel(self.console, self.config.tracking.show_group_every_n_iterations)

    def sync_engine(self) -> Metrics:
        """Give the engine the learner's weights and prove that they arrived."""
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
                "(Engine.held_fingerprint): a sync that loses some of them goes unseen"
            )
        self.last_sync = report
        metrics = Metrics()
        if report.mean_dlogp_nats is not None:
            metrics.add("sync/mean_abs_dlogp", report.mean_dlogp_nats)
        return metrics

    def bare_arms(self, prompts_P: Sequence[Prompt]) -> list[Completion | None]:
        """The bare arm of each prompt, if the config wants one in training."""
        wanted = self.config.bare_arm == "always" and self.context.makes_images
        return [
            self.policy.pass_through_completion(p.sample) if wanted else None for p in prompts_P
        ]

    def render(self, sampled: Sampled, train_step: TrainStep) -> PendingRollout:
        """Every picture made and every question asked. Raises `Interrupted` on every rank once any
        was asked to stop."""
        pending = None
        with suppress(Interrupted):
            pending = begin(self.context, sampled, train_step, self.timer, signals.stop_heard)
        try:
            leave_together(self.dist)
        except Interrupted:
            if pending is not None:
                pending.cancel()
            raise
        assert pending is not None, "interrupted without a signal"
        if self.config.max_staleness:
            with self.timer.phase("condition"):
                train_step.note_old_logprobs()
        return pending

    def graded_groups(self, pending: PendingStep) -> Iterator[GradedGroup]:
        """Every group once, as soon as its verdicts are in and its advantages known.

        Raises on every rank together: `Interrupted` once any was asked to stop,
        `TooManyFailuresError` for a judge or a renderer that fails too often. Raises `JudgeRefused`
        for a judge that is set up wrongly.
        """
        advantages = Advantages(self.config, self.policy, pending.iteration, self.dist)
        with suppress(Interrupted):
            for p, episodes_G in pending.rollout.groups(self.timer, signals.stop_heard):
                yield from advantages.add(p, episodes_G)
        leave_together(self.dist)
        rollout = pending.rollout.finished()
        check_rewards(rollout.reward_errors, self.dist)
        self.lost_pictures.add(rollout.pictures, self.dist)
        try:
            check_failure_rate(self.config, rollout.episodes, self.dist)
        except TooManyFailuresError:
            if self.judge is not None:
                self.judge.forget_failed()
            raise
        self._say_what_is_ungraded(rollout.episodes)
        yield from advantages.rest()

    def _say_what_is_ungraded(self, episodes_PG: Sequence[Sequence[Episode]]) -> None:
        for cause, count in failure_causes(episodes_PG).items():
            if cause.startswith(Status.UNGRADED) and cause not in self.said:
                self.said.add(cause)
                where = "said once; each is in episodes/"
                warn(f"rank {self.dist.rank}: {count} completions {cause} ({where})")

    def rollout_metrics(self, rollout: Rollout) -> Metrics:
        """What an iteration's episodes show and what its plugs report. Collective."""
        metrics = rollout_metrics(rollout, self.dist)
        self.timer.model_flops += sum(
            self.policy.train_flops(
                len(episodes_G[0].prompt.token_ids),
                [len(episode.completion.token_ids) for episode in episodes_G],
            )
            for episodes_G in rollout.episodes
        )
        metrics.update(self.lost_pictures.metrics)
        metrics.update(self.watch.add_rewards(rollout, self.dist))
        if self.held_out:
            metrics.total("data/held_out_prompts", self._say_what_is_held_out(rollout))
        metrics.update(self.plug_metrics.take(rollout.renderer_metrics))
        return metrics

    def _say_what_is_held_out(self, rollout: Rollout) -> int:
        """How many of this rank's prompts show what a held-out sample shows."""
        samples = [episodes_G[0].prompt.sample for episodes_G in rollout.episodes]
        shared = self.held_out_contents.shared(samples)
        if shared and "held-out" not in self.said:
            self.said.add("held-out")
            trained, held_out = next(iter(shared.items()))
            warn(
                f"rank {self.dist.rank}: training sample {trained} shows what held-out sample "
                f"{held_out} shows; held-out rewards are not of unseen data (said once; "
                "data/held_out_prompts counts)"
            )
        return len(shared)

    def may_sample(self, sampled: int, done: int) -> bool:
        """Whether iteration `sampled` may be rolled out when `done` are learnt from.

        Never more than `max_staleness` ahead, and never across a checkpoint or a held-out run:
        there a resumed run starts level, so one that was never stopped does too.
        """
        if sampled == done:
            return True
        if sampled - done > self.config.max_staleness or sampled >= self.num_iterations:
            return False
        return not (self.checkpoints.due(sampled) or self._evaluation_due(sampled))

    def evaluate_if_due(self, done: int) -> Metrics:
        """The held-out run, after `done` iterations, if the config asks for one now."""
        if not self._evaluation_due(done):
            return Metrics()
        self.open_journal("evaluation", done)
        metrics = evaluate(
            self.context,
            self.engine,
            self.held_out,
            done,
            self.run_dir,
            self.dist,
            self.timer,
            self.writer,
        )
        self.plug_metrics.drop()
        return metrics

    def _evaluation_due(self, done: int) -> bool:
        every = self.config.evaluation.every_n_iterations
        if not every or not self.held_out:
            return False
        return done % every == 0 or done == self.num_iterations

    def open_journal(self, name: str, iteration: int) -> None:
        """Judge replies are kept per iteration: one that is done again pays for none twice."""
        if self.judge is not None:
            file = f"{name}_{iteration:06d}.rank{self.dist.rank}.jsonl"
            self.judge.open_journal(self.run_dir / "judge" / file)

    def log(self, done: int, metrics: Metrics) -> None:
        """Write one line of metrics, for all ranks, to every place that shows them: these, and what
        the iteration was finished with."""
        if self.judge is not None:
            _add_judge_stats(metrics, self.judge)
        metrics.maximum("data/skipped_rows", self.num_skipped_rows)
        metrics.total("data/replaced_rows", self.prompt_order.num_replaced)
        metrics.maximum("memory/peak_gb", take_peak_memory_gb(self.dist.device))
        of_ranks = self.dist.gather((metrics.state(), self.timer.own_seconds()))
        reduced = {
            **Metrics.merge([state for state, _ in of_ranks]),
            **self.last_finished.metrics,
            **self.timer.lap(),
            **rank_times([seconds for _, seconds in of_ranks]),
        }
        check_known(reduced, self.plug_metrics.rows)
        self.last_metrics, self.last_line = reduced, done
        for sentence in self.watch.sentences(reduced, done == self.num_iterations):
            if self.dist.is_main:
                warn(sentence)

        # Apart: what is put may be called again, and a line is there once.
        write = partial(self.record.write_metrics, done, reduced)
        self.writer.put(f"the metrics of iteration {done}", write)
        show = partial(self.tracker.log, done, reduced)
        self.writer.put(f"the metrics of iteration {done} for wandb", show)
        if self.dist.is_main and self._evaluation_due(done):
            self.writer.put(f"the page after iteration {done}", self.page.refresh)
        self.console.iteration(done, self.num_iterations, reduced)
        self.group_panel.show()

    def log_episodes(
        self, done: int, groups_P: Sequence[GradedGroup], bare_P: Sequence[Episode | None] = ()
    ) -> None:
        """Provenance and pictures of an iteration. `bare_P`: the bare arms, by the groups' p."""
        episodes_PG = [[_as_recorded(episode) for episode in group.episodes] for group in groups_P]
        advantages_PG = [group.advantages for group in groups_P]
        arms_P = [bare_P[group.p] if bare_P else None for group in groups_P]
        recorded_P = [None if arm is None else _as_recorded(arm) for arm in arms_P]
        self.group_panel.note(done, episodes_PG, advantages_PG)

        def write() -> None:
            self.record.write_episodes(done, episodes_PG, advantages_PG, recorded_P)
            self.tracker.log_episodes(done, episodes_PG, advantages_PG)

        self.writer.put(f"the record of iteration {done}", write)

    def finish(self, done: int, metrics: Metrics) -> None:
        """Iteration `done` is applied and synced: from here on it is not lost. Collective."""
        self.last_finished.note(done, self.dist.reduce(metrics))

    def save(self, final: bool = False) -> None:
        """Write the checkpoint of the last finished iteration, after what was recorded of it.
        Collective. Where its state is held it is written beside training, unless `final`."""
        held = self.last_finished.held()
        if held is not None and not final:
            if not self.dist.is_main:
                return
            if self.last_save is not None:
                self.last_save.result()  # no more than two states in memory, and one being made
            what = f"the checkpoint of iteration {held.iteration}"
            self.last_save = self.writer.put(what, partial(self._save_held, held))
            return
        self.writer.drain()
        point = self.last_finished.read()
        if self.checkpoints.save(point, final=final) is not None and self.dist.is_main:
            _forget_journals(self.run_dir / "judge", self.last_finished.done)
        self.writer.flush()  # an error before this does not keep what is finished off the disk

    def _save_held(self, point: ResumePoint) -> None:
        if self.checkpoints.save_alone(point) is not None:
            _forget_journals(self.run_dir / "judge", point.iteration)

    def save_before_leaving(self, error: BaseException) -> None:
        """However the run ends; see the function."""
        save_before_leaving(self.last_finished, self.checkpoints, self.dist, error)

    def publish(self, done: int, final: bool = False) -> None:
        """Of the checkpoint of that iteration, if there is one: its card, and a push if due."""
        if self.dist.is_main:
            card = partial(model_card, self.record.config, done, self.last_metrics)
            final = final or done == self.num_iterations
            publish = partial(self.checkpoints.publish, done, card, final)
            self.writer.put(f"the model card of iteration {done}", publish)

    def stop(self) -> None:
        """It was asked to: save, and say so. Collective."""
        done = self.last_finished.done
        self.save(final=True)
        self.publish(done, final=True)
        self.console.say(f"stopped after {done} iterations; the same command goes on from here")

    def save_if_due(self, done: int) -> None:
        """A checkpoint by cadence, and after the last iteration."""
        last = done == self.num_iterations
        if last or self.checkpoints.due(done):
            with self.timer.phase("checkpoint"):
                self.save(final=last)


def _as_recorded(episode: Episode) -> Episode:
    """Without what lies on the device, which an episode that waits to be written would hold."""
    return replace(episode, prompt=replace(episode.prompt, images=(), model_inputs={}))


def _add_judge_stats(metrics: Metrics, judge: JudgeClient) -> None:
    stats = judge.take_stats()
    metrics.total("judge/requests", stats.requests)
    metrics.total("judge/reused_replies", stats.reused)
    metrics.total("judge/retries", sum(stats.retries.values()))
    metrics.total("judge/breaker_openings", stats.breaker_openings)
    metrics.total("judge/throttled_requests", stats.throttled)
    metrics.total("judge/other_model_replies", stats.other_model)
    if stats.latencies_s:
        ordered = sorted(stats.latencies_s)
        metrics.maximum("judge/latency_p50_s", ordered[len(ordered) // 2])
        metrics.maximum("judge/latency_p95_s", ordered[int(len(ordered) * 0.95)])
        metrics.maximum("judge/latency_max_s", ordered[-1])


def _forget_journals(folder: Path, done: int) -> None:
    """Replies of iterations that a checkpoint now covers are in the episode records."""
    for path in folder.glob("*.jsonl"):
        match = _JOURNAL.fullmatch(path.name)
        if match and int(match[1]) < done:
            path.unlink()
