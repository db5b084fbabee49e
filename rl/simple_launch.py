"""Starts a run's ranks and watches them; the same command resumes the run."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from rl import build, printing
from rl.check import check_report, this_machine
from rl.check.check_report import check_data
from rl.check.this_machine import fetch_small_files, fetch_weights
from rl.config.loading import MISSING, find_config, not_a_file
from rl.config.schema import ConfigError, RunConfig, load_config
from rl.files import write_atomically
from rl.printing import KEY_VALUE
from rl.ranks import dist, heartbeat, signals, supervision
from rl.ranks.supervision import HangWatch, NodeWatch
from rl.record.checkpoint import find, iteration_of, model_folder, read_state
from rl.run.follower import say, wait_for_last_rows

CHECK, TRAIN, RANKS = "rl check", "rl train", "rl check-distributed"
HELP = {
    TRAIN: f"""Start a run, or resume it: the same command continues where the run stopped.

    rl train configs/quickstart.jsonnet              on a laptop, in minutes
    rl train my.jsonnet seed=1 run_name=second       with other values
    rl train --smoke my.jsonnet                      two iterations, as a trial
    rl train --nproc 4 my.jsonnet                    with 4 GPUs
    rl train --nnodes 2 --node-rank 0 --rdzv-endpoint host:29400 my.jsonnet
{KEY_VALUE}""",
    CHECK: f"""Report what a config would do, and its mistakes. Needs no GPU and starts nothing.

    rl check configs/qwen_image_edit.jsonnet
    rl check my.jsonnet gpu_gb=80 seed=1      with other values
    rl check --online my.jsonnet              ask the judge, too
{KEY_VALUE}""",
    RANKS: """Check that the ranks of this machine, or of several, reach each other.

    rl check-distributed --nproc 4
    rl check-distributed --nnodes 2 --node-rank 0 --rdzv-endpoint host:29400
""",
}
CHECK_MARKS = {  # pattern of a line of the report -> its colour
    r"^replaced without \+.*": "yellow",
    r"^\d+ wrong$|DOES NOT FIT.*": "bold red",
    "^nothing is wrong$|^no mistake found.*above\\)$": "bold green",
    "^nothing is wrong; .*|^no mistake found.* warnings above: .*": "bold yellow",
}
SMOKE_ITERATIONS, SMOKE_SAMPLES = 2, 8
"""Of `--smoke`: iterations, and held-out samples (at least one for each rank)."""
LOADING_LINE_S = 4.0
"""Time to the first line while a run loads; each further one comes at twice the time."""
LEAST_RATIO, MOST_RATIO = 0.97, 1.1
"""Range of the ratio of a GPU's memory to the `gpu_gb` of a config written for it: 48 GB with error
correction have less, 80 GB more."""


@printing.program
def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Exit code: 0 done (or nothing wrong), 1 wrong config, 2 wrong usage, 124 hung for too long,
    128+n ended by signal n, else that of the rank that failed first."""
    args = _parse(sys.argv[1:] if argv is None else argv)
    if args.conformance:
        if find_spec("torch") is None:
            sys.exit("--conformance runs the plugin's model: install the training packages first")
        options = ["-P"] if sys.flags.safe_path else []
        command = [sys.executable, *options, "-m", "rl.tools.conformance", args.conformance]
        os.execv(command[0], [*command, *filter(None, [args.config]), *args.overrides])
    if args.config is None:
        with tempfile.TemporaryDirectory(prefix="simple_launch_logs_") as logs:
            sys.exit(launch(args, args.nproc or 1, Path(logs)))
    try:
        if args.nproc is not None:
            args.overrides.append(f"world_size={args.nproc * args.nnodes}")
        config = load_config(args.config, args.overrides)
        if args.smoke:
            args.overrides += _smoke_overrides(config, args.nnodes)
            config = load_config(args.config, args.overrides)
            say(f"trial of {SMOKE_ITERATIONS} iterations in {config.run_dir}")
        config = _named_start(args, config)
        problems = []
        if config.world_size % args.nnodes:
            problems = [f"--nnodes {args.nnodes} does not divide world_size {config.world_size}"]
        if args.check:
            if problems:
                raise ConfigError([*problems, *check_report.problems(config)])
            text, code = check_report.report(
                config, config.gpu_gb, args.online, args.config, args.overrides
            )
            printing.show(text, marks=CHECK_MARKS)
            sys.exit(code)
        _refuse([*problems, *check_report.problems(config, with_data=False)])
        _refuse(_memory_problems(args, config))
        _refuse(check_report.create_and_check(config.run_dir))
        resolved = build.resolve(config)
        problems = fetch_small_files(resolved)  # first: `check_data` needs the tokenizer
        data = check_data(resolved, is_start=True)
        _refuse([*problems, *data.problems])
        _refuse(check_report.judge_problems(resolved, data.most_pictures))
        _refuse(fetch_weights(resolved))
    except ConfigError as error:
        problems = [problem.removeprefix(f"{args.config}: ") for problem in error.problems]
        problems = check_report.explained(problems, args.config, args.overrides)
        printing.complain(f"{args.config} cannot run:", problems)
        sys.exit(1)
    for title, lines in check_report.remarks(
        resolved, check_report.dropped(args.config, args.overrides, resolved)
    ).items():
        for line in lines:
            say(f"{title}: {line}")
    for line in this_machine.busy_lines(resolved):
        say(line)
    # One per node: launchers of several nodes start at the same time.
    checked_rows = config.run_dir / f"logs/checked_rows.{args.node_rank}.json"
    write_atomically(checked_rows, json.dumps(data.checked))
    os.environ[build.CHECKED_ROWS] = str(checked_rows.resolve())  # for the ranks
    sys.exit(launch(args, config.world_size // args.nnodes, config.run_dir / "logs", config))


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise ConfigError(problems)


def _smoke_overrides(config: RunConfig, num_nodes: int) -> list[str]:
    """Overrides for a trial of any config: few iterations and held-out samples, a run name of its
    own, nothing published. On one node the name is new; several nodes have to agree on it."""
    name = f"{config.run_name}_smoke"
    if num_nodes == 1:
        name += time.strftime("_%m%d_%H%M%S")
    num_samples = min(config.evaluation.num_samples, max(SMOKE_SAMPLES, config.world_size))
    return [
        f"run_name={name!r}",
        f"num_iterations={SMOKE_ITERATIONS}",
        "num_epochs=null",
        "optimizer.warmup_iterations=0",
        f"evaluation.num_samples={num_samples}",
        "checkpoint.push_to_hub_every_n_iterations=0",
        "tracking.wandb='off'",
        "tracking.trackio_space=''",
    ]


def _named_start(args: argparse.Namespace, config: RunConfig) -> RunConfig:
    """If `policy.adapter_path` names a run, put the adapter to start from in its place: the one
    with which this run began, else the named run's newest. Ranks then agree, and records name
    it."""
    named = config.policy.get("adapter_path")
    if not isinstance(named, str) or not named:
        return config
    with suppress(ValueError, OSError):  # the checks report it
        adapter = str(model_folder(Path(named)))
        if own := find(config.run_dir, hashes=False).path:
            recorded = read_state(own)["meta"]["config"]["policy"].get("adapter_path", "")
            if Path(named) in Path(recorded).parents:
                adapter = recorded
        args.overrides.append(f"policy.adapter_path={json.dumps(adapter)}")
        return load_config(args.config, args.overrides)
    return config


def _memory_problems(args: argparse.Namespace, config: RunConfig) -> list[str]:
    """Memory problems of a start on this machine's GPUs; [] without GPUs. If the config is written
    for another size, says so."""
    machine = dist.look_at_machine()
    num_ranks = config.world_size // args.nnodes
    own_gb = check_report.smallest_gpu_gb(build.resolve(config), machine, num_ranks)
    if own_gb is not None and not LEAST_RATIO <= own_gb / config.gpu_gb <= MOST_RATIO:
        say(
            f"gpu_gb: the config is written for GPUs of {config.gpu_gb:g} GB, and these have "
            f"{own_gb:.1f}; add gpu_gb={math.floor(own_gb)}: the file may derive other keys from it"
        )
    host_gb = this_machine.host_memory_gb()
    return check_report.problems_here(config, machine, num_ranks, host_gb)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    # `rl check-distributed` appends its script.
    is_ranks = bool(argv) and Path(argv[-1]).name == "check_distributed.py"
    name = RANKS if is_ranks else CHECK if "--check" in argv else TRAIN
    usage = f"{name} [options]"
    if name != RANKS:
        usage += " config.jsonnet [key=value ...]"
    parser = printing.Parser(name, HELP[name], usage)
    add = parser.add_argument

    def only(command: str, text: str) -> str:
        return text if name == command else argparse.SUPPRESS

    add("--nproc", type=int, help="ranks on this node (default: world_size / nnodes)")
    add("--nnodes", type=int, default=1, help="nodes; run the same command on each")
    add("--node-rank", type=int, default=0, help="0 .. nnodes - 1; 0 is the rendezvous host")
    add("--rdzv-endpoint", default="", help="host:port of node 0; for several nodes")
    add(
        "--retries",
        type=int,
        default=0,
        metavar="N",
        help=only(
            TRAIN,
            "restart at most N times if the machine ended the run (a rank was killed by a signal, "
            "or hung) and an iteration was saved since the last start",
        ),
    )
    add("--smoke", action="store_true", help=only(TRAIN, "two iterations, under a name of its own"))
    add("--check", action="store_true", help=only(TRAIN, "as rl check: start nothing"))
    add("--online", action="store_true", help=only(CHECK, "ask the judge one real question, too"))
    add(
        "--conformance",
        metavar="PLUGIN",
        help=only(CHECK, "test this policy or engine, of a config or at tiny size on the CPU"),
    )
    add("arguments", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args(argv)
    several = args.nnodes > 1
    for is_wrong, problem in (
        (
            args.nproc is not None and args.nproc < 1,
            f"--nproc {args.nproc}: at least one rank is needed",
        ),
        (args.nnodes < 1, f"--nnodes {args.nnodes}: at least one node is needed"),
        (
            not 0 <= args.node_rank < args.nnodes,
            f"--node-rank {args.node_rank} is not within --nnodes {args.nnodes}",
        ),
        (
            several and not args.rdzv_endpoint,
            "--nnodes > 1 needs --rdzv-endpoint host:port, the same on every node",
        ),
        (args.retries < 0, f"--retries {args.retries}: a number of restarts, 0 for none"),
        (
            several and args.retries,
            "--retries starts one node's ranks again; on several, start the same command",
        ),
        (args.online and not args.check, "--online needs --check; a start asks the judge anyway"),
        (args.conformance and not args.check, "--conformance needs --check"),
    ):
        if is_wrong:
            parser.error(problem)
    arguments = [_local_path(argument) for argument in args.arguments]
    has_script = bool(arguments) and (arguments[0] == "rl.train" or arguments[0].endswith(".py"))
    args.script = arguments.pop(0) if has_script else "rl.train"
    if args.script != "rl.train" and not_a_file(args.script):
        parser.error(f"no script {args.script}; the training loop is rl/train.py")
    if not arguments and (args.script == "rl.train" or args.check) and not args.conformance:
        parser.error(f"a config is missing, for example: {name} configs/quickstart.jsonnet")
    args.config, args.overrides = (arguments[0], arguments[1:]) if arguments else (None, [])
    if args.retries and args.config is None:
        parser.error("--retries resumes from a run's checkpoints, and no config names a run")
    return args


def _local_path(path: str) -> str:
    """Maps the paths in EARL's launch commands to this project's."""
    if path in ("rl/train.py", "rl/nano_aha_moment.py"):
        return "rl.train"
    if not path.startswith("rl/") or not_a_file(path) != MISSING:
        return path
    config_path = path.removeprefix("rl/")
    return config_path if find_config(config_path) else path


def launch(
    args: argparse.Namespace, num_ranks: int, log_dir: Path, config: RunConfig | None = None
) -> int:
    """Start the ranks, up to `--retries` + 1 times; the exit code, as of `main`."""
    if sys.platform != "linux":
        say(f"ranks run on Linux only, and this is {sys.platform} (on Windows: inside WSL 2)")
        return 1
    _set_environment(num_ranks, config)
    for start in range(args.retries + 1):
        saved_before = _iterations_on_disk(config.run_dir) if config and args.retries else 0
        ending = _one_start(args, num_ranks, log_dir, config)
        for line in ending.lines:
            say(line)
        is_stopped = ending.code - 128 in signals.STOP_SIGNALS
        if config is None or args.retries == 0 or ending.code == 0 or is_stopped:
            break
        by_signal = ending.code - 128 in signal.valid_signals()  # an exception's exit code is 1
        by_machine = by_signal or ending.code == supervision.HUNG_CODE
        saved = _iterations_on_disk(config.run_dir)
        if start == args.retries or not by_machine or saved <= saved_before:
            say(
                f"not started again: {ending.what}. --retries {args.retries} restarts only after "
                "the machine ended a run that had saved an iteration since its start (saved "
                f"before: {saved_before}, now: {saved}), at most {args.retries} times"
            )
            break
        say(f"started again, {start + 1} of {args.retries}: {ending.what}")
    if config is not None and args.node_rank == 0:
        with signals.collect_stop_signals() as stop_signals:
            wait_for_last_rows(config.run_dir, lambda: bool(stop_signals))
    return ending.code


def _iterations_on_disk(run_dir: Path) -> int:
    newest = find(run_dir, hashes=False).path
    return 0 if newest is None else iteration_of(newest)


def _one_start(
    args: argparse.Namespace, num_ranks: int, log_dir: Path, config: RunConfig | None
) -> supervision.Ending:
    with tempfile.TemporaryDirectory(prefix="simple_launch_") as folder:  # mode 0700: private
        notes = Path(folder)
        run = partial(_run_ranks, args, num_ranks, log_dir, notes, config)
        try:
            if args.nnodes == 1:
                return run(supervision.on_one_node(notes))
            with supervision.on_several_nodes(
                args.rdzv_endpoint, args.node_rank, args.nnodes, num_ranks, say
            ) as (rdzv_env, nodes):
                return run(rdzv_env, nodes)
        except supervision.RendezvousError as error:
            return supervision.Ending(1, "the nodes did not meet", (str(error),))


def _run_ranks(
    args: argparse.Namespace,
    num_ranks: int,
    log_dir: Path,
    notes: Path,
    config: RunConfig | None,
    rdzv_env: dict[str, str],
    nodes: NodeWatch | None = None,
) -> supervision.Ending:
    """Start the ranks, watch them and end them together; `nodes` gets the reason if they fail. A
    signal that asks this process to stop is forwarded to them; it then waits for them to end."""
    with signals.collect_stop_signals() as stop_signals:
        processes = _start_ranks(args, num_ranks, log_dir, notes, rdzv_env)
        beats = {rank: notes / heartbeat.file_name(rank) for rank in processes}
        pids = {rank: process.pid for rank, process in processes.items()}
        limit_s = config.hang_limit_s if config else RunConfig.model_fields["hang_limit_s"].default
        watch = HangWatch(beats, pids, limit_s, args.nnodes == 1, say)
        ranks, ending = supervision.Ranks(processes, watch, say), None
        began_s, line_s = time.monotonic(), LOADING_LINE_S
        while ending is None:
            spent_s = time.monotonic() - began_s
            if spent_s >= line_s and args.script == "rl.train":
                line_s = 2 * spent_s
                _print_loading(spent_s, heartbeat.read(beats[min(beats)]))
            if stop_signals:
                ending = ranks.leave_as_asked(stop_signals)
            elif first := ranks.failures():
                ranks.leave([signal.SIGTERM], supervision.PEERS_TERM_S)
                ending = supervision.of_failure(first, ranks.failures(), notes, log_dir)
            elif ranks.all_done():
                ending = supervision.Ending(0, "")
            elif watch.look():
                ending = ranks.end_hung()
            elif nodes is not None and (lost := nodes.lost()):
                ending = ranks.end_alone(lost)
            else:
                time.sleep(0.2)
        # What dead ranks left in their process groups, e.g. an engine's workers.
        supervision.signal_groups(pids.values(), signal.SIGKILL)
        if nodes is not None:
            nodes.ending = ending.what
        return replace(ending, code=128 + stop_signals[0]) if stop_signals else ending


def _print_loading(spent_s: float, beat: heartbeat.Beat | None) -> None:
    if beat is not None and beat.phase == heartbeat.LOADING:
        say(f"[{spent_s:3.0f} s] loading: {beat.where}")


def _start_ranks(
    args: argparse.Namespace, num_ranks: int, log_dir: Path, notes: Path, rdzv_env: dict[str, str]
) -> dict[int, subprocess.Popen[bytes]]:
    config_args = [] if args.config is None else [args.config, *args.overrides]
    worker = [sys.executable, "-u", "-m", "rl.ranks.worker", str(log_dir), str(notes), args.script]
    processes = {}
    for local_rank in range(num_ranks):
        rank = args.node_rank * num_ranks + local_rank
        rank_env = {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(args.nnodes * num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
        }
        environ = {**os.environ, **rdzv_env, **rank_env}
        processes[rank] = subprocess.Popen(
            [*worker, *config_args], env=environ, start_new_session=True
        )
    return processes


def _set_environment(num_ranks: int, config: RunConfig | None) -> None:
    """Set the variables that torch reads at import, unless the user has set them: on the CPU one
    thread per rank (more are slower on a shared CPU) and no warnings of torch's C++ parts; on GPUs
    up to 8 threads per rank."""
    import torch

    threads = max(1, min(8, (os.cpu_count() or 1) // num_ranks))
    on_cpu = config is not None and not this_machine.wants_gpu(build.resolve(config))
    if on_cpu or not torch.cuda.is_available():
        threads = 1
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))


if __name__ == "__main__":
    sys.exit(main())
