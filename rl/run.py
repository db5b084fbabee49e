"""One run, opened: every part made, the last checkpoint restored, everything closed at the end.

What: `open_run` and the few things that happen around an iteration rather than in it (log, save,
evaluate). What not: the loop (`train.py`) and how parts are made (`build.py`).

Iterations are counted from 1 on disk and on screen: `step_000010` holds ten finished ones, and
iteration 0 is what was measured before training.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rl import build
from rl.algorithm.metrics import Metrics
from rl.config import RunConfig
from rl.evaluate import evaluate
from rl.learner import Learner
from rl.rollout import Crew, Interrupted, collect
from rl.sampler import PromptSampler, first_samples
from rl.summary import TooManyFailuresError, check_failure_rate
from rl.sync import sync
from rl.system import hub, signals
from rl.system.background import BackgroundLoop
from rl.system.checkpoint import Checkpoints
from rl.system.console import Console, PhaseTimer, warn
from rl.system.dist import Dist
from rl.system.judge_client import JudgeClient, JudgeError
from rl.system.judge_endpoint import resolve_api_base
from rl.system.metric_names import check_known
from rl.system.record import RunRecord
from rl.system.resume import check_resume
from rl.system.seeding import rng_state, seed_everything, set_rng_state
from rl.system.tracking import Tracker
from rl.tiny_world.judge_server import JudgeServer
from rl.types import (
    Completion,
    DataSource,
    Engine,
    Episode,
    Policy,
    Prompt,
    Renderer,
    Sample,
)


class RunFinishedError(Exception):
    """Nothing is left to do; found before anything heavy is loaded."""


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
    judge: JudgeClient | None
    crew: Crew
    policy: Policy
    engine: Engine
    learner: Learner
    sampler: PromptSampler
    held_out: Sequence[Sample]
    probe: Prompt
    """What the sampler and the trainer are compared on after every sync."""
    num_iterations: int
    sync_dtype: str
    num_skipped_rows: int
    """Rows of the training data that cannot be used, under `data.on_bad_row: 'skip'`."""
    start: int = 0
    """Iterations finished when the run was opened."""
    fingerprint: str | None = None
    """Of the weights that the engine holds."""
    last_metrics: Mapping[str, float] = field(default_factory=dict)
    """The last line written, for the model card."""

    def sync_engine(self) -> Metrics:
        """Give the engine the learner's weights and prove that they arrived."""
        report = sync(
            self.engine,
            self.learner,
            self.probe,
            self.sync_dtype,
            self.fingerprint,
            self.config.sampling.temperature,
        )
        self.fingerprint = report.fingerprint
        metrics = Metrics()
        metrics.add("sync/mean_abs_dlogp", report.mean_dlogp_nats)
        return metrics

    def collect(
        self,
        prompts_P: Sequence[Prompt],
        completions_PG: Sequence[Sequence[Completion]],
        noise_seeds_P: Sequence[int],
        group_ids_P: Sequence[str],
        done: int,
    ) -> list[list[Episode]] | None:
        """The iteration's graded episodes; None, on every rank, once any was asked to stop.

        A judge that refuses, or fails too often, stops the run on every rank together: its `done`
        finished iterations are saved first. Raises `JudgeError` or `TooManyFailuresError`.
        """
        episodes_PG, refusal = None, ""
        try:
            episodes_PG = collect(
                self.crew, prompts_P, completions_PG, noise_seeds_P, group_ids_P, self.timer,
                signals.stop_heard,
            )  # fmt: skip
        except Interrupted:
            pass  # the others hear of it below
        except JudgeError as error:
            refusal = str(error)
        refusals = [text for text in self.dist.gather(refusal) if text]
        if refusals:
            self._save_finished(done)
            raise JudgeError(refusals[0])
        if signals.stop_requested(self.dist):
            return None
        assert episodes_PG is not None, "interrupted without a signal"
        try:
            check_failure_rate(self.config, episodes_PG, self.dist)
        except TooManyFailuresError:
            self._save_finished(done)
            raise
        return episodes_PG

    def _save_finished(self, done: int) -> None:
        """Before the run is stopped by its judge. A first iteration that fails leaves nothing: its
        config is likely wrong, and a checkpoint would forbid to mend it under this run_name."""
        if done > 0:
            self.save(done)

    def evaluate_if_due(self, done: int) -> Metrics:
        """The held-out run, after `done` iterations, if the config asks for one now."""
        every = self.config.evaluation.every_n_iterations
        if not every or not self.held_out:
            return Metrics()
        if done % every and done != self.num_iterations:
            return Metrics()
        self.open_journal("evaluation", done)
        return evaluate(
            self.crew, self.engine, self.held_out, done, self.run_dir, self.dist, self.timer
        )

    def open_journal(self, name: str, iteration: int) -> None:
        """Judge replies are kept per iteration: one that is done again pays for none twice."""
        if self.judge is not None:
            file = f"{name}_{iteration:06d}.rank{self.dist.rank}.jsonl"
            self.judge.open_journal(self.run_dir / "judge" / file)

    def log(self, done: int, metrics: Metrics) -> None:
        """Write one line of metrics, for all ranks, to every place that shows them."""
        if self.judge is not None:
            _add_judge_stats(metrics, self.judge)
        metrics.maximum("data/skipped_rows", self.num_skipped_rows)
        metrics.total("data/replaced_rows", self.sampler.num_replaced)
        reduced = self.dist.reduce(metrics) | self.timer.lap()
        check_known(reduced)
        self.last_metrics = reduced
        with _tolerated("metrics"):
            self.record.write_metrics(done, reduced)
        self.tracker.log(done, reduced)
        self.console.iteration(done, self.num_iterations, reduced)

    def log_episodes(
        self,
        done: int,
        episodes_PG: Sequence[Sequence[Episode]],
        advantages_PG: Sequence[Sequence[float | None]],
    ) -> None:
        """Provenance and pictures of an iteration."""
        with _tolerated("episodes"):
            self.record.write_episodes(done, episodes_PG, advantages_PG)
        self.tracker.log_episodes(done, episodes_PG, advantages_PG)

    def save(self, done: int, final: bool = False) -> None:
        """Write the checkpoint of `done` finished iterations."""
        tensors, learner_meta = self.learner.state()
        trained = self.learner.trainable_tensors()
        meta = {"learner": learner_meta, "config": self.record.config}
        saved = self.checkpoints.save(
            done,
            tensors,
            meta,
            rng_state(),
            lambda folder: self.policy.save_pretrained(str(folder), trained),
            hub.model_card(self.record.config, done, self.last_metrics),
            final=final,
        )
        if saved is not None and self.dist.is_main:
            _forget_journals(self.run_dir / "judge", done)

    def save_if_due(self, done: int) -> None:
        """A checkpoint by cadence, and after the last iteration."""
        last = done == self.num_iterations
        if last or self.checkpoints.due(done):
            with self.timer.phase("checkpoint"):
                self.save(done, final=last)


@contextmanager
def _tolerated(what: str) -> Iterator[None]:
    """A full disk costs lines of the record, said aloud; it does not cost the run."""
    try:
        yield
    except OSError as error:
        warn(f"the {what} of this iteration could not be written: {error}")


@contextmanager
def open_run(config: RunConfig, dist: Dist) -> Iterator[Run]:
    """Make every part, restore the last checkpoint, close everything in the end.

    Raises ConfigError or ValueError for what the user can mend, and RunFinishedError, before
    anything heavy is loaded.
    """
    run_dir = Path(config.base_exp_dir) / config.run_name
    resolved = build.resolve(config)
    console = Console(dist.is_main)
    with ExitStack() as stack:
        record = RunRecord(run_dir, config, dist)
        record.claim()
        stack.callback(record.release)
        checkpoints = Checkpoints(run_dir, config.checkpoint, dist)
        newest = checkpoints.latest()
        done = 0 if newest is None else _check_config(newest, record, dist)
        seed_everything(config.seed + dist.rank)
        sources = build.build_data(resolved, resolved.train)
        sampler, held_out = _open_data(resolved, sources)
        probe_sample = sampler.shard(0, 0, config.prompts_per_iteration)[0]
        num_iterations = build.num_iterations(config, sum(len(source) for source in sources))
        num_skipped_rows = sum(source.num_skipped for source in sources)
        if num_skipped_rows:
            console.say(f"{num_skipped_rows} bad rows of data.train are left out")
        if done >= num_iterations:
            raise RunFinishedError(
                f"run {config.run_name}: all {num_iterations} iterations are done; raise "
                "num_iterations to go on, or choose another run_name"
            )
        loop = stack.enter_context(BackgroundLoop("judge"))
        judge = _open_judge(resolved, loop, stack, console)

        console.say(f"run {config.run_name} in {run_dir}: loading")
        policy = build.build_policy(resolved, dist)
        engine = build.build_engine(resolved, policy, dist)
        stack.callback(engine.close)
        renderer = build.build_renderer(resolved, dist)
        _check_states(policy, renderer)
        learner = Learner(policy, config, dist, num_iterations)
        rewards = build.build_rewards(resolved, judge)
        start = _restore(checkpoints, newest, learner, console)
        # A run stopped in its first iteration has a checkpoint of none, and measures 0 again.
        record.rewind(start if start > 0 else -1)
        record.write_config()
        tracker = Tracker(run_dir, config, dist, record.config)
        stack.push(lambda kind, error, trace: tracker.close(failed=error is not None))
        yield Run(
            config=config,
            dist=dist,
            run_dir=run_dir,
            console=console,
            timer=PhaseTimer(console),
            record=record,
            tracker=tracker,
            checkpoints=checkpoints,
            judge=judge,
            crew=Crew(config, policy, renderer, rewards, loop),
            policy=policy,
            engine=engine,
            learner=learner,
            sampler=sampler,
            held_out=held_out,
            probe=policy.build_prompt(probe_sample),
            num_iterations=num_iterations,
            sync_dtype=_engine_dtype(resolved),
            num_skipped_rows=num_skipped_rows,
            start=start,
        )


def _check_config(newest: Path, record: RunRecord, dist: Dist) -> int:
    """The iterations that the checkpoint holds.

    Raises ValueError when it was made under a config that this one breaks.
    """
    state = json.loads((newest / "state.json").read_text(encoding="utf-8"))
    for change in check_resume(state["meta"]["config"], record.config):
        if dist.is_main:
            warn(f"resuming under a changed {change}")
    return int(state["iteration"])


def _open_data(
    resolved: build.Resolved, sources: Sequence[DataSource]
) -> tuple[PromptSampler, list[Sample]]:
    """The training order and the held-out samples."""
    config = resolved.config
    on_bad_row = config.data.on_bad_row
    sampler = PromptSampler(
        sources,
        resolved.train_weights,
        config.seed,
        config.prompts_per_iteration,
        on_bad_row,
    )
    validation = build.build_data(resolved, resolved.validation)
    weights = [1.0] * len(validation)
    num_samples = config.evaluation.num_samples
    held_out = first_samples(validation, weights, num_samples, on_bad_row) if validation else []
    return sampler, held_out


def _restore(
    checkpoints: Checkpoints, newest: Path | None, learner: Learner, console: Console
) -> int:
    """Load the newest checkpoint, if there is one; returns the iterations it holds."""
    if newest is None:
        return 0
    loaded = checkpoints.load(newest)
    learner.load_state(loaded.tensors, loaded.meta["learner"])
    if loaded.rng is not None:
        set_rng_state(loaded.rng)
    console.say(f"resumed from {newest}: {loaded.iteration} iterations done")
    return loaded.iteration


def _check_states(policy: Policy, renderer: Renderer) -> None:
    """Else every picture would fail, one by one, and look like a broken renderer."""
    if renderer.state_dim not in (None, policy.state_dim):
        raise ValueError(
            f"the renderer reads hidden states of width {renderer.state_dim}, the policy writes "
            f"{policy.state_dim}: choose the text encoder that the renderer was trained with "
            "(policy.model_path, policy.init_text_encoder_from)"
        )


def _open_judge(
    resolved: build.Resolved, loop: BackgroundLoop, stack: ExitStack, console: Console
) -> JudgeClient | None:
    """Reach the judge before a model is loaded: one that is not there is found in seconds."""
    if not resolved.needs_judge:
        return None
    config = resolved.config.judge
    if config.api_base == "embedded":
        api_base = stack.enter_context(JudgeServer(config.model)).api_base
    else:
        api_base = resolve_api_base(config.api_base)
        console.say(f"asking the judge at {api_base} whether it is there")
    judge = JudgeClient(config, api_base)
    stack.callback(lambda: loop.submit(judge.aclose()).result())
    loop.submit(judge.check_health()).result()
    return judge


def _engine_dtype(resolved: build.Resolved) -> str:
    dtype = getattr(resolved.engine.config, "dtype", "auto")
    return str(resolved.policy.config.dtype if dtype == "auto" else dtype)


def _add_judge_stats(metrics: Metrics, judge: JudgeClient) -> None:
    stats = judge.take_stats()
    metrics.total("judge/requests", stats.requests)
    metrics.total("judge/reused_replies", stats.reused)
    metrics.total("judge/retries", sum(stats.retries.values()))
    metrics.total("judge/breaker_openings", stats.breaker_openings)
    if stats.latencies_s:
        ordered = sorted(stats.latencies_s)
        metrics.maximum("judge/latency_p50_s", ordered[len(ordered) // 2])
        metrics.maximum("judge/latency_p95_s", ordered[int(len(ordered) * 0.95)])
        metrics.maximum("judge/latency_max_s", ordered[-1])


def _forget_journals(folder: Path, done: int) -> None:
    """Replies of iterations that a checkpoint now covers are in the episode records."""
    for path in folder.glob("*_*.rank*.jsonl"):
        iteration = path.name.split("_")[-1].partition(".")[0]
        if int(iteration) < done:
            path.unlink()
