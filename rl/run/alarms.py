"""Warns of trends that training should not have, and of gaps between rewards."""

from __future__ import annotations

import fnmatch
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import numpy as np

from rl.algorithm.metrics import SPREAD_TOLERANCE, Metrics
from rl.api.types import Status
from rl.config.schema import RunConfig
from rl.files import read_rows
from rl.printing import excerpt
from rl.progress import warn
from rl.run.paired import NUM_ERRORS, Paired, paired, student

# ---- engine --------------------------------------------------------------------------------------
# An alarm is a condition over the last lines of a run's metrics. It stops no run. Alarms read only
# lines of metrics, so a resumed run and the page come to the same ones.

FIRST = 5
"""Growth is measured from this many first iterations of a run."""
TREND = 10
"""Number of last iterations that are kept: most shares need as many, because one iteration has only
a few groups."""

Line = Mapping[str, float]


@dataclass(frozen=True)
class Past:
    """What an alarm sees when a line logs its metric."""

    metric: str
    window: int
    lines: Sequence[Line]
    """Those of the last `TREND` that log the metric, oldest first."""
    first: Sequence[Line]
    """Those of the run's first `FIRST` that log it."""
    num: int
    """Number of the run's iterations."""
    name: str
    """What the `*` of the alarm's metric stands for."""

    @property
    def recent(self) -> Sequence[Line]:
        return self.lines[-self.window :]

    @property
    def values(self) -> list[float]:
        return [line[self.metric] for line in self.recent]

    @property
    def mean(self) -> float:
        return fmean(self.values)

    @property
    def before(self) -> list[float]:
        """As many values of the first iterations; none while these are among the last ones."""
        lines = self.first[: self.window] if self.num >= 2 * self.window else ()
        return [line[self.metric] for line in lines]

    @property
    def start(self) -> float:
        """Mean of `before`; NaN, which is beyond no limit, if values are missing."""
        return fmean(self.before) if len(self.before) == self.window else float("nan")


Measure = Callable[[Past], float]


@dataclass(frozen=True)
class Alarm:
    """One row of a table. Rows of the same metric are one condition."""

    metric: str
    """Name; `*` stands for any part. A line without the metric leaves the condition as it was."""
    window: int
    """Number of lines with the metric that it takes."""
    limit: float | Callable[[Past], float]
    sentence: str
    """Its fields: `p`, `value`, `limit`, `line` (the last one), `why` (see `causes`)."""
    measure: Measure = lambda p: p.mean
    """The value that is warned of above the limit."""
    causes: Sequence[tuple[Callable[[Line], object], str]] = ()
    """(whether it applies to the last line, text): the first that applies is `why`."""
    once: bool = False
    """Whether it is logged once in a run; else whenever it begins."""

    def text(self, p: Past) -> str:
        """The sentence if the condition holds, else ''."""
        if len(p.recent) < self.window:
            return ""
        value = self.measure(p)
        limit = self.limit if isinstance(self.limit, float | int) else self.limit(p)
        if not value > limit:
            return ""
        line = p.lines[-1]
        why = next((text for applies, text in self.causes if applies(line)), "")
        return self.sentence.format(p=p, value=value, limit=limit, line=line, why=why)


class Watch:
    """Reads a run's lines of metrics in order; reports each condition when it begins."""

    def __init__(self, alarms: Sequence[Alarm]) -> None:
        self._alarms = alarms
        self._first: list[Line] = []
        self._last: deque[Line] = deque(maxlen=TREND)
        self._num = 0
        self._active: set[str] = set()
        """Metrics whose condition holds, and those of alarms that were logged once and for all."""

    def sentences(self, line: Line) -> list[str]:
        """A sentence for each condition that begins with this line. Lines that were measured before
        training raise no alarm."""
        if "optimizer/steps" not in line:
            return []
        line = {name: value for name, value in line.items() if value is not None}
        self._num += 1
        if self._num <= FIRST:
            self._first.append(line)
        self._last.append(line)
        found: dict[str, str] = {}
        ended: set[str] = set()
        for alarm in self._alarms:
            for metric in fnmatch.filter(line, alarm.metric):
                lines, first = (
                    [line for line in part if metric in line] for part in (self._last, self._first)
                )
                name = metric.removeprefix(alarm.metric.rstrip("*"))
                text = alarm.text(Past(metric, alarm.window, lines, first, self._num, name))
                if text:
                    found.setdefault(metric, text)
                elif not alarm.once:
                    ended.add(metric)
        new = [text for metric, text in found.items() if metric not in self._active]
        self._active = (self._active - ended) | found.keys()
        return new

    def replay(self, lines: Iterable[Line]) -> None:
        """Read the lines of a run that resumes. What still holds then is logged again, because the
        log is a new one, but for what is logged once in a run."""
        for line in lines:
            self.sentences(line)
        once = {alarm.metric for alarm in self._alarms if alarm.once}
        self._active = {m for m in self._active if any(fnmatch.fnmatch(m, each) for each in once)}


# ---- table ---------------------------------------------------------------------------------------
# All alarms of a run's metrics.

SEVERAL = 3
"""Iterations after which a condition that holds in each of them is no chance."""
RECENT = FIRST
"""The last `RECENT` iterations are compared with the first ones: few, because small runs have
learnt an exploit after 7. No alarm for growth is logged before iteration 10."""
MISMATCH_LIMITS = {
    "float32": (1e-6, 1e-5, 0.999), "float16": (1e-5, 2e-3, 0.99), "bfloat16": (1e-4, 8e-3, 0.95)
}  # fmt: skip
"""Engine dtype -> (smallest and largest limit of `mismatch/k3`, nats; smallest `mismatch/ess`).

Tiny correct runs reach a k3 of 1e-10 in float32 and 6e-5 in bfloat16; SmolLM2-135M in bfloat16 on a
CPU 0.0024 on average of 60 prompts and 0.0041 at most. TF32 in a GPU's attention stays below 1e-5.
Log-probs that differ by as much as a sync allows (0.1 nats in bfloat16, 0.05 in float16) have a k3
of 0.008 and 0.002."""
MISMATCH_GROWTH = 10
"""The limit of k3 is this many times the k3 of the run's first iteration, whose completions were
sampled before the first update, within the range above."""
MISMATCHED = 2
"""Iterations beyond the limit that are no transient: a fault that begins with the first update is
named in the third."""
PAY_ERRORS = 2.0
"""The reward pays for a signal if their average is above 0 by this many standard errors."""


def _least(p: Past) -> float:
    return min(p.values)


def _moved(line: Line) -> bool:
    """Whether the weights changed: a step whose gradient is exactly 0 changes nothing."""
    return line["optimizer/steps"] > 0 and line.get("optimizer/grad_norm") != 0


def _is_constant(p: Past) -> bool:
    """Whether a reward that counts has the same value for all completions."""
    ranges = [line.get(f"reward/range/{p.name}", 1.0) for line in p.recent]
    return max(*ranges, max(p.values) - min(p.values)) <= SPREAD_TOLERANCE


def _correlation(p: Past, signal: str) -> tuple[float, float]:
    """(mean correlation of the reward with the signal, its standard error); zeros without any."""
    name = f"reward/correlation/{signal}"
    pairs = [(line[name], line[f"{name}_error"]) for line in p.lines if name in line]
    if not pairs:
        return 0.0, 0.0
    return fmean(mean for mean, _ in pairs), sum(e**2 for _, e in pairs) ** 0.5 / len(pairs)


def _growth(metric: str, least: float, share: float, what: str, signal: str = "") -> Alarm:
    """An alarm for a metric that grows beyond noise, by at least `least` and by at least `share` of
    its start. If a signal is named, the reward must pay for it."""

    def growth(p: Past) -> float:
        mean, error = _correlation(p, signal)
        is_paid = not signal or mean > PAY_ERRORS * error
        return p.mean - p.start if is_paid else 0.0

    def limit(p: Past) -> float:
        if len(p.before) < p.window:
            return 0.0
        error = ((variance(p.before) + variance(p.values)) / p.window) ** 0.5
        return max(student(NUM_ERRORS, 2 * p.window - 2) * error, least, share * p.start)

    paid = f"the reward pays for it within groups (reward/correlation/{signal}): " if signal else ""
    return Alarm(
        metric,
        RECENT,
        limit,
        f"{what} ({metric} {{p.start:.3g}} in the first {FIRST} iterations, {{p.mean:.3g}} in the "
        f"last {RECENT}); {paid}look at them on the page; do they follow the instruction?",
        growth,
        once=True,
    )


EXPLOITS = (
    Alarm(
        "pictures/rewarded_copies",
        RECENT,
        0.1,
        "{value:.0%} of the graded pictures of the last {p.window} iterations equal their source "
        "and have a reward of at least 0.5 ({p.metric}): the judge pays for doing nothing",
        once=True,
    ),
    Alarm(
        "groups/unreadable",
        RECENT,
        0.1,
        "{value:.0%} of the groups of the last {p.window} iterations got mostly unreadable replies "
        "from the judge ({p.metric}): they teach nothing, or the wrong thing; read the replies on "
        "the page",
        once=True,
    ),
    Alarm(
        "status/unreadable/*",
        RECENT,
        lambda p: fmean(line["status/unreadable"] for line in p.lines) + 0.2,
        "{value:.0%} of the judge's replies about {p.name!r} are unreadable, more than {limit:.0%} "
        "({p.metric}; 20 points above all): read them on the page, and audit the judge on such "
        "instructions",
        lambda p: fmean(line[p.metric] for line in p.lines),
        once=True,
    ),
    # In sound small runs these correlations were at most 0.41. Length is not among them: a sound
    # reward may demand a long form.
    *(
        Alarm(
            f"reward/correlation/{signal}",
            TREND,
            lambda p: 0.5 + PAY_ERRORS * _correlation(p, p.metric.rpartition("/")[2])[1],
            f"within groups the reward follows the pictures' {signal} ({{p.metric}} {{value:.2f}} "
            "on average of {p.window} iterations): the judge pays for it, whatever the instruction "
            "says",
            once=True,
        )
        for signal in ("similarity", "sharpness", "saturation")
    ),
    _growth(
        "status/unreadable",
        0.05,
        1.0,
        "ever more of the judge's replies are unreadable; a policy that makes such pictures loses "
        "nothing unless judge.unreadable is 'lowest'",
    ),
    _growth("pictures/copies", 0.1, 1.0, "ever more pictures equal their sources"),
    _growth("pictures/sharpness", 0.5, 0.0, "pictures become sharper", "sharpness"),
    _growth("pictures/saturation", 0.03, 0.0, "colours become stronger", "saturation"),
    _growth("tokens/completion_mean", 1.0, 0.5, "completions become longer", "length"),
)
"""What a policy exploits in its judge."""
HELD_OUT = (
    Alarm(
        "drift/alarm",
        1,
        0,
        "the held-out rewards of words that training does not change fell beyond noise "
        "(drift/bare_fall, drift/reference_fall): the hidden states that the renderer reads have "
        "drifted. Start again with a lower optimizer.learning_rate or a higher algorithm.kl_coeff, "
        "or continue from this adapter (policy.adapter_path) with policy.conditioning 'base'",
    ),
    Alarm(
        "eval/gap_alarm/*",
        1,
        0,
        "{p.name}, which trains nothing, stays behind what the gain in the held-out reward "
        "predicts (eval/gap/{p.name}): the policy may exploit its judge. Compare both rewards on "
        "the page's held-out samples",
    ),
)
"""What held-out evaluations measure."""
_NO_SPREAD = Alarm(
    "groups/zero_spread",
    SEVERAL,
    0.999,
    "{value:.0%} of the groups of the last {p.window} iterations have no spread: all rewards of a "
    "group are equal and teach nothing: {why} ({p.metric})",
    _least,
    (
        (
            lambda line: line.get("status/policy_failed") == 1,
            "no completion could be used; the causes are in episodes/",
        ),
        (
            lambda line: line.get("status/ungraded") == 1,
            "no picture was graded; the causes are in episodes/",
        ),
        (
            lambda line: line.get("groups/distinct_completions", 1) < 0.5,
            "most completions are copies; raise sampling.temperature, or go back to a checkpoint",
        ),
        (
            lambda line: line.get("reward/mean", 0) >= 0.99,
            "all have the full reward; take harder data, or stop here",
        ),
        (
            bool,
            "the rewards do not distinguish completions of one prompt; look at them in episodes/, "
            "take a finer or another reward, or easier data if all fail",
        ),
    ),
)
LEARNING = (
    Alarm(
        "reward/part/*",
        SEVERAL,
        0,
        "rewards.{p.name}: {p.mean:.4g} for every completion of the last {p.window} iterations, so "
        "it teaches nothing. Possible causes: the judge ignores the pictures (read its replies in "
        "episodes/; is judge.model right, does a cache reply?), a wrong reward, or the task is "
        "solved or far too hard (reward/range/{p.name})",
        _is_constant,
    ),
    Alarm(
        "groups/dead",
        TREND,
        0.25,
        "{value:.0%} of the groups of the last {p.window} iterations failed completely: all "
        "completions of a group have the same reward, below 0.5, and teach nothing ({p.metric})",
    ),
    _NO_SPREAD,
    replace(_NO_SPREAD, window=TREND, limit=0.9, measure=lambda p: p.mean),
    Alarm(
        "optimizer/steps",
        SEVERAL,
        0,
        "no optimizer step in the last {p.window} iterations ({p.metric}): the weights do not "
        "change; {why}",
        lambda p: not any(map(_moved, p.recent)),
        (
            (
                lambda line: line.get("optimizer/skipped_steps"),
                "the gradient was not finite and was left out (optimizer/skipped_steps); look for "
                "a NaN in the losses, lower optimizer.learning_rate, or load other weights",
            ),
            (
                lambda line: line.get("status/ungraded") == 1,
                "nothing was graded; the causes are in episodes/",
            ),
            (
                lambda line: line.get("groups/zero_spread") == 1,
                "all rewards of each group were equal, and nothing else is minimised",
            ),
            (
                lambda line: line["optimizer/steps"] > 0,
                "the gradient was exactly 0; are the parameters in the loss trainable?",
            ),
            (
                bool,
                "no token was in the loss; look at tokens/trained and at the policy's loss mask",
            ),
        ),
    ),
    # In the first iteration the KL is 0 in any run; sound ones are at 2e-5 nats a token after it.
    Alarm(
        "kl/reference_k3",
        SEVERAL,
        0,
        "the KL to the reference was 0 in each of the last {p.window} iterations, though the "
        "weights move: the reference is the policy that is trained (Policy.reference must give the "
        "weights before training), or the steps are too small to change a log-prob "
        "({p.metric}, optimizer/learning_rate)",
        lambda p: max(p.values) <= 1e-9 and all(map(_moved, p.recent)),
    ),
    Alarm(
        "policy/rise",
        1,
        lambda p: NUM_ERRORS * p.lines[-1].get("policy/rise_error", 0.0),
        "learning points downwards: the optimizer step made completions with a reward above their "
        "group's mean less likely, or those below it more likely (excess of reward x change of the "
        "log-prob: {line[policy/rise]:.2g} +- {line[policy/rise_error]:.1g} nats, {p.metric}). The "
        "sign of the advantages or of the loss is wrong, or the trained rows are not those that "
        "were graded",
        lambda p: -p.mean,
    ),
    Alarm(
        "data/repeated_prompts",
        SEVERAL,
        0,
        "{line[data/repeated_prompts]:.0f} prompts of an iteration repeat others of it, in each of "
        "the last {p.window} iterations, more than the size of the data explains: a rank trains on "
        "another one's prompts or on its own twice, or different rows have one id ({p.metric})",
        _least,
    ),
)
"""Training that does not learn."""


def _fall_error(p: Past, num_groups: int) -> float:
    """`NUM_ERRORS` standard errors of the difference between the first and the last rewards. The
    error takes a group as one value, so it is too large rather than too small."""
    lines = (*p.first[: p.window], *p.recent)
    error = (sum(line.get("reward/std", inf) ** 2 for line in lines) / num_groups) ** 0.5 / p.window
    return NUM_ERRORS * error


def alarms_of(config: RunConfig, engine_dtype: str, lora_dropout: float) -> list[Alarm]:
    """All alarms of a run. The engine should sample from the distribution that the trainer computes
    on-policy, without truncated sampling and without dropout; else that is no alarm."""
    alarms = [
        *LEARNING,
        *EXPLOITS,
        *HELD_OUT,
        Alarm(
            "reward/mean",
            SEVERAL,
            partial(_fall_error, num_groups=config.prompts_per_iteration),
            "the training reward fell from {p.start:.3f} (the run's first {p.window} iterations) "
            "to {p.mean:.3f} (the last {p.window}), by more than {limit:.3f}, "
            f"{NUM_ERRORS:g} standard errors: the policy gets worse at what it is trained for. "
            "Lower optimizer.learning_rate or raise algorithm.kl_coeff, and start from an older "
            "checkpoint; if it falls from the first iterations on, look for scores of other "
            "completions in episodes/ ({p.metric})",
            lambda p: p.start - p.mean,
        ),
    ]
    truncates_sampling = config.sampling.top_p < 1 or config.sampling.top_k > 0
    if config.max_staleness or truncates_sampling or lora_dropout:
        return alarms
    least, most, min_ess = MISMATCH_LIMITS[engine_dtype]

    def max_k3(p: Past) -> float:
        return min(most, max(least, MISMATCH_GROWTH * p.first[0][p.metric] if p.first else 0.0))

    def differs(what: str, limit: float | Callable[[Past], float], measure: Measure) -> Alarm:
        sentence = (
            "the inference engine does not sample from the trained policy: in each of the last "
            "{p.window} iterations their log-probs differ by more than rounding in "
            f"{engine_dtype} explains ({what}). Adapter weights may arrive scaled, late or in "
            "part, or the engine samples at another temperature or sees other pictures: compare "
            "with engine.type 'transformers'"
        )
        return Alarm("mismatch/k3", MISMATCHED, limit, sentence, measure)

    k3 = "{p.metric} {line[mismatch/k3]:.2g} nats, limit {limit:.2g}"
    ess = f"mismatch/ess {{line[mismatch/ess]:.3f}}, limit {min_ess:g}"
    return [
        *alarms,
        differs(k3, max_k3, _least),
        differs(ess, -min_ess, lambda p: -max(line.get("mismatch/ess", 1.0) for line in p.recent)),
    ]


# ---- reward gap ----------------------------------------------------------------------------------
# Compares the gain in the final reward with that in rewards which train nothing (`held_out_only`):
# where the policy exploits its judge, such a reward stays behind.

Rewards = tuple[float, float]
"""One sample's final reward, and its reward by the plugin that trains nothing; 0..1 each."""
LEAST_GAP = 0.05
"""Smallest gap (0..1) worth an alarm. If the second reward reaches its highest marks before the
final reward does, even a sound policy makes a small gap."""
FEWEST = 8
"""Fewer samples cannot relate one reward to the other."""
MAX_CAUSE_CHARS = 300


def slope_of(pairs_S: Sequence[Rewards]) -> tuple[float, float, float | None]:
    """(least-squares slope of the second reward on the final one, its standard error, their
    correlation). A negative slope counts as 0; (0, 0, None) for fewer than `FEWEST` samples, or if
    either reward is the same for all."""
    if len(pairs_S) < FEWEST or np.std(pairs_S, axis=0).min() < 1e-7:
        return 0.0, 0.0, None
    x, y = np.array(pairs_S).T
    (slope, _), covariance = np.polyfit(x, y, 1, cov=True)
    correlation = float(np.corrcoef(x, y)[0, 1])
    error = float(covariance[0, 0] ** 0.5)
    return (float(slope), error, correlation) if slope > 0 else (0.0, 0.0, correlation)


def gap_of(
    first: Mapping[str, Rewards], now: Mapping[str, Rewards], hashes: Mapping[str, Sequence[str]]
) -> tuple[Paired, float] | None:
    """(mean over samples of slope x (gain in the final reward) - (gain in the second one), mean
    gain in the final reward), over the samples that both evaluations have; None without any.

    `slope_of` the first evaluation translates between the scales, and its error is added. A slope
    is too small by the final reward's unreliability, so noise of either reward makes no gap.
    """
    slope, slope_error, _ = slope_of(list(first.values()))
    ids = [key for key in now if key in first]
    gains = [(now[key][0] - first[key][0], now[key][1] - first[key][1]) for key in ids]
    behind = paired([slope * one - two for one, two in gains], [hashes[key] for key in ids])
    if behind is None:
        return None
    gain = float(np.mean([one for one, _ in gains]))
    if behind.error is not None:
        error = (behind.error**2 + (slope_error * gain) ** 2) ** 0.5
        behind = replace(behind, error=error)
    return behind, gain


def add_gaps(
    metrics: Metrics, names: Iterable[str], folder: Path, records_S: Sequence[Mapping[str, Any]]
) -> None:
    """Add `eval/gap/<name>` and its companions for each reward in `names`; warn of
    pictures that the reward did not grade. `records_S`: the records of the evaluation in `folder`
    (`<run>/evaluation/it_000010`); the first ones are read from beside it."""
    for name in names:
        drawn = [record for record in records_S if record["status"] == Status.SCORED.value]
        now = _pairs(drawn, name)
        failures = [record["failure"] for record in drawn if record["id"] not in now]
        metrics.add(f"eval/ungraded/{name}", 1.0, weight=len(failures))
        metrics.add(f"eval/ungraded/{name}", 0.0, weight=len(now))
        if failures:
            warn(
                f"{name} did not grade {len(failures)} of {len(drawn)} held-out pictures; training "
                f"goes on. First cause: {excerpt(str(failures[0]), MAX_CAUSE_CHARS)}"
            )
        metrics.maximum(f"eval/correlation/{name}", slope_of(list(now.values()))[2])
        hashes = {record["id"]: record["shown"] for record in drawn}
        result = gap_of(_first_pairs(folder, name) or now, now, hashes)
        if result is not None:
            gap, gain = result
            is_alarming = gap.is_alarming and gap.mean > LEAST_GAP and gain >= 0
            metrics.maximum(f"eval/gap/{name}", gap.mean)
            metrics.maximum(f"eval/gap_error/{name}", gap.error)
            metrics.maximum(f"eval/gap_alarm/{name}", is_alarming)


def _pairs(records: Iterable[Mapping[str, Any]], name: str) -> dict[str, Rewards]:
    """Sample id -> its rewards, where both are known."""
    return {
        record["id"]: (record["reward"], record["parts"][name])
        for record in records
        if record["status"] == Status.SCORED.value and name in record["parts"]
    }


def _first_pairs(folder: Path, name: str) -> dict[str, Rewards]:
    """The rewards of the first evaluation before that in `folder` which `name` graded."""
    for path in sorted(folder.parent.glob("it_*/records.jsonl")):
        if path.parent.name < folder.name and (pairs := _pairs(read_rows(path)[0], name)):
            return pairs
    return {}
