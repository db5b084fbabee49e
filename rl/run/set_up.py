"""Opens a run: makes its parts, restores the last checkpoint, and closes everything at the end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from rl import build
from rl.api.data import DataSource
from rl.api.engine import Engine, EngineClaim
from rl.api.policy import Policy
from rl.api.renderer import Renderer
from rl.api.types import Sample
from rl.check.ask_judge import START_PATIENCE_S, JudgeCheck, ask_judge
from rl.check.judge_verdict import judge_passed
from rl.check.memory_remedies import engine_dtype
from rl.check.resume import check_resume
from rl.config.schema import JudgeConfig, RunConfig
from rl.console import Console, GroupPanel, PhaseTimer, warn
from rl.files import write_atomically
from rl.judge.client import JudgeClient, JudgeError
from rl.judge.http import BackgroundLoop, StoppedError, resolve_api_bases
from rl.judge.server import StartedJudge, raise_if_ended
from rl.learner.learner import Learner
from rl.memory import footprint, memory_plan
from rl.meter import measure_flops_per_s
from rl.progress import shown_on
from rl.ranks import heartbeat, signals
from rl.ranks.dist import Dist, enforce, look_at_machine
from rl.ranks.supervision import WATCHED_ELSEWHERE
from rl.record.checkpoint import Checkpoints, read_state, sound
from rl.record.run_record import BackgroundWriter, RunRecord
from rl.rollout.prompt_order import PromptOrder, first_samples, usable
from rl.rollout.stream import RolloutContext
from rl.run.checkpointing import Checkpointing
from rl.run.checks import Checks
from rl.run.environment import record_environment
from rl.run.last_finished import LastFinished, save_at_once
from rl.run.page_refresh import Page
from rl.run.plugin_metrics import Made, PluginMetrics
from rl.run.recording import Recording
from rl.run.run import Run
from rl.run.start_adapter import with_start
from rl.run.watch import Watch
from rl.seeds import seed_everything, set_rng_state
from rl.trackers import Tracker


class NothingToDoError(Exception):
    """The run is finished already (raised before models are loaded), or was asked to stop while it
    was loading."""


@contextmanager
def open_run(config: RunConfig, dist: Dist) -> Iterator[Run]:
    """Make the run's parts, restore the last checkpoint, and close everything at the end.

    Raises ConfigError or ValueError for errors that the user can fix, and NothingToDoError, before
    models are loaded.
    """
    resolved = build.resolve(config)
    console = Console(dist.is_main)
    with ExitStack() as stack:
        stack.enter_context(shown_on(console))
        record = RunRecord(config.run_dir, config, dist)
        heartbeat.note_loading("waiting for the lock of the run's folder")
        record.claim()
        heartbeat.note_loading("")
        stack.callback(record.release)
        checkpoints = Checkpoints(config.run_dir, config.checkpoint, dist)
        stack.callback(checkpoints.close, console.say)
        newest = checkpoints.latest()
        done = 0 if newest is None else _check_config(newest, record, dist)
        seed_everything(config.seed + dist.rank)
        sources, prompt_order, held_out = _open_data(resolved, stack, console)
        [sample] = prompt_order.shard(0, 0, config.prompts_per_iteration, lambda sample: sample)
        num_iterations = build.num_iterations(config, sum(len(source) for source in sources))
        if dist.broadcast(record.has_line(done)) and done >= num_iterations:
            raise NothingToDoError(
                f"run {config.run_name}: all {num_iterations} iterations are done; raise "
                "num_iterations to go on, or choose another run_name"
            )
        enforce(build.claims(resolved), dist.device)
        dtype = str(resolved.policy.config.dtype)
        flops_per_s = measure_flops_per_s(dist.device, dtype) if dist.is_main else None
        loop = stack.enter_context(BackgroundLoop("judge"))
        heartbeat.note_loading("waiting for the judge")
        try:
            with heartbeat.phase(WATCHED_ELSEWHERE):
                judges, passed = _open_judges(resolved, dist, loop, stack, console, sample)
        except StoppedError:
            raise NothingToDoError("asked to stop before the judge had answered") from None
        heartbeat.note_loading("")
        record_environment(config.run_dir, done, dist)
        console.say(f"run {config.run_name} in {config.run_dir}: loading")
        resolved, keeps_start = with_start(resolved, newest, dist)
        policy = build.build_policy(resolved, dist, keeps_start)
        stack.callback(policy.close)
        held_out = usable(held_out, policy.build_prompt, config.data.on_bad_row)
        [probe] = prompt_order.shard(0, 0, config.prompts_per_iteration, policy.build_prompt)
        prompt_order.num_replaced = 0  # the loop takes this prompt again
        engine, context = _load_models(resolved, policy, dist, judges, loop, stack, console)
        learner = Learner(policy, config, dist, num_iterations)
        last_finished = LastFinished(learner, policy, record.config, dist)
        start = _restore(checkpoints, newest, learner, last_finished, console)
        signals.at_once(partial(save_at_once, last_finished, checkpoints))
        # After a stop in the first iteration the checkpoint holds 0 iterations: measure 0 again.
        for sentence in record.rewind(start if start > 0 else -1):
            console.say(sentence)
        record.write_config()
        timer = PhaseTimer(console, flops_per_s, dist.device)
        recording = _open_recording(config, dist, console, timer, record, num_iterations, stack)
        checkpointing = Checkpointing(
            record.config, dist, num_iterations, checkpoints, recording.writer, last_finished
        )
        checks = _make_checks(resolved, context, engine, sources, held_out, dist)
        checks.replay(record.lines())
        yield Run(
            config=config,
            dist=dist,
            timer=timer,
            judges=judges,
            judge_passed=passed,
            context=context,
            engine=engine,
            learner=learner,
            prompt_order=prompt_order,
            held_out=held_out,
            probe=probe,
            checks=checks,
            recording=recording,
            checkpointing=checkpointing,
            num_iterations=num_iterations,
            sync_dtype=engine_dtype(resolved),
            num_skipped_rows=sum(source.num_skipped for source in sources),
            start=start,
            metrics_line_missing=start == 0 or not dist.broadcast(record.has_line(start)),
        )


def _open_recording(
    config: RunConfig,
    dist: Dist,
    console: Console,
    timer: PhaseTimer,
    record: RunRecord,
    num_iterations: int,
    stack: ExitStack,
) -> Recording:
    tracker = Tracker(config.run_dir, config, dist, record.config)
    stack.push(lambda kind, error, trace: tracker.close(failed=error is not None))
    page = Page(config.run_dir, dist.is_main and config.tracking.page)
    stack.push(lambda kind, error, trace: page.close(error is None and not signals.stop_received()))
    return Recording(
        dist=dist,
        console=console,
        timer=timer,
        group_panel=GroupPanel(console, config.tracking.show_group_every_n_iterations),
        record=record,
        tracker=tracker,
        page=page,
        writer=stack.enter_context(BackgroundWriter(config.run_dir)),
        num_iterations=num_iterations,
    )


def _raise_if_stopped(dist: Dist) -> None:
    """Raise if a stop was requested; called between slow loading steps. Collective."""
    if signals.stop_requested(dist):
        raise NothingToDoError("stopped while loading; the same command starts it again")


def _check_config(newest: Path, record: RunRecord, dist: Dist) -> int:
    """Number of iterations in the checkpoint.

    Raises ValueError if a run with the checkpoint's config may not be resumed with this config.
    """
    state = read_state(newest)
    for change in check_resume(state["meta"]["config"], record.config):
        if dist.is_main:
            warn(f"resuming under a changed {change}")
    return int(state["iteration"])


def _open_data(
    resolved: build.Resolved, stack: ExitStack, console: Console
) -> tuple[list[DataSource], PromptOrder, list[Sample]]:
    """The training sources, their order and the held-out samples. `stack` closes all sources."""
    config = resolved.config
    on_bad_row = config.data.on_bad_row
    sources = build.build_data(resolved, resolved.train)
    weights = build.mixture_weights(resolved, sources)
    prompt_order = PromptOrder(
        sources, weights, config.seed, config.prompts_per_iteration, on_bad_row
    )
    validation = build.build_data(resolved, resolved.validation)
    for source in (*sources, *validation):
        stack.callback(source.close)
    if num_skipped := sum(source.num_skipped for source in sources):
        console.say(f"{num_skipped} bad rows of data.train are left out")
    weights = [1.0] * len(validation)
    num_samples = config.evaluation.num_samples
    held_out = first_samples(validation, weights, num_samples, on_bad_row) if validation else []
    return sources, prompt_order, held_out


def _restore(
    checkpoints: Checkpoints,
    newest: Path | None,
    learner: Learner,
    last_finished: LastFinished,
    console: Console,
) -> int:
    """Load the newest checkpoint, if there is one; returns its number of iterations."""
    if newest is None:
        last_finished.note(0, {})
        return 0
    loaded = checkpoints.load(newest)
    learner.load_state(loaded.tensors, loaded.meta["learner"])
    if loaded.rng is not None:
        with sound(newest):
            set_rng_state(loaded.rng)
    last_finished.note(loaded.iteration, loaded.meta.get("metrics", {}))
    console.say(f"resumed from {newest}: {loaded.iteration} iterations done")
    return loaded.iteration


def _engine_memory(
    resolved: build.Resolved, policy: Policy, dist: Dist, console: Console
) -> tuple[bool, EngineClaim | None]:
    """(whether the inference engine may keep its memory while other models run, how much it takes
    unless configured), by the memory plan for the smallest of the ranks' GPUs. Logs both."""
    memory_config = resolved.engine.cls.memory(resolved.engine.config)
    if memory_config is None or not dist.device.startswith("cuda"):
        return True, None
    gpu_gb = look_at_machine().cuda_gb[int(dist.device.removeprefix("cuda:"))]
    gpu_gb = min(dist.gather(gpu_gb))
    plan = footprint.footprint(resolved, gpu_gb, policy.engine_folder())
    is_auto = memory_config.residency == "auto"
    if plan is None:
        if is_auto:
            weights = footprint.policy_weights(resolved)
            console.say(
                f"the inference engine sleeps while other models run: the sizes of {weights} are "
                "unknown"
            )
        return not is_auto, None
    claim = memory_plan.engine_claim(plan, gpu_gb)
    if claim is not None:
        console.say(memory_plan.engine_line(plan, gpu_gb))
    if is_auto:
        console.say(memory_plan.residency_line(plan, gpu_gb))
    return not is_auto or memory_plan.residency(plan, gpu_gb) == "resident", claim


def _load_models(
    resolved: build.Resolved,
    policy: Policy,
    dist: Dist,
    judges: Mapping[str, JudgeClient],
    loop: BackgroundLoop,
    stack: ExitStack,
    console: Console,
) -> tuple[Engine, RolloutContext]:
    """The inference engine, the renderer and the rewards.

    Raises ValueError if the renderer's and the policy's hidden states differ in width, because
    every picture would fail.
    """
    _raise_if_stopped(dist)
    pooled = None
    if pool := resolved.config.pool:  # before vLLM, which imports Ray without a token
        pooled = build.build_render_pool(resolved, pool, dist)
        stack.callback(pooled.close)
        console.say(f"pictures are drawn by {pooled.where}")
    may_stay, claim = _engine_memory(resolved, policy, dist, console)
    engine = build.build_engine(resolved, policy, dist, may_stay, claim)
    stack.callback(engine.close)
    _raise_if_stopped(dist)
    renderer: Renderer
    if pooled is not None:
        pooled.wait()
        renderer = pooled
    else:
        renderer = build.build_renderer(resolved, dist)
        stack.callback(renderer.close)
    if renderer.state_dim not in (None, policy.state_dim):
        raise ValueError(
            f"the renderer reads hidden states of width {renderer.state_dim}, the policy's have "
            f"{policy.state_dim}: choose the text encoder that the renderer was trained with "
            "(policy.model_path, policy.init_text_encoder_from)"
        )
    rewards = build.build_rewards(resolved, judges, dist)
    for reward in rewards.values():
        stack.callback(reward.close)
    _raise_if_stopped(dist)
    makes_images = resolved.renderer.cls.makes_images
    plugins = resolved.rewards
    held_out_only = {n: rewards.pop(n) for n in plugins if plugins[n].keys.held_out_only}
    context = RolloutContext(
        resolved.config, policy, renderer, rewards, makes_images, loop, held_out_only
    )
    return engine, context


def _make_checks(
    resolved: build.Resolved,
    context: RolloutContext,
    engine: Engine,
    sources: Sequence[DataSource],
    held_out: Sequence[Sample],
    dist: Dist,
) -> Checks:
    made: Made = [
        (resolved.policy, context.policy),
        (resolved.engine, engine),
        *((resolved.rewards[name], reward) for name, reward in context.rewards.items()),
        *zip(resolved.train, sources, strict=True),
    ]
    renderer = replace(resolved.renderer, cls=type(context.renderer))  # a pool has more metrics
    plugin_metrics = PluginMetrics(renderer, made, dist)
    plugin_metrics.drop()  # reports from loading belong to no iteration
    dropout = getattr(context.policy.config.lora, "dropout", 0.0)
    watch = Watch(context.config, engine_dtype(resolved), dropout)
    return Checks(context.config, dist, held_out, plugin_metrics, watch)


def _open_judges(
    resolved: build.Resolved,
    dist: Dist,
    loop: BackgroundLoop,
    stack: ExitStack,
    console: Console,
    sample: Sample,
) -> tuple[dict[str, JudgeClient], bool | None]:
    """(a client of each judge that rewards ask, by the keys of `Resolved.by_judge`; whether those
    that train have passed their audits, None if no audit is wanted). Collective."""
    judges: dict[str, JudgeClient] = {}
    passed: list[bool] = []
    for key, part in resolved.by_judge.items():
        if part.needs_judge:
            log = part.config.run_dir / "logs" / f"{key}_{dist.rank - dist.local_rank}.log"
            judges[key] = _open_judge(part, key, log, dist, loop, stack, console, sample)
            verdict = judge_passed(resolved, key, judges[key], log, dist, loop, console)
            passed += [] if verdict is None else [verdict]
    return judges, all(passed) if passed else None


def _open_judge(
    resolved: build.Resolved,
    key: str,
    log: Path,
    dist: Dist,
    loop: BackgroundLoop,
    stack: ExitStack,
    console: Console,
    sample: Sample,
) -> JudgeClient:
    """Connect to the judge and ask it about `sample` before models are loaded, so that an error is
    reported within seconds if it is unreachable or cannot grade. That of a judge which only grades
    held-out pictures is a warning."""
    config = resolved.config.judge
    if config.start_command:
        console.say(f"starting the judge ({key}); its output: {log}")
        api_bases: Sequence[str] = [_start_judge(config, log, dist, loop, stack)]
    else:
        api_bases = resolve_api_bases(config.api_base)
        console.say(f"checking the judge ({key}) at {', '.join(api_bases)}")
    judge = JudgeClient(config, api_bases, check=partial(raise_if_ended, config, log))
    stack.callback(lambda: loop.submit(judge.aclose()).result())
    trains = not all(plugin.keys.held_out_only for plugin in resolved.rewards.values())
    reachable = loop.run(judge.check_health(), signals.stop_received) if trains else api_bases
    # One rank per judge asks: the first of each node if each node has a judge, else rank 0.
    asks = dist.local_rank == 0 if config.start_command else dist.is_main
    outcome = JudgeCheck()
    if asks:
        question = ask_judge(resolved, reachable, 0.0 if trains else START_PATIENCE_S, sample)
        outcome = loop.run(question, signals.stop_received)
    for line in outcome.lines:
        console.say(line)
    outcomes = dist.gather((outcome.problems, outcome.dialects))
    if problems := [problem for rank_problems, _ in outcomes for problem in rank_problems]:
        listed = "\n".join(problems)
        if trains:
            raise JudgeError(listed)
        if dist.is_main:
            warn(f"{key}: it trains nothing, so training goes on without it: {listed}")
    for _, dialects in outcomes:
        judge.adopt(dialects)
    if dist.is_main and key == "judge":
        left_out = {base: sorted(dialect.names) for base, dialect in judge.dialects().items()}
        file = resolved.config.run_dir / "judge" / "left_out.json"
        write_atomically(file, json.dumps(left_out, indent=2) + "\n")
    return judge


def _start_judge(
    config: JudgeConfig, log: Path, dist: Dist, loop: BackgroundLoop, stack: ExitStack
) -> str:
    """Start the judge on this node's first rank; returns its API base. Collective.

    Raises JudgeError on every rank if it fails on one node.
    """
    api_base, problem = "", ""
    if dist.local_rank == 0:
        try:
            started = stack.enter_context(StartedJudge(config, log))
            api_base = loop.run(started.wait_until_ready(), signals.stop_received)
        except JudgeError as error:
            problem = str(error)
    gathered = dist.gather((api_base, problem))
    if problems := [text for _, text in gathered if text]:
        raise JudgeError(problems[0])
    return next(base for base, _ in reversed(gathered[: dist.rank + 1]) if base)
