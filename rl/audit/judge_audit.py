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
from dataclasses import asdict, dataclass, field
from pathlib import Path
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
from rl.config.schema import JudgeConfig, RunConfig
from rl.files.atomic import write_atomically
from rl.judge.client import JudgeError
from rl.rollout.grading import scores

T = TypeVar("T")

FILE = "judge_audit.json"
NUM_CASES = 16
NUM_REPEATED, NUM_READINGS = 4, 3
"""The results of the first 4 cases are read 3 times."""
MIN_PAIRS = 8
"""A kind or category with fewer pairs decides nothing."""
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
    accuracy_interval: tuple[float, float]
    ties: float
    auroc: float
    auroc_interval: tuple[float, float]
    mean: float
    """Mean value of these results, 0 to 1."""


@dataclass(frozen=True)
class RewardAudit:
    """The audit of one reward. Values are 0 to 1."""

    reward: str
    num_graded: int
    num_ungraded: int
    first_failure: str
    """Why the first of them was not graded."""
    mean_correct: float
    kinds: Sequence[Kind]
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
    fallback_value: float
    fallback_share: float
    """The value that right and clearly wrong results share most, and how often."""
    failures: Sequence[str]
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
    failures: Sequence[str]
    """Why the others were not graded."""


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
    """Of the audited rewards, those that need no model but the judge."""
    names, _ = audited_rewards(resolved)
    plugins = {name: resolved.rewards[name].cls for name in names}
    return [name for name, cls in plugins.items() if cls.needs_judge and not cls.runs_model]


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
    everything = (output for outputs in readings.values() for output in outputs)
    return Asked(values, [str(output.failure) for output in everything if output.value is None])


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
    """The statistics of an audit."""
    first = {key: values[0] for key, values in asked.values.items() if values}
    kind_names = dict.fromkeys(kind for _, kind in first if kind != CORRECT)
    pairs = {
        (case, kind): (first[case, CORRECT], value)
        for (case, kind), value in first.items()
        if kind != CORRECT and (case, CORRECT) in first
    }
    kinds = [
        _kind(name, [pair for (_, kind), pair in pairs.items() if kind == name])
        for name in kind_names
    ]
    by_category: dict[str, list[tuple[float, float]]] = {}
    for (case, kind), pair in pairs.items():
        if kind in CLEARLY_WRONG and cases[case].sample.category:
            by_category.setdefault(cases[case].sample.category, []).append(pair)
    right = [value for (_, kind), value in first.items() if kind == CORRECT]
    wrong = [value for (_, kind), value in first.items() if kind in (*CLEARLY_WRONG, "worse")]
    fallback, share = statistics.common_value(right, wrong) if right else (math.nan, 0.0)
    groups = repeated(asked)
    icc = statistics.reliability(groups) if groups else math.nan
    values = list(first.values())
    result = RewardAudit(
        reward,
        num_graded=sum(map(len, asked.values.values())),
        num_ungraded=len(asked.failures),
        first_failure=next(iter(asked.failures), ""),
        mean_correct=float(np.mean(right)) if right else math.nan,
        kinds=kinds,
        categories=[_kind(name, pairs) for name, pairs in sorted(by_category.items())],
        noise_sd=statistics.noise_sd(np.concatenate(groups)) if groups else math.nan,
        reliability=icc,
        num_levels=len(set(values)),
        effective_levels=statistics.effective_levels(values) if values else 0.0,
        lowest_share=values.count(0.0) / max(len(values), 1),
        highest_share=values.count(1.0) / max(len(values), 1),
        fallback_value=fallback,
        fallback_share=share,
        failures=(),
        worst=sorted(
            ((case, kind, *pair) for (case, kind), pair in pairs.items()),
            key=lambda row: row[2] - row[3],
        ),
    )
    return RewardAudit(**{**vars(result), "failures": failures(result, limits)})


def _kind(name: str, pairs: Sequence[tuple[float, float]]) -> Kind:
    right, wrong = (np.array([pair[i] for pair in pairs]) for i in (0, 1))
    num_right = int((right > wrong).sum())
    return Kind(
        name,
        num_pairs=len(pairs),
        accuracy=num_right / len(pairs),
        accuracy_interval=statistics.wilson_interval(num_right, len(pairs)),
        ties=float((right == wrong).mean()),
        auroc=statistics.auroc(right, wrong),
        auroc_interval=statistics.auroc_interval(pairs),
        mean=float(wrong.mean()),
    )


def repeated(asked: Asked) -> list[np.ndarray]:
    """[pictures, readings] of each case with at least two pictures that have all their readings."""
    by_case: dict[int, list[tuple[float, ...]]] = {}
    for (case, _), values in asked.values.items():
        if len(values) == NUM_READINGS:
            by_case.setdefault(case, []).append(values)
    return [np.array(rows) for rows in by_case.values() if len(rows) > 1]


def failures(result: RewardAudit, limits: JudgeConfig) -> list[str]:
    """What is below the thresholds of `judge.audit_*`; [] if the judge passes."""
    problems = []
    most = max((kind.num_pairs for kind in result.kinds), default=0)
    if result.num_graded and most < MIN_PAIRS:
        problems.append(f"at most {most} pairs of a kind, and {MIN_PAIRS} are needed to decide")
    weak = [
        k for k in result.kinds if k.num_pairs >= MIN_PAIRS and k.auroc < limits.audit_min_auroc
    ]
    if weak:
        named = ", ".join(f"{kind.name} {kind.auroc:.2f}" for kind in weak)
        problems.append(f"AUROC below judge.audit_min_auroc={limits.audit_min_auroc:g}: {named}")
    rows = (*result.kinds, *result.categories)
    lost = [k for k in rows if k.num_pairs >= MIN_PAIRS and k.accuracy < limits.audit_min_accuracy]
    if lost:
        named = ", ".join(f"{kind.name} {kind.accuracy:.0%}" for kind in lost)
        problems.append(
            "the right result wins fewer pairs than "
            f"judge.audit_min_accuracy={limits.audit_min_accuracy:g}: {named}"
        )
    if result.noise_sd > limits.audit_max_noise:
        problems.append(
            f"readings of one picture differ by {result.noise_sd:.3f} (standard deviation), above "
            f"judge.audit_max_noise={limits.audit_max_noise:g}: raise the reward's n_evals"
        )
    if result.fallback_share > limits.audit_max_fallback:
        problems.append(
            f"at least {result.fallback_share:.0%} of the right and of the wrong results get the "
            f"value {result.fallback_value:.3g}, above "
            f"judge.audit_max_fallback={limits.audit_max_fallback:g}"
        )
    few = too_few_graded(result, limits)
    return [*problems, few] if few else problems


def too_few_graded(result: RewardAudit, limits: JudgeConfig) -> str:
    """Why so many results are ungraded that an audit or attack shows nothing; '' if it does."""
    graded, ungraded = result.num_graded, result.num_ungraded
    if graded and ungraded <= limits.audit_max_ungraded * (graded + ungraded):
        return ""
    return (
        f"{ungraded} of {graded + ungraded} results got no usable reply, above "
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
    """What the judge's answers depend on: the model, the parameters of its requests, and each
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
    return {**{key: getattr(judge, key) for key in parameters}, "rewards": rewards}


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
        found = json.loads(file.read_text("utf-8"))
        if not isinstance(found, dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}): delete it, and audit again") from None
    return found


def save_results(resolved: Resolved, **results: Any) -> None:
    """Add `audits`, `pairs` or `attacks` to the entry of the config's judge; without any, write the
    file unchanged, which shows whether it can be written. Raises JudgeError if too many are
    ungraded, as in an outage: such an audit would refuse every later start."""
    for each in (*results.get("audits", ()), *results.get("pairs", ())):
        if few := too_few_graded(each, resolved.config.judge):
            raise JudgeError(f"{each.reward}: {few}. This audit is not kept; try again")
    file, judge_identity = file_of(resolved.config), identity(resolved)
    known, key = entries(file), key_of(judge_identity)
    entry = {**known.get(key, {}), "judge": judge_identity, **results}
    if results:
        entry["date"] = time.strftime("%Y-%m-%d %H:%M:%S%z")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps({**known, key: entry}, indent=1, default=_plain) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, RewardAudit):
        return {k: v for k, v in asdict(value).items() if k != "worst"}
    return asdict(value)


def _restored(values: Mapping[str, Any]) -> RewardAudit:
    """The audit that `_plain` has written."""
    rows = {key: [Kind(**row) for row in values[key]] for key in ("kinds", "categories")}
    return RewardAudit(**{**values, **rows})


@dataclass(frozen=True)
class Verdict:
    """What is known about the judge of a config."""

    passed: bool | None
    """None: it has not been audited."""
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
        audits, day = [_restored(values) for values in entry["audits"]], entry["date"][:10]
        problems = [f"{each.reward}: {text}" for each in audits for text in failures(each, limits)]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is damaged ({error}): delete it, and audit again") from None
    if problems:
        listed = "; ".join(problems[:3]) + (f"; {len(problems) - 3} more" * (len(problems) > 3))
        return Verdict(False, f"the judge failed its audit of {day}: {listed}")
    return Verdict(True, f"the judge passed its audit of {day}")
