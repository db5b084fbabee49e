"""Compares held-out rewards before and after training, with intervals; lists a run's alarms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from rl.config.loading import printable
from rl.run.paired import NUM_RESAMPLES, ExploitWatch, are_alike, interval
from rl.tools.report.reading import Evaluation, Record, is_control, number, points, shown_of

INTERVAL = (
    "95 % interval of the mean paired difference over the held-out samples: percentile bootstrap "
    f"({NUM_RESAMPLES:,} draws) over source pictures; samples that share one are drawn together. "
    "It says nothing about other training seeds."
)
"""Explains the intervals."""
CONTROL = (
    "Control run (algorithm.shuffle_rewards): each completion was trained on another's reward, so "
    "no change here was learnt from rewards. An interval over held-out samples that excludes 0 "
    "says nothing about other training seeds."
)
_NOT_GRADED = 0.01
_TAUGHT_NOTHING = 0.5
"""`alarms` reports shares above these."""
_MAX_NAMED = 8


@dataclass(frozen=True)
class Change:
    """Rewards of the samples that were graded both times, before and after training."""

    name: str
    rewards: list[tuple[float, float]]
    shown: list[list[str]]
    """Hashes of each sample's pictures."""

    @property
    def before(self) -> float:
        return fmean(old for old, _ in self.rewards)

    @property
    def after(self) -> float:
        return fmean(new for _, new in self.rewards)

    @property
    def gain(self) -> float:
        return self.after - self.before

    @cached_property
    def gains(self) -> list[float]:
        return [new - old for old, new in self.rewards]

    @cached_property
    def interval(self) -> tuple[float, float] | None:
        """Described in `INTERVAL`; None if the samples determine no interval."""
        return interval(self.gains, self.shown)

    @property
    def interval_text(self) -> str:
        """The interval as text, or why there is none."""
        if self.interval is not None:
            return f"{self.interval[0]:+.3f} to {self.interval[1]:+.3f}"
        if len(self.gains) < 2:
            return "one sample"
        if are_alike(self.gains):
            return f"all {len(self.gains)} gains equal"
        return f"no interval: the {len(self.gains)} samples share their source pictures"

    def sentence(self, width: int) -> str:
        """One line: means, their difference with its interval, number of samples."""
        samples, text = f", {len(self.gains)} samples", self.interval_text
        text = f"95 % {text}{samples}" if self.interval else text
        return (
            f"  {self.name:{width}}  {self.before:.3f} -> {self.after:.3f}   "
            f"({self.gain:+.3f}, {text})"
        )


@dataclass(frozen=True)
class Learnt:
    """The first held-out evaluation compared with the last."""

    before: int
    """Iterations done at the first."""
    after: int
    changes: Sequence[Change]
    """All samples first, then each category; [] if no sample was graded both times."""
    num_left_out: int
    """Samples that were not graded both times."""


def learnt(evaluations: Sequence[Evaluation]) -> Learnt | None:
    """Compares the first evaluation with the last; None with fewer than two."""
    if len(evaluations) < 2:
        return None
    before, after = evaluations[0], evaluations[-1]
    changes = changes_of(before.records, after.records)
    num_graded = len(changes[0].rewards) if changes else 0
    return Learnt(before.iteration, after.iteration, changes, len(before.records) - num_graded)


def changes_of(
    before: Mapping[str, Record],
    after: Mapping[str, Record],
    names_of: Callable[[Record], Iterable[str]] = lambda row: {"", str(row.get("category") or "")},
    value_of: Callable[[Record, str], object] = lambda record, _: record.get("reward"),
) -> list[Change]:
    """The paired values of the samples in both evaluations (sample id -> record), by name.
    `names_of`: the names that a record has values under; `value_of`: its value under one. Default:
    the reward, of all samples ('') and by category."""
    change_of: dict[str, Change] = {}
    for sample_id, old in before.items():
        new = after.get(sample_id, {})
        for name in names_of(old):
            first, last = number(value_of(old, name)), number(value_of(new, name))
            if first is None or last is None:
                continue
            title = printable(name) or "held-out reward"
            change = change_of.setdefault(name, Change(title, [], []))
            change.rewards.append((first, last))
            change.shown.append(shown_of(old) or [sample_id])
    return [change_of[name] for name in sorted(change_of)]


def summary(
    metrics: Sequence[Record], evaluations: Sequence[Evaluation], control: bool = False
) -> list[str]:
    """The lines of the report. `control`: the run's rewards are shuffled."""
    result = learnt(evaluations)
    if result is None:
        lines = ["Fewer than two held-out evaluations: nothing to compare."]
    else:
        width = max((len(change.name) for change in result.changes), default=0)
        since = f"after {result.before}" if result.before else "before training"
        span = f"(0 to 1; {since} -> after {result.after} iterations)"
        title = "What changed in a control run" if control else "What was learnt"
        lines = [f"{title} {span}", *(change.sentence(width) for change in result.changes)]
        if result.num_left_out:
            lines.append(f"  left out: {result.num_left_out} not graded both times")
        lines.append(f"  {CONTROL if control else INTERVAL}")
    return [*lines, *(f"  {line}" for line in context(metrics))]


def context(metrics: Sequence[Record]) -> list[str]:
    """Lines that put the gain in context: rewards of the reference description, of the user's own
    words and of the untrained system; the gain of thinking; drift of the conditioning."""
    lines = []
    rows = _rows_with(metrics, "eval/reward_low")
    for row in rows[:1] + rows[1:][-1:]:
        low, high = (_formatted(row, f"eval/reward_{end}") for end in ("low", "high"))
        share = _formatted(row, "eval/unreadable", ".1%")
        lines.append(
            f"after {row['iteration']} iterations the replies about {share} of the held-out "
            f"pictures were unreadable: counted as 0 or as 1 the reward is {low} or {high}"
        )
    rows = _rows_with(metrics, "eval_reference/reward")
    if len(rows) > 1:
        first, last = (_formatted(row, "eval_reference/reward") for row in (rows[0], rows[-1]))
        lines.append(f"the renderer, given reference descriptions: {first} -> {last}")
    rows = _rows_with(metrics, "eval/reward_gain")
    if len(rows) > 1:
        first, last = (_formatted(row, "eval/reward_gain", "+.3f") for row in (rows[0], rows[-1]))
        bare = _formatted(rows[0], "eval/bare_reward")
        lines.append(f"the user's own words, as they are: {bare}; gain over them {first} -> {last}")
    if rows := _rows_with(metrics, "eval/gain_over_stock"):
        upstream = number(rows[-1].get("eval/stock_upstream_reward"))
        of_upstream = f" ({upstream or 0:.3f} as upstream calls its text encoder)"
        lines.append(
            f"the untrained system on the user's words: {_formatted(rows[-1], 'eval/stock_reward')}"
            f"{'' if upstream is None else of_upstream}; gain over it "
            f"{_gains(rows, 'eval/gain_over_stock')}"
        )
    if rows := _rows_with(metrics, "eval/gain_of_thought"):
        cut = _formatted(rows[-1], "eval/cut_thought_reward")
        gains = _gains(rows, "eval/gain_of_thought")
        lines.append(f"with the thought cut before it begins: {cut}; gain of thinking {gains}")
    # Drift is measured only if the trained weights compute the conditioning.
    rows = [row for row in metrics if row.get("drift/alarm") is not None]
    if alarmed := [str(row["iteration"]) for row in rows if row["drift/alarm"]]:
        lines.append(
            f"DRIFT: after {', '.join(alarmed)} iterations, fixed prompts had lost more reward "
            "than chance explains"
        )
    for arm, label in (("bare", "the user's own words"), ("reference", "reference descriptions")):
        name = f"drift/{arm}_fall"
        if _rows_with(rows[-1:], name):
            lines.append(f"reward lost with {label} since the start: {_gains(rows[-1:], name)}")
    if moved := _rows_with(metrics, "drift/state_l2"):
        lines.append(
            "the states of the user's own words moved by "
            f"{_formatted(moved[-1], 'drift/state_l2', '.1%')} of their norm "
            f"(cosine {_formatted(moved[-1], 'drift/state_cosine')})"
        )
    return lines


def _gains(rows: Sequence[Record], name: str) -> str:
    """The first and the last value with their standard errors; one value if there is only one."""
    values = []
    for row in rows[:1] if len(rows) == 1 else (rows[0], rows[-1]):
        error = number(row.get(f"{name}_error"))
        values.append(_formatted(row, name, "+.3f") + ("" if error is None else f" +- {error:.3f}"))
    return " -> ".join(values)


def _rows_with(metrics: Sequence[Record], name: str) -> list[Record]:
    return [row for row in metrics if number(row.get(name)) is not None]


def _formatted(row: Record, name: str, spec: str = ".3f") -> str:
    value = number(row.get(name))
    return "?" if value is None else format(value, spec)


def alarms(
    metrics: Sequence[Record], config: Mapping[str, Any], damaged: Mapping[str, int]
) -> list[str]:
    """One sentence per alarm. `damaged`: file -> number of its unreadable lines."""
    sentences = [CONTROL] if is_control(config) else []
    if alarmed := [str(row["iteration"]) for row in metrics if row.get("drift/alarm")]:
        sentences.append(
            f"Drift: after {_listed(alarmed)} iterations, fixed prompts had lost more reward than "
            "chance explains."
        )
    gap = "eval/gap_alarm/"
    for name in sorted({key.removeprefix(gap) for row in metrics for key in row if gap in key}):
        if alarmed := [str(row["iteration"]) for row in metrics if row.get(gap + name)]:
            sentences.append(
                f"{name}, which trains nothing: after {_listed(alarmed)} iterations it had stayed "
                "behind what the gain in the final reward predicts by more than noise; the policy "
                "may exploit its judge."
            )
    watch = ExploitWatch()
    for row in metrics:
        line = {key: value for key in row if (value := number(row[key])) is not None}
        sentences += [f"Iteration {row['iteration']}: {text}." for text in watch.sentences(line)]
    for name, clause in (
        ("status/ungraded", "of the episodes were not graded (the renderer or the judge failed)"),
        ("eval/ungraded", "of the held-out episodes were not graded"),
        ("status/policy_failed", "of the completions could not be used"),
    ):
        shares = [value for _, value in points(metrics, name)]
        recent = fmean(shares[-10:]) if shares else 0.0
        if shares and max(fmean(shares), recent) > _NOT_GRADED:
            recently = f", {recent:.1%} in the last 10" if len(shares) > 10 else ""
            sentences.append(f"{fmean(shares):.1%} {clause}{recently}; {max(shares):.1%} at worst.")
    for name, clause in (
        ("groups/dead", "are dead: all rewards equal and below 0.5"),
        ("groups/zero_spread", "have no spread of rewards: all advantages are 0"),
    ):
        shares = [value for _, value in points(metrics, name)]
        if shares and (recent := fmean(shares[-10:])) > _TAUGHT_NOTHING:
            last = "last 10 iterations" if len(shares) > 10 else "run"
            sentences.append(f"{recent:.0%} of the groups of the {last} {clause}.")
    skipped = sum(value for _, value in points(metrics, "optimizer/skipped_steps"))
    if skipped:
        sentences.append(f"{skipped:g} optimizer steps were skipped for a non-finite gradient.")
    if any(row.get("judge/audit_passed") == 0 for row in metrics[-1:]):
        sentences.append("The judge has not passed an audit (`rl judge audit`).")
    if damaged:
        files = [f"{file} ({count})" for file, count in damaged.items()]
        sentences.append(f"Damaged lines are left out: {_listed(files)}.")
    return sentences


def _listed(names: Sequence[str]) -> str:
    num_more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {num_more} more" if num_more > 0 else "")
