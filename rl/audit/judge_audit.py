"""Asks a config's rewards about results of known quality, and decides whether to trust the judge.

`judge_audit.json` in the folder of the runs keeps one entry per judge.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL.Image import Image
from pydantic import TypeAdapter

from rl.api.judge import Answer, Judge, Question
from rl.api.plugin import Resources
from rl.api.reward import Reward
from rl.api.types import RewardInput, RewardOutput, Sample
from rl.audit import audit_statistics as statistics
from rl.audit.audit_cases import CLEARLY_WRONG, CORRECT, Case
from rl.audit.judge_attacks import attacked
from rl.build import Plugin, Resolved
from rl.config.loading import read_bytes
from rl.config.schema import JudgeConfig, RunConfig
from rl.files import write_atomically
from rl.judge.client import JudgeError
from rl.rollout.episodes import scores

T = TypeVar("T")
Pair = tuple[int, float, float]
"""Case, value of its right result, value of a wrong one."""

FILE = "judge_audit.json"
NUM_CASES = 64
"""A judge of AUROC 0.97, and one of 0.85, get their verdict from so many in 95 of 100 audits
(`benchmarks/audit_power.py`)."""
NUM_REPEATED, NUM_READINGS = 4, 3
"""The results of the first 4 cases are read 3 times."""
MIN_PAIRS = 8
"""A kind or category with fewer pairs decides nothing by itself."""
RULES = 2
"""The number of the rules that decide; an audit by others counts as none."""
TARGET_RELIABILITY = 0.8
"""A report says how many readings reach it."""
PICTURES = frozenset({"source", "image", "target"})


@dataclass(frozen=True)
class Kind:
    """How well one kind of wrong results is told from the right ones."""

    name: str
    num_pairs: int
    accuracy: float
    """Share of pairs of one sample in which the right result scores higher."""
    ties: float
    auroc: float
    auroc_interval: statistics.Interval
    """95 %; nan, like the other numbers, without pairs."""
    mean: float
    """Mean value of these results, 0 to 1."""


@dataclass(frozen=True)
class RewardAudit:
    """The audit of one reward. Values are 0 to 1."""

    reward: str
    num_graded: int
    num_ungraded: int
    num_unreadable: int
    """Those of the ungraded readings to which the judge did reply."""
    first_failure: str
    """Why the first of them was not graded."""
    silent: Mapping[str, statistics.Interval]
    """Kind, the right results too -> (mean share of a result's readings that are ungraded; the
    lower end of its 95 % interval)."""
    mean_correct: float
    overall: Kind
    """All wrong results."""
    kinds: Sequence[Kind]
    """Also one without a graded result."""
    categories: Sequence[Kind]
    """The clearly wrong results by the sample's category."""
    noise_sd: float
    """Standard deviation of repeated readings of one result."""
    reliability: float
    """ICC of one reading within the results of one sample."""
    num_levels: int
    effective_levels: float
    lowest_share: float
    highest_share: float
    failures: Sequence[str] = ()
    """Why the judge fails."""
    doubts: Sequence[str] = ()
    """What the cases do not decide. The judge passes if there are neither failures nor doubts."""
    worst: Sequence[tuple[int, str, float, float]] = field(default=(), repr=False)
    """(case, kind, value of the right result, value of the wrong one), worst first."""


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


def audited_rewards(resolved: Resolved) -> tuple[list[str], list[str]]:
    """(the names of the rewards that judge pictures; why the others are not audited)."""
    names, reasons = [], []
    for name, plugin in resolved.rewards.items():
        cls, needs = plugin.cls, plugin.cls.needs_with(plugin.config)
        if "image" not in needs or not (cls.needs_judge or cls.runs_model):
            reasons.append(f"{name}: not audited, because it judges no picture by a model")
        elif cls.scores_groups() or needs - PICTURES:
            reasons.append(f"{name}: not audited, because it reads more than one sample's pictures")
        else:
            names.append(name)
    return names, reasons


def rewards_that_ask(resolved: Resolved) -> list[str]:
    """Of the audited rewards, those that a start audits: they train, and need no model but the
    judge."""
    plugins = {name: resolved.rewards[name] for name in audited_rewards(resolved)[0]}
    return [
        name
        for name, plugin in plugins.items()
        if plugin.cls.needs_judge and not (plugin.cls.runs_model or plugin.keys.held_out_only)
    ]


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


def decided(result: RewardAudit, limits: JudgeConfig) -> tuple[list[str], list[str]]:
    """(failures, without any: doubts) by the thresholds `judge.audit_*`; without both it passes.

    Over all kinds, the 95 % interval of the AUROC has to lie above the line `audit_min_auroc`. It
    fails if it neither does so nor reaches a quarter of the errors that the line allows: more cases
    would hardly help. A kind or category fails if its interval lies below the line; a kind passes
    if it lies above twice those errors, so that the judge is not blind to it.
    """
    line, errors = limits.audit_min_auroc, 1 - limits.audit_min_auroc
    rows = [row for row in (*result.kinds, *result.categories) if row.num_pairs >= MIN_PAIRS]
    weak = [row for row in rows if row.auroc_interval[1] < line]
    unclear = [
        kind
        for kind in result.kinds
        if kind.num_pairs >= MIN_PAIRS
        and kind.auroc_interval[0] < 1 - 2 * errors
        and kind.auroc_interval[1] >= line
    ]
    if result.overall.auroc_interval[0] < line:  # not without pairs
        may_be_good = result.overall.auroc_interval[1] >= 1 - errors / 4
        (unclear if may_be_good else weak).insert(0, result.overall)
    limit = f"judge.audit_min_auroc={line:g}"
    failures = [f"{row.name}: AUROC {row.auroc:.2f}, not above {limit}" for row in weak]
    doubts = [
        f"{row.name}: AUROC {row.auroc:.2f} ({low:.2f}-{high:.2f}), to be above {limit}"
        for row in unclear
        for low, high in [row.auroc_interval]
    ]
    if result.noise_sd > limits.audit_max_noise:
        failures.append(
            f"readings of one picture differ by {result.noise_sd:.3f} (standard deviation), above "
            f"judge.audit_max_noise={limits.audit_max_noise:g}: raise the reward's n_evals"
        )
    for kind, (share, at_least) in result.silent.items():
        if share > limits.audit_max_ungraded:
            (failures if at_least > limits.audit_max_ungraded else doubts).append(
                f"{kind}: no usable reply to {share:.0%}, above "
                f"judge.audit_max_ungraded={limits.audit_max_ungraded:g}"
            )
    if few := too_few_graded(result, limits):
        failures.append(few)
    return failures, [] if failures else doubts


def too_few_graded(result: RewardAudit, limits: JudgeConfig, num_excused: int = 0) -> str:
    """Why so many results are ungraded that an audit or attack shows nothing; '' if it does.
    `num_excused` ungraded ones do not count."""
    num_all = result.num_graded + result.num_ungraded
    num_lost = result.num_ungraded - num_excused
    if num_lost < num_all and num_lost <= limits.audit_max_ungraded * num_all:
        return ""
    return (
        f"{num_lost} of {num_all} results got no usable reply, above "
        f"judge.audit_max_ungraded={limits.audit_max_ungraded:g}; the first: {result.first_failure}"
    )


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


def identity(resolved: Resolved) -> dict[str, Any]:
    """What a verdict depends on: the rules, the model, the parameters of its requests, and each
    audited reward's config with a digest of its prompts."""
    judge = resolved.config.judge
    parameters = ("model", "revision", "temperature", "max_tokens", "image_side_px", "guided_json")
    rewards = {}
    for name in audited_rewards(resolved)[0]:
        config = resolved.rewards[name].config
        read = getattr(config, "read_prompts", None)
        text = "\0".join([*read(), *read(of_several=True)]) if read else ""
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        rewards[name] = {**config.model_dump(mode="json"), "prompts": digest}
    return {"rules": RULES, **{key: getattr(judge, key) for key in parameters}, "rewards": rewards}


def key_of(judge_identity: Mapping[str, Any]) -> str:
    """A digest of an identity: the entry's name in `judge_audit.json`."""
    return hashlib.sha256(json.dumps(judge_identity, sort_keys=True).encode()).hexdigest()[:16]


def file_of(config: RunConfig) -> Path:
    """Runs in one folder share their audits."""
    return config.run_dir.parent / FILE


def entries(file: Path) -> dict[str, Any]:
    """All entries of the file by key; {} if there is none. Raises ValueError if it is damaged."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(read_bytes(file))
        if not isinstance(found, dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}): delete it, and audit again") from None
    return found


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


@dataclass(frozen=True)
class Verdict:
    """What is known about the judge of a config."""

    passed: bool | None
    """None: it has not been audited. False: it failed, or its audit is undecided."""
    text: str


def verdict(resolved: Resolved) -> Verdict:
    """The statement of `judge_audit.json` about this config's judge, by the config's thresholds.
    Raises ValueError if the file is damaged."""
    file = file_of(resolved.config)
    entry = entries(file).get(key_of(identity(resolved)), {})
    limits = resolved.config.judge
    try:
        if "audits" not in entry:
            return Verdict(None, f"the judge has not been audited (no entry in {file})")
        audits = TypeAdapter(list[RewardAudit]).validate_python(entry["audits"])
        day = entry["date"][:10]
        found = [(each.reward, decided(each, limits)) for each in audits]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is damaged ({error}): delete it, and audit again") from None
    for i, what in enumerate(
        (
            f"the judge failed its audit of {day}",
            f"the judge's audit of {day} is undecided: add cases (`rl judge audit --cases N`)",
        )
    ):
        if texts := [f"{reward}: {text}" for reward, both in found for text in both[i]]:
            more = f"; {len(texts) - 3} more" if len(texts) > 3 else ""
            return Verdict(False, f"{what}: {'; '.join(texts[:3])}{more}")
    return Verdict(True, f"the judge passed its audit of {day}")
