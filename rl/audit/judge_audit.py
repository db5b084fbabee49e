"""Asks a config's rewards about results of known quality, and keeps what they say of the judge."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from PIL.Image import Image

from rl.api.judge import Answer, Judge, Question
from rl.api.plugin import Resources
from rl.api.reward import Reward
from rl.api.types import RewardInput, RewardOutput, Sample
from rl.audit import audit_statistics as statistics
from rl.audit.audit_cases import CLEARLY_WRONG, CORRECT, Case
from rl.audit.judge_attacks import attacked
from rl.build import Plugin, Resolved
from rl.check.judge_verdict import (
    Kind,
    RewardAudit,
    decided,
    entries,
    file_of,
    identity,
    key_of,
    too_few_graded,
)
from rl.config.schema import JudgeConfig
from rl.files import write_atomically
from rl.judge.client import JudgeError
from rl.rollout.episodes import scores

T = TypeVar("T")
Pair = tuple[int, float, float]
"""Case, value of its right result, value of a wrong one."""

NUM_CASES = 64
"""A judge of AUROC 0.97, and one of 0.85, get their verdict from so many in 95 of 100 audits
(`benchmarks/audit_power.py`)."""
NUM_REPEATED, NUM_READINGS = 4, 3
"""The results of the first 4 cases are read 3 times."""
TARGET_RELIABILITY = 0.8
"""A report says how many readings reach it."""


@dataclass(frozen=True)
class AttackResult:
    name: str
    mean: float
    gain: float
    """(mean - floor) / (mean of the right results - floor). The floor is the lower mean of the
    unchanged source and another sample's result; infinite if the right results are not above it."""
    passed: bool


@dataclass(frozen=True)
class Asked:
    """All readings of some results by one reward."""

    values: Mapping[tuple[int, str], tuple[float, ...]]
    """(case, kind) -> the graded readings, 0 to 1."""
    failures: Mapping[tuple[int, str], Sequence[str]]
    """(case, kind) -> why its other readings were not graded, [] if they all were."""


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
    results: Mapping[tuple[int, str], tuple[Sample, Image]],
    repeated: frozenset[int] = frozenset(),
) -> Asked:
    """Grade results by one reward; those of the cases in `repeated` three times."""
    readings: dict[tuple[int, str], list[RewardOutput]] = {key: [] for key in results}
    for reading in range(NUM_READINGS if repeated else 1):
        first_repeat = reading * int(getattr(plugin.config, "n_evals", 1))
        asked_judge = judge and _LaterReading(judge, first_repeat)
        reward = await asyncio.to_thread(plugin.cls, plugin.config, Resources(asked_judge, device))
        keys = [key for key in results if reading == 0 or key[0] in repeated]
        try:
            outputs = await asyncio.gather(
                *(
                    scores(plugin.key, reward, [RewardInput(results[key][0], "", results[key][1])])
                    for key in keys
                )
            )
        finally:
            await asyncio.to_thread(reward.close)
        for key, [output] in zip(keys, outputs, strict=True):
            readings[key].append(output)
    values = {
        key: tuple(output.value for output in outputs if output.value is not None)
        for key, outputs in readings.items()
    }
    failures = {
        key: [str(output.failure) for output in outputs if output.value is None]
        for key, outputs in readings.items()
    }
    return Asked(values, failures)


async def audit_all(
    resolved: Resolved,
    names: Sequence[str],
    judge: Judge | None,
    device: str,
    cases: Sequence[Case],
) -> list[RewardAudit]:
    """Audit the rewards called `names`, one after the other."""
    limits = resolved.config.judge
    return [await audit(resolved.rewards[name], judge, device, cases, limits) for name in names]


async def audit(
    plugin: Plugin[Reward],
    judge: Judge | None,
    device: str,
    cases: Sequence[Case],
    limits: JudgeConfig,
) -> RewardAudit:
    """Ask one reward about all results of all cases. `limits`: the thresholds of `judge.audit`."""
    needs = plugin.cls.needs_with(plugin.config)
    sees_instruction, sees_source = "target" not in needs, "source" in needs
    results = {
        (number, kind): result
        for number, case in enumerate(cases)
        for kind, result in case.results.items()
        if (sees_instruction or kind != "other_instruction")
        and (sees_source or kind != "exchanged")
    }
    asked = await ask(plugin, judge, device, results, frozenset(range(NUM_REPEATED)))
    return measured(plugin.key, cases, asked, limits)


def measured(reward: str, cases: Sequence[Case], asked: Asked, limits: JudgeConfig) -> RewardAudit:
    """The statistics of an audit, and its verdict."""
    first = {key: values[0] for key, values in asked.values.items() if values}
    by_kind: dict[str, list[Pair]] = {kind: [] for _, kind in asked.values if kind != CORRECT}
    by_category: dict[str, list[Pair]] = {}
    worst = []
    for (case, kind), value in first.items():
        if kind != CORRECT and (case, CORRECT) in first:
            pair = case, first[case, CORRECT], value
            by_kind[kind].append(pair)
            if kind in CLEARLY_WRONG and cases[case].sample.category:
                by_category.setdefault(cases[case].sample.category, []).append(pair)
            worst.append((case, kind, *pair[1:]))
    lost = {
        key: len(texts) / (len(texts) + len(asked.values[key]))
        for key, texts in asked.failures.items()
    }
    reasons = [reason for each in asked.failures.values() for reason in each]
    right = [value for (_, kind), value in first.items() if kind == CORRECT]
    groups = repeated(asked)
    values = list(first.values())
    result = RewardAudit(
        reward,
        num_graded=sum(map(len, asked.values.values())),
        num_ungraded=len(reasons),
        num_unreadable=sum(reason.startswith("unreadable") for reason in reasons),
        first_failure=next(iter(reasons), ""),
        silent={
            kind: _silence([share for key, share in lost.items() if key[1] == kind])
            for kind in (CORRECT, *by_kind)
        },
        mean_correct=float(np.mean(right)) if right else math.nan,
        overall=_kind("all kinds", [pair for pairs in by_kind.values() for pair in pairs]),
        kinds=[_kind(name, pairs) for name, pairs in by_kind.items()],
        categories=[_kind(name, pairs) for name, pairs in sorted(by_category.items())],
        noise_sd=statistics.noise_sd(np.concatenate(groups)) if groups else math.nan,
        reliability=statistics.reliability(groups) if groups else math.nan,
        num_levels=len(set(values)),
        effective_levels=statistics.effective_levels(values) if values else 0.0,
        lowest_share=values.count(0.0) / max(len(values), 1),
        highest_share=values.count(1.0) / max(len(values), 1),
        worst=sorted(worst, key=lambda row: row[2] - row[3]),
    )
    failures, doubts = decided(result, limits)
    return replace(result, failures=failures, doubts=doubts)


def _silence(shares: Sequence[float]) -> statistics.Interval:
    share = float(np.mean(shares))
    return share, statistics.wilson_interval(share, len(shares))[0]


def _kind(name: str, pairs: Sequence[Pair]) -> Kind:
    case, right, wrong = np.array(pairs, float).reshape(-1, 3).T
    area, interval = statistics.auroc(case.astype(int), right, wrong)
    accuracy, ties, mean = (
        float(each.mean()) if pairs else math.nan for each in (right > wrong, right == wrong, wrong)
    )
    return Kind(name, len(pairs), accuracy, ties, area, interval, mean)


def repeated(asked: Asked) -> list[np.ndarray]:
    """[pictures, readings] of each case with at least two pictures that have all their readings."""
    by_case: dict[int, list[tuple[float, ...]]] = {}
    for (case, _), values in asked.values.items():
        if len(values) == NUM_READINGS:
            by_case.setdefault(case, []).append(values)
    return [np.array(rows) for rows in by_case.values() if len(rows) > 1]


async def attack(
    plugin: Plugin[Reward],
    judge: Judge | None,
    device: str,
    cases: Sequence[Case],
    limits: JudgeConfig,
) -> tuple[list[AttackResult], float, float]:
    """(attacks on one reward, mean of right results, lowest mean of a kind of wrong results).
    Raises JudgeError if too many results are ungraded."""
    references = {
        (number, kind): case.results[kind]
        for number, case in enumerate(cases)
        for kind in (CORRECT, "no_edit", "other_result")
        if kind in case.results
    }
    attacks = {
        (number, name): result
        for number, case in enumerate(cases)
        for name, result in attacked(case).items()
    }
    asked = await ask(plugin, judge, device, {**references, **attacks})
    if few := too_few_graded(measured(plugin.key, cases, asked, limits), limits):
        raise JudgeError(f"{plugin.key}: {few}")
    means, names = _means(asked), {kind for _, kind in references}
    right = means.get(CORRECT, math.nan)
    floor = min((means[kind] for kind in (names - {CORRECT}) & means.keys()), default=0.0)
    results = []
    for name, mean in means.items():
        if name not in names:
            gain = (mean - floor) / (right - floor) if right > floor else math.inf
            results.append(AttackResult(name, mean, gain, gain <= limits.attack_max_gain))
    return results, right, floor


def _means(asked: Asked) -> dict[str, float]:
    """Kind -> mean value of its graded results."""
    by_kind: dict[str, list[float]] = {}
    for (_, kind), values in asked.values.items():
        by_kind.setdefault(kind, []).extend(values)
    return {kind: float(np.mean(values)) for kind, values in by_kind.items() if values}


def save_results(resolved: Resolved, **results: Any) -> None:
    """Add `audits`, `pairs` or `attacks` to the entry of the config's judge; without any, write the
    file unchanged, which shows whether it can be written. Raises JudgeError if too many questions
    got no reply, as in an outage: such an audit would refuse every later start."""
    for each in (*results.get("audits", ()), *results.get("pairs", ())):
        if few := too_few_graded(each, resolved.config.judge, each.num_unreadable):
            raise JudgeError(f"{each.reward}: {few}. This audit is not kept; try again")
    file, judge_identity = file_of(resolved.config), identity(resolved)
    known, key = entries(file), key_of(judge_identity)
    entry = {**known.get(key, {}), "judge": judge_identity, **results}
    if results:
        entry["date"] = time.strftime("%Y-%m-%d %H:%M:%S%z")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps({**known, key: entry}, indent=1, default=_kept) + "\n")


def _kept(result: RewardAudit | Kind | AttackResult) -> Mapping[str, Any]:
    return {name: value for name, value in vars(result).items() if name != "worst"}
