"""Audit a config's judge on results of known quality, or attack it.

    rl judge audit configs/qwen_image_edit.jsonnet
    rl judge audit config.jsonnet --pairs pairs.parquet \\
        --columns instruction=prompt,source=image,better=chosen,worse=rejected
    rl judge attack config.jsonnet judge.model=my-judge

The config's own rewards ask its own judge, about pictures whose truth is known:
drawn scenes, the config's data (judge.audit_set: 'data'), or your labelled pairs. The
result is kept in judge_audit.json beside the runs, where a run looks for it
(judge.audit). The exit code is 1 if the judge fails, 2 if it cannot be asked, 3 if
the cases are too few to decide: add some by --cases N.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, redirect_stderr
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL.Image import Image

from rl import build, printing
from rl.api.judge import Answer, Judge, Question
from rl.api.plugin import Resources
from rl.api.reward import Reward
from rl.api.types import RewardInput, RewardOutput, Sample
from rl.build import Plugin, Resolved
from rl.check.this_machine import has_gpus
from rl.check.trials import (
    Kind,
    Pair,
    RewardAudit,
    audited_rewards,
    decided,
    entries,
    file_of,
    identity,
    key_of,
    rewards_that_ask,
    too_few_graded,
)
from rl.config.schema import ConfigError, JudgeConfig, RunConfig, load_config
from rl.files import downscale, write_atomically
from rl.judge.client import JudgeClient, JudgeError, JudgeStats
from rl.judge.http import resolve_api_bases
from rl.judge.server import StartedJudge, raise_if_ended
from rl.printing import load_template
from rl.progress import duration
from rl.ranks.signals import remedy
from rl.rollout.episodes import scores
from rl.tools.audit_cases import (
    ATTACKS,
    CLEARLY_WRONG,
    CORRECT,
    KINDS,
    Case,
    attacked,
    configured_cases,
    pair_cases,
)
from rl.tools.commands.edit import at_least_one

# ---- audit statistics ----------------------------------------------------------------------------
# How well scores separate right from wrong results, and how well they repeat.
#
# Axes in names: `_P` pairs of a right and a wrong result, `_C` cases, `_PR` pictures x readings.


def auroc(
    case_P: np.ndarray, right_P: np.ndarray, wrong_P: np.ndarray
) -> tuple[float, tuple[float, float]]:
    """(P(a right result scores above a wrong one), its 95 % interval); nan without pairs.

    Each right value is compared with each wrong one, ties count half (Mann and Whitney 1947).
    [P] int: the pair's case; [P] float: the values of its two results.
    The variance is that of DeLong et al. 1988, summed by case (Obuchowski 1997), because a case's
    pairs share a scene and the right result. The interval is Wilson's for as many independent
    results as have this variance (Korn and Graubard 1998), at most two a case: so it is not empty
    where no error was seen.
    """
    if not len(case_P):
        return math.nan, (math.nan, math.nan)
    share_below_right_P = _share_below(right_P, wrong_P)
    share_above_wrong_P = 1 - _share_below(wrong_P, right_P)
    area, num_cases = float(share_below_right_P.mean()), len(np.unique(case_P))
    part_C = np.bincount(case_P, share_below_right_P + share_above_wrong_P - 2 * area) / len(case_P)
    variance = float((part_C**2).sum()) * num_cases / max(num_cases - 1, 1)
    size = 2.0 * num_cases
    if variance > 0:
        size = min(size, area * (1 - area) / variance)
    return area, wilson_interval(area, size)


def _share_below(values: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Share of `others` below each of `values`; equal ones count half."""
    ordered = np.sort(others)
    num_below = np.searchsorted(ordered, values) + np.searchsorted(ordered, values, "right")
    return num_below / (2 * len(ordered))


def wilson_interval(share: float, num_all: float) -> tuple[float, float]:
    """95 % interval of a share of `num_all` independent draws (Wilson 1927); it is not empty at 0 %
    and 100 %. Nan for no draws."""
    if num_all == 0:
        return math.nan, math.nan
    z = 1.959964
    centre = (share + z * z / (2 * num_all)) / (1 + z * z / num_all)
    half = math.sqrt(share * (1 - share) / num_all + z * z / (4 * num_all**2))
    half *= z / (1 + z * z / num_all)
    return max(0.0, centre - half), min(1.0, centre + half)


def noise_sd(readings_PR: np.ndarray) -> float:
    """Standard deviation of repeated readings of one picture: the root of the mean variance over
    pictures (ddof 1). [P, R] float, R >= 2."""
    return float(np.sqrt(readings_PR.var(axis=1, ddof=1).mean()))


# ---- judge audit ---------------------------------------------------------------------------------
# Asks a config's rewards about results of known quality, and keeps what they say of the judge.

T = TypeVar("T")

NUM_CASES = 64
"""A judge of AUROC 0.97, and one of 0.85, get their verdict from 64 cases in 95 of 100 audits
(`benchmarks/audit_power.py`)."""
MAX_GAIN = 0.25
"""How far an attack may raise the mean reward: 0 = to that of an unchanged source or of another
sample's result (the lower one), 1 = to that of the right result."""
NUM_REPEATED, NUM_READINGS = 4, 3
"""The results of the first 4 cases are read 3 times."""


@dataclass(frozen=True)
class AttackResult:
    name: str
    mean: float
    """Mean value of its results, 0 to 1."""
    gain: float
    """(mean - floor) / (mean of the right results - floor). The floor is the lower mean of the
    unchanged source and another sample's result; the gain is infinite if the right results are not
    above it."""
    passed: bool


Key = tuple[int, str]
"""Number of a case, and the kind of its result."""
Readings = Mapping[Key, Sequence[RewardOutput]]
"""All readings of some results by one reward."""


class _LaterReading:
    """A judge whose questions count as later repeats, so that they get other seeds."""

    def __init__(self, judge: Judge, first_repeat: int) -> None:
        self.config = judge.config
        self._judge, self._first_repeat = judge, first_repeat

    async def ask(
        self, question: Question, parse: Callable[[str], T], repeat: int = 0
    ) -> Answer[T]:
        return await self._judge.ask(question, parse, self._first_repeat + repeat)


async def ask(
    plugin: Plugin[Reward],
    judge: Judge | None,
    device: str,
    results: Mapping[Key, tuple[Sample, Image]],
    repeated: frozenset[int] = frozenset(),
) -> Readings:
    """Grade results by one reward; those of the cases in `repeated` three times."""
    readings: dict[Key, list[RewardOutput]] = {key: [] for key in results}
    for reading in range(NUM_READINGS if repeated else 1):
        # A reading takes n_evals repeats; the next one begins after them.
        first_repeat = reading * int(getattr(plugin.config, "n_evals", 1))
        asked_judge = judge and _LaterReading(judge, first_repeat)
        reward = await asyncio.to_thread(plugin.cls, plugin.config, Resources(asked_judge, device))
        keys = [key for key in results if reading == 0 or key[0] in repeated]
        try:
            outputs = await asyncio.gather(
                *(
                    scores(reward, [RewardInput(results[key][0], "", results[key][1])])
                    for key in keys
                )
            )
        finally:
            await asyncio.to_thread(reward.close)
        for key, [output] in zip(keys, outputs, strict=True):
            readings[key].append(output)
    return readings


async def audit(
    plugin: Plugin[Reward],
    judge: Judge | None,
    device: str,
    cases: Sequence[Case],
    limits: JudgeConfig,
) -> RewardAudit:
    """Ask one reward about the results of all cases. Left out: another instruction, if the reward
    compares with the target; exchanged pictures, if it sees no source. `limits`: has the thresholds
    `judge.audit_*`."""
    needs = plugin.cls.needs_with(plugin.config)
    left_out = {"other_instruction"} if "target" in needs else set()
    if "source" not in needs:
        left_out.add("exchanged")
    results = {
        (number, kind): result
        for number, case in enumerate(cases)
        for kind, result in case.results.items()
        if kind not in left_out
    }
    asked = await ask(plugin, judge, device, results, frozenset(range(NUM_REPEATED)))
    return measured(plugin.key, cases, asked, limits)


def measured(
    reward: str, cases: Sequence[Case], readings: Readings, limits: JudgeConfig
) -> RewardAudit:
    """The statistics of an audit, and its verdict."""
    graded = {
        key: [output.value for output in outputs if output.value is not None]
        for key, outputs in readings.items()
    }
    failures = [
        str(output.failure)
        for outputs in readings.values()
        for output in outputs
        if output.value is None
    ]
    first = {key: values[0] for key, values in graded.items() if values}
    kinds = list(dict.fromkeys(kind for _, kind in readings if kind != CORRECT))
    pairs = [
        Pair(case, kind, first[case, CORRECT], value)
        for (case, kind), value in first.items()
        if kind != CORRECT and (case, CORRECT) in first
    ]
    by_category: dict[str, list[Pair]] = {}
    for pair in pairs:
        if pair.kind in CLEARLY_WRONG and (category := cases[pair.case].sample.category):
            by_category.setdefault(category, []).append(pair)
    ungraded_shares = {
        key: 1 - len(graded[key]) / len(outputs) for key, outputs in readings.items()
    }
    right = [value for (_, kind), value in first.items() if kind == CORRECT]
    repeated = [each for each in graded.values() if len(each) == NUM_READINGS]
    values = list(first.values())
    result = RewardAudit(
        reward,
        num_graded=sum(map(len, graded.values())),
        num_ungraded=len(failures),
        num_unreadable=sum(failure.startswith("unreadable") for failure in failures),
        first_failure=next(iter(failures), ""),
        silent={
            kind: _mean_share([share for key, share in ungraded_shares.items() if key[1] == kind])
            for kind in (CORRECT, *kinds)
        },
        mean_correct=float(np.mean(right)) if right else math.nan,
        overall=_kind("all kinds", pairs),
        kinds=[_kind(kind, [pair for pair in pairs if pair.kind == kind]) for kind in kinds],
        categories=[_kind(name, own) for name, own in sorted(by_category.items())],
        noise_sd=noise_sd(np.array(repeated)) if repeated else math.nan,
        num_levels=len(set(values)),
        lowest_share=values.count(0.0) / max(len(values), 1),
        highest_share=values.count(1.0) / max(len(values), 1),
        worst=sorted(pairs, key=lambda pair: (pair.right - pair.wrong, pair.case)),
    )
    failures, doubts = decided(result, limits)
    return replace(result, failures=failures, doubts=doubts)


def _mean_share(shares: Sequence[float]) -> tuple[float, float]:
    """(mean of the shares, lower end of its 95 % interval)."""
    share = float(np.mean(shares))
    return share, wilson_interval(share, len(shares))[0]


def _kind(name: str, pairs: Sequence[Pair]) -> Kind:
    values = [(pair.case, pair.right, pair.wrong) for pair in pairs]
    case_P, right_P, wrong_P = np.array(values, float).reshape(-1, 3).T
    area, interval = auroc(case_P.astype(int), right_P, wrong_P)
    return Kind(
        name=name,
        num_pairs=len(pairs),
        accuracy=float((right_P > wrong_P).mean()) if pairs else math.nan,
        ties=float((right_P == wrong_P).mean()) if pairs else math.nan,
        auroc=area,
        auroc_interval=interval,
        mean=float(wrong_P.mean()) if pairs else math.nan,
    )


async def attack(
    plugin: Plugin[Reward],
    judge: Judge | None,
    device: str,
    cases: Sequence[Case],
    limits: JudgeConfig,
) -> tuple[list[AttackResult], float, float]:
    """(attacks on one reward, mean of right results, floor as in `AttackResult.gain`; 0 without
    references). Raises JudgeError if too many results are ungraded."""
    reference_kinds = (CORRECT, "no_edit", "other_result")
    shown = {
        (number, kind): result
        for number, case in enumerate(cases)
        for kind, result in {**case.results, **attacked(case)}.items()
        if kind in (*reference_kinds, *ATTACKS)
    }
    asked = await ask(plugin, judge, device, shown)
    graded = measured(plugin.key, cases, asked, limits)
    if few := too_few_graded(graded):
        raise JudgeError(f"{plugin.key}: {few}")
    means = {kind.name: kind.mean for kind in graded.kinds if kind.num_pairs}
    right = graded.mean_correct
    floor = min((means[kind] for kind in reference_kinds[1:] if kind in means), default=0.0)
    results = []
    for name, mean in means.items():
        if name not in reference_kinds:
            gain = (mean - floor) / (right - floor) if right > floor else math.inf
            results.append(AttackResult(name, mean, gain, gain <= MAX_GAIN))
    return results, right, floor


def save_results(resolved: Resolved, **results: Any) -> None:
    """Add `audits`, `pairs` or `attacks` to the entry of the config's judge; without any, an entry
    without results, which shows whether the file can be written. Raises JudgeError if too many
    questions got no reply, as in an outage: such an audit would refuse every later start."""
    for each in (*results.get("audits", ()), *results.get("pairs", ())):
        if few := too_few_graded(each, each.num_unreadable):
            raise JudgeError(f"{each.reward}: {few}. This audit is not kept; try again")
    file, judge_identity = file_of(resolved.config), identity(resolved)
    known, key = entries(file), key_of(judge_identity)
    known[key] = {**known.get(key, {}), "judge": judge_identity, **results}
    if results:
        known[key]["date"] = time.strftime("%Y-%m-%d %H:%M:%S%z")
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(
        known, indent=1, default=lambda each: {k: v for k, v in vars(each).items() if k != "worst"}
    )
    write_atomically(file, text + "\n")


# ---- audit report --------------------------------------------------------------------------------
# What an audit and an attack print, and the page of an audit with the worst errors.

NUM_WORST = 12
SIDE_PX = 256


def audit_lines(audit: RewardAudit) -> Iterable[str]:
    """At most 80 columns each."""
    yield f"{audit.reward}: mean value of the right results {audit.mean_correct:.2f}"
    yield "  wrong results     pairs right wins  ties             AUROC  mean ungraded"
    for kind in audit.kinds:
        yield _kind_line(kind, f"{audit.silent[kind.name][0]:.0%}")
    yield _kind_line(audit.overall)
    if len(audit.categories) > 1:
        yield "  clearly wrong results, by category"
        yield from map(_kind_line, audit.categories)
    if not math.isnan(audit.noise_sd):
        yield f"  repeats: standard deviation {audit.noise_sd:.3f}"
    yield (
        f"  values: {audit.num_levels} levels; "
        f"{audit.lowest_share:.0%} are 0, {audit.highest_share:.0%} are 1"
    )
    yield f"  ungraded: {audit.num_ungraded} of {audit.num_graded + audit.num_ungraded}"
    verdicts = [f"FAIL {text}" for text in audit.failures]
    verdicts += [f"UNDECIDED: add cases (--cases N): {text}" for text in audit.doubts]
    for text in verdicts or ["PASS"]:
        yield printing.folded(text, "  ", 7)


def _kind_line(kind: Kind, ungraded: str = "") -> str:
    low, high = kind.auroc_interval
    numbers = (
        f"{kind.num_pairs:>5} {kind.accuracy:>10.0%} {kind.ties:>5.0%}"
        f"  {kind.auroc:>4.2f} ({low:>4.2f}-{high:>4.2f}) {kind.mean:>5.2f} {ungraded:>8}".rstrip()
    )
    return f"  {kind.name[:18]:<18}" + numbers.replace("nan%", "   -").replace("nan", "  -")


def attack_lines(
    reward: str, results: Sequence[AttackResult], right: float, floor: float
) -> Iterable[str]:
    yield f"{reward}: right results {right:.2f}; unchanged or another sample's {floor:.2f}"
    for result in results:
        verdict = "PASS" if result.passed else "FAIL"
        gain = f"{result.gain:>5.0%}" if math.isfinite(result.gain) else "    -"
        meaning = ATTACKS[result.name][0]
        yield f"  {verdict} {result.name:<16}{result.mean:>5.2f} gain {gain}  {meaning}"


def write_audit_page(
    file: Path, title: str, audits: Sequence[RewardAudit], cases: Sequence[Case]
) -> None:
    """A page without scripts: the tables, and the wrong results that scored highest against the
    right ones."""
    shown = [
        {
            "audit": audit,
            "text": "\n".join(audit_lines(audit)),
            "worst": [_shown(cases[pair.case], pair) for pair in audit.worst[:NUM_WORST]],
        }
        for audit in audits
    ]
    page = load_template(Path(__file__).with_name("audit_page.html.j2"), autoescape=True)
    write_atomically(file, page.render(title=title, audits=shown))


def _shown(case: Case, pair: Pair) -> Mapping[str, Any]:
    sample, picture = case.results[pair.kind]
    pictures = [
        *(("source", source) for source in sample.sources),
        (f"right: {pair.right:.2f}", case.results[CORRECT][1]),
        (f"wrong: {pair.wrong:.2f}", picture),
    ]
    return {
        "instruction": sample.instruction,
        "kind": pair.kind,
        "meaning": KINDS.get(pair.kind, ""),
        "is_error": pair.wrong >= pair.right,
        "pictures": [(label, _data_url(image)) for label, image in pictures],
    }


def _data_url(picture: Image) -> str:
    file = io.BytesIO()
    downscale(picture, SIDE_PX).save(file, "WEBP", quality=80)
    return "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode()


# ---- command -------------------------------------------------------------------------------------


@printing.program
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 the judge passed, 1 it failed, 2 it could not be asked, 3 undecided."""
    parser = printing.Parser("rl judge", __doc__)
    parser.add_argument(
        "action", choices=("audit", "attack"), metavar="action", help="audit or attack"
    )
    parser.add_config()
    parser.add_argument(
        "--cases", type=at_least_one, default=NUM_CASES, metavar="N", help="samples: 64"
    )
    parser.add_argument("--seed", type=int, default=0, help="other drawn scenes")
    parser.add_argument("--pairs", metavar="FILE", help="labelled pairs, or a data set on the hub")
    parser.add_argument("--columns", default="", help="instruction=..,source=..,better=..,worse=..")
    parser.add_argument("--at-start", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args(argv)
    if args.columns and not args.pairs:
        parser.error("--columns names the columns of --pairs FILE")
    try:
        if args.at_start:
            with redirect_stderr(sys.stdout):  # stderr has nothing but the reason of a failure
                return asyncio.run(_at_start(*args.at_start))
        resolved = build.resolve(load_config(args.config, args.overrides))
        parts = resolved.by_judge
        asked = [key for key, part in parts.items() if audited_rewards(part)[0]]
        codes = {asyncio.run(_run(args, key, parts[key])) for key in asked or ["judge"]}
        return next((code for code in (2, 1, 3) if code in codes), 0)
    except BrokenPipeError:
        raise
    except (ConfigError, JudgeError, ValueError, OSError) as error:
        print(remedy(error) if isinstance(error, OSError) else error, file=sys.stderr)
        return 2


async def _run(args: argparse.Namespace, key: str, resolved: Resolved) -> int:
    """Ask one judge; `key`: as in `Resolved.by_judge`. Returns the exit code."""
    names, reasons = audited_rewards(resolved)
    for reason in reasons:
        print(reason)
    if not names:
        print("no reward of this config judges pictures by a model: there is nothing to audit")
        return 2
    config = resolved.config
    device = "cuda:0" if has_gpus() else "cpu"
    async with AsyncExitStack() as stack:
        client = await _client(resolved, stack, file_of(config).with_suffix(".log"))
        if args.pairs:
            columns = dict(part.split("=", 1) for part in args.columns.split(",") if "=" in part)
            cases = pair_cases(resolved, args.pairs, columns)[: args.cases]
            if not cases:
                raise ValueError(f"--pairs: {args.pairs} has no usable row")
        else:
            cases = configured_cases(resolved, names, args.cases, args.seed)
        file = file_of(config)
        save_results(resolved)  # finds an unwritable file before questions cost
        started = time.monotonic()
        if args.action == "attack":
            attacks, code = {}, 0
            for name in names:
                plugin = resolved.rewards[name]
                results, right, floor = await attack(plugin, client, device, cases, config.judge)
                print("\n".join(attack_lines(plugin.key, results, right, floor)))
                code |= not all(result.passed for result in results)
                attacks[name] = results
            save_results(resolved, attacks=attacks)
        else:
            audits = [
                await audit(resolved.rewards[name], client, device, cases, config.judge)
                for name in names
            ]
            for each in audits:
                print("\n".join(audit_lines(each)))
            undecided = 3 * any(audit.doubts for audit in audits)
            code = 1 if any(audit.failures for audit in audits) else undecided
            page = file.with_name(f"{key.removesuffix('judge')}{file.stem}.html")
            write_audit_page(page, f"Audit of the judge {config.judge.model}", audits, cases)
            print(f"page: {page}")
            save_results(resolved, **{"pairs" if args.pairs else "audits": audits})
        stats = client.take_stats() if client else JudgeStats()
        tokens = f"{stats.prompt_tokens} prompt and {stats.completion_tokens} completion tokens"
        print(f"{stats.requests} requests, {tokens}, {time.monotonic() - started:.1f} s")
        print(f"kept in: {file}")
    return code


async def _at_start(key: str, log: str, *api_bases: str) -> int:
    """Audit the judge of a run that starts, whose config is on stdin. `key`: as in
    `Resolved.by_judge`; `log`, `api_bases`: as in `_client`."""
    started = time.monotonic()
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)  # as the run, from its folder, too
    resolved = build.resolve(RunConfig.model_validate_json(sys.stdin.read())).by_judge[key]
    names = rewards_that_ask(resolved)
    cases = configured_cases(resolved, names, NUM_CASES, seed=0)
    print(f"auditing the judge on {len(cases)} samples of known quality")
    async with AsyncExitStack() as stack:
        client = await _client(resolved, stack, Path(log), api_bases)
        limits = resolved.config.judge
        audits = [
            await audit(resolved.rewards[name], client, "cpu", cases, limits) for name in names
        ]
    save_results(resolved, audits=audits)
    took = duration(time.monotonic() - started)
    for each in audits:
        passed = [f"{each.reward}: PASS in all {len(each.kinds)} kinds, {took}"]
        print("\n".join(audit_lines(each) if each.failures or each.doubts else passed))
    return 0


async def _client(
    resolved: Resolved, stack: AsyncExitStack, log: Path, api_bases: Sequence[str] = ()
) -> JudgeClient | None:
    """A client of the config's judge, which is started if the config says so. `log`: the output of
    a started judge; `api_bases`: where it runs already."""
    if not resolved.needs_judge:
        return None
    config = resolved.config.judge
    if config.start_command and not api_bases:
        api_bases = [await stack.enter_context(StartedJudge(config, log)).wait_until_ready()]
    bases = api_bases or resolve_api_bases(config.api_base)
    client = JudgeClient(config, bases, check=partial(raise_if_ended, config, log))
    stack.push_async_callback(client.aclose)
    await client.check_health(0.0)
    return client


if __name__ == "__main__":
    sys.exit(main())
