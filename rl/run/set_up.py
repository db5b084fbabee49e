"""Opens a run: models, judges, checkpoints, environment; restores it on a resume."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import distributions
from pathlib import Path

from rl import build
from rl.api.data import DataSource
from rl.api.engine import Engine, EngineClaim
from rl.api.policy import Policy
from rl.api.renderer import Renderer
from rl.api.types import Sample
from rl.build import Resolved
from rl.check import check_report, memory_plan, this_machine
from rl.check.compatibility import check_resume, engine_dtype
from rl.check.trials import START_PATIENCE_S, JudgeCheck, ask_judge, judge_passed
from rl.config.schema import ConfigError, JudgeConfig, RunConfig, load_config
from rl.files import append_line, json_line, read_rows
from rl.judge.client import JudgeClient, JudgeError
from rl.judge.http import BackgroundLoop, StoppedError, resolve_api_bases
from rl.judge.server import StartedJudge, raise_if_ended
from rl.learner.learner import Learner
from rl.meter import measure_flops_per_s
from rl.model_files import ADAPTER_CONFIG
from rl.printing import hide
from rl.progress import Console, PhaseTimer, shown_on, warn
from rl.ranks import heartbeat, signals
from rl.ranks.dist import Dist, enforce, look_at_machine
from rl.ranks.supervision import WATCHED_ELSEWHERE
from rl.record.checkpoint import Checkpoints, read_state, sound
from rl.record.run_record import BackgroundWriter, RunRecord
from rl.rollout.episodes import PromptOrder, first_samples, usable
from rl.rollout.stream import RolloutContext
from rl.run.alarms import Watch, alarms_of
from rl.run.checks import Checks
from rl.run.follower import WANDB_KEY, Follower
from rl.run.metric_table import Made, PluginMetrics
from rl.run.run import Recording, Run
from rl.run.saving import Checkpointing, LastFinished, save_at_once
from rl.seeds import seed_everything, set_rng_state

# ---- environment ---------------------------------------------------------------------------------
# Records what each start of a run ran on, and names what has changed at a resume.

FILE, DONE = "environment.jsonl", "iterations_done"
ROOT = Path(__file__).parents[2]
_DRIVER = Path("/proc/driver/nvidia/version")


def record_environment(run_dir: Path, done: int, dist: Dist, sources: Iterable[DataSource]) -> None:
    """Append a line to `environment.jsonl`: iterations done, code, Python, packages, driver, the
    kinds of devices of all ranks, and a hash of the rows of `sources`, without their pictures. Warn
    of what differs from the line before. Collective."""
    devices = sorted(set(dist.gather(_device(dist.device))))
    if not dist.is_main:
        return
    facts = {"code": _code(), "python": platform.python_version()}
    facts |= this_machine.installed()
    if _DRIVER.is_file() and (found := re.search(r"[\d.]{5,}", _DRIVER.read_text("utf-8"))):
        facts["driver"] = found[0]
    facts["devices"] = ", ".join(devices)
    rows = repr([(len(source), [*source.findings.checked]) for source in sources])
    facts["data"] = hashlib.sha256(rows.encode()).hexdigest()[:12]
    earlier = read_rows(run_dir / FILE)[0]
    append_line(run_dir / FILE, json_line({DONE: done, **facts}))
    before = {name: value for name, value in (earlier or [facts])[-1].items() if name != DONE}
    changes = [
        f"{name} {before.get(name, 'absent')} -> {facts.get(name, 'absent')}"
        for name in before | facts
        if before.get(name) != facts.get(name)
    ]
    if changes:
        warn(
            f"this run goes on with another {', '.join(changes)} ({FILE} in its folder): a resume "
            "is exact, bit for bit, only where all of this is equal"
        )


def _device(device: str) -> str:
    import torch

    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    cpu = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text("utf-8"))
    return cpu[1] if cpu else platform.machine()


def _code() -> str:
    """The commit, `-dirty` with uncommitted changes; of an installed wheel its version."""
    command = ["git", f"--git-dir={ROOT}/.git", f"--work-tree={ROOT}", "describe", "--always"]
    command += ["--dirty", "--exclude=*", "--abbrev=40"]
    with suppress(OSError, subprocess.SubprocessError):  # no repository, no git, a slow disk
        done = subprocess.run(command, capture_output=True, timeout=20, check=True, text=True)
        return done.stdout.strip()
    return next((d.version for d in distributions(name="vlm-edit-rl")), "unknown")


# ---- start adapter -------------------------------------------------------------------------------
# A run's own copy of the adapter that it starts from, the reference of its KL penalty: the folder
# of the adapter may have changed, or be gone, when the run resumes.

FOLDER = "start"
FILES = (ADAPTER_CONFIG, "adapter_model.safetensors", "adapter_model.bin")


def with_start(resolved: Resolved, newest: Path | None, dist: Dist) -> tuple[Resolved, bool]:
    """(the config whose policy starts from the run's own copy of the adapter, whether it does).

    A run without checkpoint (`newest`) copies the adapter first. A run that was begun before runs
    kept their start goes on with the base model as reference. Raises ValueError if the copy is
    gone. Collective.
    """
    policy, folder = resolved.policy, resolved.config.run_dir / FOLDER
    source = policy.cls.start_adapter(policy.config)
    if newest is None:
        if dist.is_main:
            shutil.rmtree(folder, ignore_errors=True)  # of a run that saved nothing
            for file in (Path(source, name) for name in FILES if source):
                if file.is_file():
                    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                    shutil.copy(file, folder / file.name)
        dist.gather(None)  # the other ranks read it
    elif "kl_reference" not in read_state(newest)["meta"]["config"]["algorithm"]:
        return resolved, False
    if not (source or folder.is_dir()):
        return resolved, False
    if not (folder / ADAPTER_CONFIG).is_file():
        raise ValueError(
            f"{folder} is gone, the adapter that this run started from and the reference of its KL "
            "penalty: put it back, or choose another run_name"
        )
    own = policy.config.model_copy(update={"adapter_path": str(folder)})
    return replace(resolved, policy=replace(policy, config=own)), True


# ---- set up --------------------------------------------------------------------------------------
# Opens a run: makes its parts, restores the last checkpoint, and closes everything at the end.


class NothingToDoError(Exception):
    """The run is finished already, or was asked to stop while it was loading."""


@contextmanager
def open_run(config: RunConfig, dist: Dist) -> Iterator[Run]:
    """Make the run's parts, restore the last checkpoint, and close everything at the end.

    Raises ConfigError or ValueError for errors that the user can fix, most of them before models
    are loaded, and NothingToDoError.
    """
    resolved = build.resolve(config)
    console = Console(dist.is_main)
    with ExitStack() as stack:
        stack.enter_context(shown_on(console))
        record = RunRecord(config.run_dir, config, dist)
        record.claim()
        stack.callback(record.release)
        checkpoints = Checkpoints(config.run_dir, config.checkpoint, dist)
        stack.callback(checkpoints.pusher.close, console.say)
        newest = checkpoints.latest()
        done = 0 if newest is None else _check_config(newest, record, dist)
        seed_everything(config.seed + dist.rank)
        sources, validation, prompt_order, held_out = _open_data(resolved, stack, console)
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
        try:
            with heartbeat.phase(WATCHED_ELSEWHERE):
                judges, passed = open_judges(resolved, dist, loop, stack, console, sample)
        except StoppedError:
            raise NothingToDoError("asked to stop before the judge had answered") from None
        record_environment(config.run_dir, done, dist, [*sources, *validation])
        console.say(f"run {config.run_name} in {config.run_dir}: loading")
        resolved, keeps_start = with_start(resolved, newest, dist)
        policy = build.build_policy(resolved, dist, keeps_start)
        stack.callback(policy.close)
        held_out = usable(held_out, policy.build_prompt, config.data.on_bad_row)
        [probe] = prompt_order.shard(0, 0, config.prompts_per_iteration, policy.build_prompt)
        prompt_order.num_replaced = 0  # the loop takes this prompt again
        engine, context = load_models(resolved, policy, dist, judges, loop, stack, console)
        learner = Learner(policy, config, dist, num_iterations)
        last_finished = LastFinished(learner, policy, record.config, dist)
        start = _restore(checkpoints, newest, learner, last_finished, console)
        signals.at_once(partial(save_at_once, last_finished, checkpoints))
        # After a stop in the first iteration the checkpoint holds 0 iterations: measure 0 again.
        for sentence in record.rewind(start if start > 0 else -1):
            console.say(sentence)
        record.write_config()
        timer = PhaseTimer(console, flops_per_s, dist.device)
        follower = Follower(config.run_dir, config.tracking, dist.is_main)
        stack.push(lambda kind, error, trace: follower.close(failed=error is not None))
        follower.start()
        writer = stack.enter_context(BackgroundWriter(config.run_dir))
        recording = Recording(console, record, follower, writer, num_iterations)
        checkpointing = Checkpointing(
            record.config, dist, num_iterations, checkpoints, writer, last_finished
        )
        checks = _make_checks(resolved, context, engine, sources, held_out, dist)
        checks.watch.replay(record.lines())
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
) -> tuple[list[DataSource], list[DataSource], PromptOrder, list[Sample]]:
    """The sources of training and validation, the order of the former's rows, and the held-out
    samples. `stack` closes all sources."""
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
    held_out = first_samples(validation, config.evaluation.num_samples, on_bad_row)
    return sources, validation, prompt_order, held_out


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
    plan = memory_plan.plan_of(resolved, gpu_gb, policy.engine_folder())
    is_auto = memory_config.residency == "auto"
    if plan is None:
        if is_auto:
            weights = memory_plan.policy_weights(resolved)
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
    return not is_auto or plan.engine_stays, claim


def load_models(
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
    if resolved.config.pool:  # now, because its workers take long to load the renderer
        from rl.pool import pooled_renderer

        pooled = pooled_renderer.pooled(resolved.renderer, resolved.config, dist)
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
        renderer = build.build_renderer(resolved, dist, is_first=dist.is_main)
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
    rewards = {**context.rewards, **context.held_out_only}
    made: Made = [
        (resolved.policy, context.policy),
        (resolved.engine, engine),
        *((resolved.rewards[name], reward) for name, reward in rewards.items()),
        *zip(resolved.train, sources, strict=True),
    ]
    renderer = replace(resolved.renderer, cls=type(context.renderer))  # a pool has more metrics
    plugin_metrics = PluginMetrics(renderer, made, dist)
    plugin_metrics.after_evaluation()  # reports from loading belong to no iteration
    dropout = getattr(context.policy.config.lora, "dropout", 0.0)
    alarms = alarms_of(context.config, engine_dtype(resolved), dropout)
    return Checks(context.config, dist, held_out, plugin_metrics, Watch(alarms))


def open_judges(
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
        console.say(f"{key}: starting the judge; its output: {log}")
        api_bases: Sequence[str] = [_start_judge(config, log, dist, loop, stack)]
    else:
        api_bases = resolve_api_bases(config.api_base)
        addresses = ", ".join(api_bases)
        console.say(f"{key}: waiting up to a minute for the judge at {addresses}")
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
    if problems := [problem for rank in dist.gather(outcome.problems) for problem in rank]:
        listed = "\n".join(problems)
        if trains:
            raise JudgeError(listed)
        if dist.is_main:
            warn(f"{key}: it trains nothing, so training goes on without it: {listed}")
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


# ---- torchrun ------------------------------------------------------------------------------------
# Loads the config of a rank; under torchrun, adapts and checks it as `rl train` does.


def load_in_rank(file: str, overrides: Sequence[str]) -> RunConfig:
    """The config. If torchrun started this process, `world_size` is its number of ranks, and the
    first rank of each node raises ConfigError for a config that cannot run; torchrun then ends the
    others. From here on only the follower has wandb's key."""
    hide(WANDB_KEY)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return load_config(file, overrides)
    config = load_config(file, [*overrides, f"world_size={os.environ['WORLD_SIZE']}"])
    if os.environ["LOCAL_RANK"] == "0" and (problems := check_report.problems(config)):
        raise ConfigError(problems)
    return config
