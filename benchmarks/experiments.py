"""The experiments of `side_by_side.py`: each runs worker processes and returns records for JSON.

A setup is TRL with a `Tuning` (also called a peer), or this project.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks import our_worker, toy, trl_worker
from benchmarks.contest import Contestant, interleave
from benchmarks.judge_stub import judge_process
from benchmarks.link import POLICY_PARTS, TOWER, Measured
from benchmarks.toy import Shape
from benchmarks.trl_tunings import Tuning
from rl.meter import LanguageModel, prefix_tree_pairs

STOCK, TUNED, OURS = "TRL stock", "TRL tuned", "this project"
MEMO, PREFIX, PREFIXES = "TRL + tower", "TRL + prefix", "TRL + prefixes"
PEERS: Mapping[str, Tuning] = {
    STOCK: Tuning(tuned=False),
    TUNED: Tuning(),
    MEMO: Tuning(caches_features=True),
    PREFIX: Tuning(caches_features=True, prompt_once="without gradients"),
    PREFIXES: Tuning(caches_features=True, prompt_once="always"),
}
"""TRL's setups, from a user's first version to the strongest one that could be built."""
ONE_STEP_OFF = "this project, one step off"
Record = dict[str, Any]
Make = Callable[[], Contestant]
_runs = itertools.count()


def setups(folder: Path, shape: Shape, api_base: str, samples: bool) -> dict[str, Make]:
    """Name -> constructor of the worker, for all peers and this project."""
    trl = functools.partial(
        Contestant, trl_worker.run, folder, shape, api_base=api_base, samples=samples
    )
    peers = {name: functools.partial(trl, tuning=tuning) for name, tuning in PEERS.items()}
    return {**peers, OURS: functools.partial(ours, folder, shape, api_base, samples=samples)}


def ours(folder: Path, shape: Shape, api_base: str, **options: Any) -> Contestant:
    """A worker of this project, in a new run folder."""
    runs = folder / "runs" / str(next(_runs))
    return Contestant(our_worker.run, folder, shape, api_base, runs, **options)


def as_record(rounds: Sequence[Measured], counted: Measured | None = None) -> Record:
    """Part -> list over rounds of its seconds; the token positions of the last round; part -> GFLOP
    of the iteration with the FLOP counter."""
    labels = sorted({label for measured in rounds for label in measured.spent})
    record: Record = {
        "cpu_s": {p: [r.spent[p].cpu_s if p in r.spent else 0.0 for r in rounds] for p in labels},
        "wall_s": {p: [r.spent[p].wall_s if p in r.spent else 0.0 for r in rounds] for p in labels},
        "positions": rounds[-1].positions,
    }
    if counted is not None:
        record["gflop"] = {part: spent.flops / 1e9 for part, spent in counted.spent.items()}
    return record


def head_to_head(folder: Path, shape: Shape, num_rounds: int) -> Record:
    """Costs of the peers and this project, which run in turn, and their FLOPs."""
    from transformers import AutoConfig

    with judge_process() as api_base:
        makers = setups(folder, shape, api_base, samples=True)
        rounds, counted = interleave(makers, num_rounds, count_flops=True)
    records = {name: as_record(rounds[name], counted[name]) for name in makers}
    lora = SimpleNamespace(r=toy.LORA["r"], target_modules=toy.LORA["target_modules"])
    config = AutoConfig.from_pretrained(folder / "policy")  # nosec B615 # local
    over = _over_minimum(records[OURS], shape, LanguageModel.of(config.text_config, lora))
    return {"shape": vars(shape), "sides": records, "over_minimum": over}


def _over_minimum(setup: Record, shape: Shape, model: LanguageModel) -> float:
    """Executed FLOPs of the policy side divided by the minimum of passes that run every layer once
    on every distinct token: a forward of policy and reference (without adapter) and a backward over
    the pairs of a prefix tree, the head at predicting positions, the vision tower once. Valid for
    one group without equal completions. ValueError if the minimum is undercut."""
    num_completion = shape.group * shape.completion_tokens
    num_tokens = setup["positions"] // 2
    lens_G = [shape.completion_tokens] * shape.group
    pairs = prefix_tree_pairs(num_tokens - num_completion, lens_G)
    passes = (
        model.forward_flops(num_tokens, pairs)
        + replace(model, lora_rank=0).forward_flops(num_tokens, pairs)
        + model.backward_flops(num_tokens, pairs)
    )
    least = passes + 3 * model.head_flops(num_completion) + setup["gflop"][TOWER] * 1e9
    executed = sum(setup["gflop"].get(part, 0.0) for part in POLICY_PARTS) * 1e9
    if executed < least * (1 - 1e-9):  # beyond rounding
        raise ValueError(
            f"the policy side executed {executed:.0f} FLOPs, fewer than the minimum of {least:.0f}:"
            " the minimum or the count is wrong"
        )
    return executed / least


def memory(folder: Path, shape: Shape, num_iterations: int = 3) -> dict[str, float]:
    """Setup -> peak MB above the resident memory before the first iteration. Each setup runs in a
    new process, without sampling."""
    peaks = {}
    with judge_process() as api_base:
        for name, make in setups(folder, shape, api_base, samples=False).items():
            with make() as contestant:
                peaks[name] = [contestant.iterate().peak_mb for _ in range(num_iterations)][-1]
    return peaks


def judge_latency(folder: Path, shape: Shape, latency_s: float, num_rounds: int) -> Record:
    """Costs with a judge of that latency, which answers all questions of an iteration at once.

    The setups do not run in turn: the judge could answer one while another one runs.
    """
    with judge_process(latency_s) as api_base:
        makers = setups(folder, shape, api_base, samples=True)
        makers[ONE_STEP_OFF] = functools.partial(
            ours, folder, shape, api_base, samples=True, overrides=["max_staleness=1"]
        )
        rounds = {
            name: interleave({name: make}, num_rounds)[0][name] for name, make in makers.items()
        }
    records = {name: as_record(measured) for name, measured in rounds.items()}
    return {"latency_s": latency_s, "sides": records}
