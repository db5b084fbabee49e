"""The experiments: each runs its workers and returns plain records for JSON."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from benchmarks import our_side, toy, trl_side
from benchmarks.contest import Contestant, interleave
from benchmarks.defeats import SAVINGS
from benchmarks.judge_stub import judge_process
from benchmarks.link import POLICY_PARTS, TOWER, Measured
from benchmarks.toy import Shape
from benchmarks.trl_tunings import Tuning
from rl.files.atomic import read_rows
from rl.meter.flops import LanguageModel, prefix_tree_pairs
from rl.ranks.rendezvous import on_one_node

STOCK, TUNED, OURS = "TRL stock", "TRL tuned", "this project"
MEMO, PREFIX, PREFIXES = "TRL + tower", "TRL + prefix", "TRL + prefixes"
PEERS: Mapping[str, Tuning] = {
    STOCK: Tuning(tuned=False),
    TUNED: Tuning(),
    MEMO: Tuning(remembers_tower=True),
    PREFIX: Tuning(remembers_tower=True, prompt_once="without gradients"),
    PREFIXES: Tuning(remembers_tower=True, prompt_once="always"),
}
"""From a user's first version to the strongest peer that could be built."""
ONE_STEP_OFF = "this project, one step off"
Record = dict[str, Any]
Make = Callable[[], Contestant]
_runs = itertools.count()


def sides(folder: Path, shape: Shape, api_base: str, samples: bool) -> dict[str, Make]:
    """The peers and this project on one shape."""
    trl = functools.partial(
        Contestant, trl_side.run, folder, shape, api_base=api_base, samples=samples
    )
    peers = {name: functools.partial(trl, tuning=tuning) for name, tuning in PEERS.items()}
    return {**peers, OURS: functools.partial(ours, folder, shape, api_base, samples=samples)}


def ours(folder: Path, shape: Shape, api_base: str, **options: Any) -> Contestant:
    """This project, in a new run folder."""
    runs = folder / "runs" / str(next(_runs))
    return Contestant(our_side.run, folder, shape, api_base, runs, **options)


def as_record(rounds: Sequence[Measured], counted: Measured | None = None) -> Record:
    """Lists over rounds by part, the last round's counts, and the counted iteration's FLOPs."""
    labels = sorted({label for measured in rounds for label in measured.spent})
    record: Record = {
        "cpu_s": {p: [r.spent[p].cpu_s if p in r.spent else 0.0 for r in rounds] for p in labels},
        "wall_s": {p: [r.spent[p].wall_s if p in r.spent else 0.0 for r in rounds] for p in labels},
        "counts": dict(rounds[-1].counts),
    }
    if counted is not None:
        record["gflop"] = {part: spent.flops / 1e9 for part, spent in counted.spent.items()}
    return record


def head_to_head(folder: Path, shape: Shape, num_rounds: int, limit_s: float) -> Record:
    """The peers and this project in turn; then one iteration of each with the FLOP counter."""
    with judge_process() as api_base:
        makers = sides(folder, shape, api_base, samples=True)
        rounds, counted = interleave(makers, num_rounds, True, limit_s)
    records = {name: as_record(rounds[name], counted[name]) for name in makers}
    over = _over_minimum(records[OURS], shape, language_model(folder))
    return {"shape": vars(shape), "sides": records, "over_minimum": over}


def _over_minimum(side: Record, shape: Shape, model: LanguageModel) -> float:
    """Executed FLOPs of the policy side over the minimum for the same numbers: one forward of the
    policy and one of the reference (without adapter) over each token and the pairs of the prefix
    tree, one backward, the head at predicting positions, the vision tower once. For one group
    without equal completions."""
    num_completion = sum(shape.completion_lens())
    num_tokens = side["counts"]["token positions"] // 2
    pairs = prefix_tree_pairs(num_tokens - num_completion, shape.completion_lens())
    passes = (
        model.forward_flops(num_tokens, pairs)
        + replace(model, lora_rank=0).forward_flops(num_tokens, pairs)
        + model.backward_flops(num_tokens, pairs)
    )
    least = passes + 3 * model.head_flops(num_completion) + side["gflop"][TOWER] * 1e9
    return sum(side["gflop"].get(part, 0.0) for part in POLICY_PARTS) * 1e9 / least


def language_model(folder: Path) -> LanguageModel:
    """The sizes of the toy's language model."""
    from transformers import AutoConfig

    lora = SimpleNamespace(r=toy.LORA["r"], target_modules=toy.LORA["target_modules"])
    config = AutoConfig.from_pretrained(folder / "policy")  # nosec B615 # local
    return LanguageModel.of(config.text_config, lora)


def memory(folder: Path, shape: Shape, num_iterations: int = 3) -> dict[str, float]:
    """Peak MB above the resident memory before the first iteration, each side in a new process and
    without sampling."""
    peaks = {}
    with judge_process() as api_base:
        for name, make in sides(folder, shape, api_base, samples=False).items():
            with make() as contestant:
                peaks[name] = [contestant.iterate().peak_mb for _ in range(num_iterations)][-1]
    return peaks


def judge_latency(folder: Path, shape: Shape, latency_s: float, num_rounds: int) -> Record:
    """Wall seconds with a judge of that latency, all questions of an iteration at once.

    One side after the other: in turns, the judge could answer while another side runs.
    """
    with judge_process(latency_s) as api_base:
        makers = sides(folder, shape, api_base, samples=True)
        makers[ONE_STEP_OFF] = functools.partial(
            ours, folder, shape, api_base, samples=True, overrides=["max_staleness=1"]
        )
        rounds = {
            name: interleave({name: make}, num_rounds)[0][name] for name, make in makers.items()
        }
    records = {name: as_record(measured) for name, measured in rounds.items()}
    return {"latency_s": latency_s, "sides": records}


def savings(folder: Path, shape: Shape, num_rounds: int) -> Record:
    """Costs with no saving, with each saving alone, and with one after the other added."""
    names = list(SAVINGS)
    stacks: Mapping[str, Sequence[str]] = {
        "none": [],
        **{f"alone {name}": [name] for name in names},
        **{f"stacked {name}": names[: i + 1] for i, name in enumerate(names) if i > 0},
    }
    return {
        title: _with_savings(folder, shape, active, num_rounds) for title, active in stacks.items()
    }


def _with_savings(folder: Path, shape: Shape, active: Sequence[str], num_rounds: int) -> Record:
    without = [name for name in SAVINGS if name not in active]
    changes = {k: v for name in without for k, v in SAVINGS[name].shape.items()}
    overrides = [override for name in without for override in SAVINGS[name].overrides]
    options = {"samples": False, "without": without, "overrides": overrides}
    with judge_process() as api_base:
        make = functools.partial(ours, folder, replace(shape, **changes), api_base, **options)
        rounds, counted = interleave({OURS: make}, num_rounds, count_flops=True)
    return as_record(rounds[OURS], counted[OURS])


def ranks(folder: Path, shape: Shape, num_iterations: int = 2) -> Record:
    """The same run on one rank and on two: counts of an iteration per rank, and the metrics."""
    model = language_model(folder)
    sides = [sum(model.shape(name)) for name in model.lora_targets]
    trained_bytes = 4 * model.num_layers * model.lora_rank * sum(sides)
    runs = {str(n): _on_ranks(n, folder, shape, num_iterations) for n in (1, 2)}
    return {"trained_bytes": trained_bytes, **runs}


def _on_ranks(num_ranks: int, folder: Path, shape: Shape, num_iterations: int) -> Record:
    runs = folder / "runs" / f"ranks{num_ranks}"
    with judge_process() as api_base, TemporaryDirectory() as meeting, ExitStack() as stack:
        members = []
        for rank in range(num_ranks):
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks}
            environment = {name: str(n) for name, n in numbers.items()} | on_one_node(Path(meeting))
            arguments = our_side.run, folder, shape, api_base, runs
            member = Contestant(*arguments, samples=False, environment=environment)
            members.append(stack.enter_context(member))
        for _ in range(num_iterations):
            for member in members:
                member.order()
            reports = [member.report() for member in members]
    metrics, _ = read_rows(runs / "toy" / "metrics.jsonl")
    kept = ("loss/", "kl/", "optimizer/", "reward/")
    return {
        "counts": [dict(report.counts) for report in reports],
        "metrics": [{k: v for k, v in row.items() if k.startswith(kept)} for row in metrics],
    }
