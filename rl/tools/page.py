"""What a run learnt, in lines, and its page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Template
from markupsafe import Markup

from rl.check.compatibility import leaves
from rl.config.loading import printable
from rl.files import read_rows, write_atomically
from rl.printing import load_template, without_lone_surrogates
from rl.record.checkpoint import iteration_of, steps_of
from rl.record.publish import at
from rl.run.alarms import EXPLOITS, HELD_OUT, Watch
from rl.run.paired import NUM_RESAMPLES, interval
from rl.tools.reading import (
    CURVES,
    Evaluation,
    Pieces,
    Record,
    curve_data,
    episode_files,
    evaluation_folders,
    finding_row,
    group_row,
    groups_of,
    histogram,
    is_control,
    locked,
    named_rows,
    number,
    own_folder,
    part_names,
    parts_of,
    picture,
    read_config,
    read_evaluations,
    record_row,
    rounded,
    shown_of,
    values_of,
)

# ---- summary -------------------------------------------------------------------------------------
# Compares held-out rewards before and after training, with intervals; lists a run's alarms.

INTERVAL = (
    "95 % interval of the mean paired difference over the held-out samples:\n"
    f"  percentile bootstrap ({NUM_RESAMPLES:,} draws) over source pictures; samples that share\n"
    "  one are drawn together. There is none for fewer than two pictures or equal\n"
    "  gains. It says nothing about other training seeds."
)
"""Explains the intervals."""
CONTROL = (
    "Control run (algorithm.shuffle_rewards): each completion was trained on another's reward, so "
    "no change here was learnt from rewards. An interval over held-out samples that excludes 0 "
    "says nothing about other training seeds."
)
_MAX_NAMED = 8


@dataclass(frozen=True)
class Change:
    """Rewards of the samples that were graded both times, before and after training."""

    name: str
    rewards: list[tuple[float, float]]
    records: list[tuple[Record, Record]]
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

    @property
    def ranked(self) -> list[tuple[float, tuple[Record, Record]]]:
        """The gain and the records of each sample, the largest gain first."""
        samples = zip(self.gains, self.records, strict=True)
        return sorted(samples, key=lambda sample: sample[0], reverse=True)

    @cached_property
    def interval(self) -> tuple[float, float] | None:
        """Described in `INTERVAL`; None if the samples determine no interval."""
        return interval(self.gains, self.shown)

    @property
    def interval_text(self) -> str:
        if self.interval is None:
            return "no interval"
        return f"{self.interval[0]:+.3f} to {self.interval[1]:+.3f}"

    @cached_property
    def interval_after(self) -> str:
        """95 % interval of the mean afterwards, as that of the gain."""
        bounds = interval([new for _, new in self.rewards], self.shown)
        return f"{bounds[0]:.3f} to {bounds[1]:.3f}" if bounds else "no interval"

    def score(self) -> str:
        """The mean afterwards with its interval."""
        return f"{self.after:.3f}   (95 %: {self.interval_after})"

    def difference(self) -> str:
        """Means, their difference with its interval, number of samples."""
        interval = f"95 % {self.interval_text}" if self.interval else self.interval_text
        return (
            f"{self.before:.3f} -> {self.after:.3f}   "
            f"({self.gain:+.3f}, {interval}, {len(self.gains)} samples)"
        )


def table(changes: Sequence[Change], text_of: Callable[[Change], str]) -> list[str]:
    """A line for each, with its name."""
    width = max((len(change.name) for change in changes), default=0)
    return [f"  {change.name:{width}}  {text_of(change)}" for change in changes]


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
    before: Mapping[str, Record], after: Mapping[str, Record], of_parts: bool = False
) -> list[Change]:
    """The paired values of the samples in both evaluations (sample id -> record): the reward, of
    all samples and by category, or each part of it."""
    change_of: dict[str, Change] = {}
    for sample_id, old in before.items():
        new = after.get(sample_id, {})
        for name in parts_of(old) if of_parts else {"", str(old.get("category") or "")}:
            first, last = (
                number(parts_of(row).get(name) if of_parts else row.get("reward"))
                for row in (old, new)
            )
            if first is None or last is None:
                continue
            title = printable(name) or "held-out reward"
            change = change_of.setdefault(name, Change(title, [], [], []))
            change.rewards.append((first, last))
            change.records.append((old, new))
            change.shown.append(shown_of(old) or [sample_id])
    return [change_of[name] for name in sorted(change_of)]


def scores(evaluation: Evaluation) -> list[Change]:
    """The values of an evaluation, of all samples, by category and by part of the reward: each
    sample is paired with itself."""
    records = evaluation.records
    return [*changes_of(records, records), *changes_of(records, records, of_parts=True)]


def summary(
    metrics: Sequence[Record], evaluations: Sequence[Evaluation], control: bool = False
) -> list[str]:
    """The lines of the report. `control`: the run's rewards are shuffled."""
    result = learnt(evaluations)
    if result is None:  # there is nothing that it could have drifted from
        metrics = [{n: row[n] for n in row if not n.startswith("drift/")} for row in metrics]
    if not evaluations:
        lines = ["Fewer than two held-out evaluations: nothing to compare."]
    elif result is None:
        [evaluation] = evaluations
        changes = scores(evaluation)
        num_graded = len(changes[0].rewards) if changes else 0
        counts = f"{len(evaluation.records)} samples, {num_graded} graded"
        lines = [f"Held-out scores ({counts})", *table(changes, Change.score)]
    else:
        since = f"after {result.before}" if result.before else "before training"
        span = f"(0 to 1; {since} -> after {result.after} iterations)"
        title = "What changed in a control run" if control else "What was learnt"
        lines = [f"{title} {span}", *table(result.changes, Change.difference)]
        if result.num_left_out:
            lines.append(f"  left out: {result.num_left_out} not graded both times")
        lines.append(f"  {CONTROL if control else INTERVAL}")
    return [*lines, *(f"  {line}" for line in context(metrics))]


_CONTEXT = {
    "eval/unreadable": "share of held-out pictures with unreadable replies of the judge",
    "eval/reward_low": "held-out reward, if unreadable replies count as 0",
    "eval/reward_high": "held-out reward, if unreadable replies count as 1",
    "eval_reference/reward": "reward of the reference descriptions",
    "eval/bare_reward": "reward of the user's own words",
    "eval/reward_gain": "gain over the user's own words",
    "eval/stock_reward": "reward of the untrained system on the user's words",
    "eval/stock_upstream_reward": "reward of diffusers' own pipeline on the user's words",
    "eval/gain_over_stock": "gain over the untrained system",
    "eval/cut_thought_reward": "reward with the thought cut before it begins",
    "eval/gain_of_thought": "gain of thinking",
    "drift/bare_fall": "drift: reward lost by the user's own words",
    "drift/reference_fall": "drift: reward lost by reference descriptions",
    "drift/state_l2": "drift: movement of the hidden states, as a share of their norm",
}
"""Metrics that put the gain in context."""


def context(metrics: Sequence[Record]) -> list[str]:
    """A line for each measured metric of `_CONTEXT`: its first and last value, with their standard
    errors where there are any; first, the evaluations that found drift."""
    drifted = [str(row["iteration"]) for row in metrics if number(row.get("drift/alarm"))]
    lines = []
    if drifted:
        lines.append(
            f"DRIFT: after {', '.join(drifted)} iterations, fixed prompts had lost more reward "
            "than chance explains"
        )
    for name, label in _CONTEXT.items():
        rows = [row for row in metrics if number(row.get(name)) is not None]
        values = []
        for row in (*rows[:1], *rows[1:][-1:]):
            error = number(row.get(f"{name}_error"))
            values.append(f"{row[name]:.3f}" + ("" if error is None else f" +- {error:.3f}"))
        if values:
            lines.append(f"{label}: {' -> '.join(values)}")
    return lines


_SHARES = {
    "status/ungraded": (0.01, "of the episodes were not graded (the renderer or the judge failed)"),
    "eval/ungraded": (0.01, "of the held-out episodes were not graded"),
    "status/policy_failed": (0.01, "of the completions could not be used"),
    "groups/dead": (0.5, "of the groups are dead: all rewards equal and below 0.5"),
    "groups/zero_spread": (0.5, "of the groups have no spread of rewards: all advantages are 0"),
}
"""Metric -> (limit of its mean over the run and over its last 10 values, what it is a share of)."""


def alarms(
    metrics: Sequence[Record], config: Mapping[str, Any], damaged: Mapping[str, int]
) -> list[str]:
    """One sentence per alarm. `damaged`: file -> number of its unreadable lines."""
    sentences = [CONTROL] if is_control(config) else []
    watch = Watch([*EXPLOITS, *HELD_OUT])
    for row in metrics:
        line = {key: value for key in row if (value := number(row[key])) is not None}
        sentences += [f"Iteration {row['iteration']}: {text}." for text in watch.sentences(line)]
    for name, (limit, clause) in _SHARES.items():
        shares = values_of(metrics, name) or [0.0]
        mean, recent = fmean(shares), fmean(shares[-10:])
        if max(mean, recent) > limit:
            sentences.append(
                f"{mean:.1%} {clause}; {recent:.1%} in the last 10, {max(shares):.1%} at worst."
            )
    skipped = sum(values_of(metrics, "optimizer/skipped_steps"))
    if skipped:
        sentences.append(f"{skipped:g} optimizer steps were skipped for a non-finite gradient.")
    if any(row.get("judge/audit_passed") == 0 for row in metrics[-1:]):
        sentences.append("The judge has not passed an audit (`rl judge audit`).")
    if files := [f"{file} ({count})" for file, count in damaged.items() if count]:
        more = f" and {len(files) - _MAX_NAMED} more" if len(files) > _MAX_NAMED else ""
        sentences.append(f"Damaged lines are left out: {', '.join(files[:_MAX_NAMED])}{more}.")
    return sentences


# ---- pages ---------------------------------------------------------------------------------------
# The page's data, `<run>/report/data/*.js`: a script per iteration, per evaluation, and per `CHUNK`
# iterations the values by which groups are filtered. A page opened from disk can load classic
# scripts, not modules or `fetch`.

CHUNK = 20
MAX_WAIT_S = 30.0
NUM_REWARD_BINS, NUM_ADVANTAGE_BINS = 21, 25
"""Bins of the histograms: rewards 0 to 1 in steps of 0.05, advantages -3 to 3 in steps of 0.25."""
MAIN_METRICS = {
    "eval/reward": "held_out_reward",
    "eval/gain_over_stock": "gain_over_untrained",
    "reward/mean": "training_reward",
    "kl/reference_k3": "kl",
    "policy/entropy": "entropy",
    "groups/zero_spread": "groups_without_spread",
}
"""The six most important metrics, in order, with short names: shown first, here and by trackers."""
_SPECIAL = re.compile("[<>&\u2028\u2029\x7f\ud800-\udfff]")
_DATA_FILE = re.compile(r"(it|find|eval)_\d{6,}(_\d+)?\.js")
NAMING = ("run_name", "base_exp_dir")
"""Config keys that differ between any two runs."""
PAGE_FOLDER = Path(__file__).with_name("page")
_SOURCES = ("page.css", "base.js", "lists.js", "charts.js", "samples.js", "start.js")


def literal(value: Any) -> str:
    """`value` as JSON that is also JavaScript and cannot end the `<script>` around it, whatever
    text it holds."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _SPECIAL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


@cache
def template(name: str) -> Template:
    return load_template(PAGE_FOLDER / name, autoescape=True)


PICTURE_FOLDERS = ("images", "thumbnails")


@dataclass(frozen=True)
class _Iteration:
    """What the page says of an iteration outside its own data file."""

    seen: tuple[Any, ...]
    """Size of the episode files that it was made of, and which of `PICTURE_FOLDERS` it has."""
    groups: Mapping[str, Any]
    """`parts`: names of the reward's parts; `rows`: a `finding_row` per group."""
    histograms: tuple[int, list[int], list[int]]
    """(iteration, counts of its rewards by bin, counts of its advantages by bin)."""
    num_damaged: int
    """Number of unreadable lines."""


class Page:
    """`<run>/report/`, which `write` updates from the run folder. An object remembers what it has
    written; a new one writes everything."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._iterations: dict[int, _Iteration] = {}
        self._written: set[str] = set()

    def write(self) -> Path:
        """Returns the path of `index.html`, which loads only files beside it and escapes all text.
        Raises ValueError if anything in the folder is a link, BusyError if another process writes
        it for more than `MAX_WAIT_S`."""
        folder = own_folder(self.run_dir / "report")
        with locked(folder / ".lock", MAX_WAIT_S):
            config = read_config(self.run_dir)
            self._pieces = Pieces(config)
            damaged = self._write_evaluations()
            self._write_iterations()
            for iteration, each in self._iterations.items():
                damaged[f"episodes/it_{iteration:06d}"] = each.num_damaged
            metrics, lines = named_rows(self.run_dir / "metrics.jsonl", "iteration")
            damaged |= {"metrics.jsonl": len(lines), "config.json": int(not config)}
            data = curve_data(metrics, pictures_per_iteration(config))
            shown = [each.histograms for each in self._iterations.values()]
            self._write("metrics", data | {"histograms": shown})
            for path in (folder / "data").iterdir():
                if _DATA_FILE.fullmatch(path.name) and path.name not in self._written:
                    path.unlink()  # of iterations that a resume repeats
            write_atomically(
                folder / "index.html", self._html(metrics, config, damaged), durable=False
            )
            return folder / "index.html"

    def _write(self, name: str, value: Any) -> None:
        """A data file, which passes its value to `page/base.js`."""
        path = self.run_dir / "report/data" / f"{name}.js"
        content = f"page.data({literal(name)},{literal(value)});\n"
        write_atomically(path, content, durable=False)
        self._written.add(path.name)

    def _write_iterations(self) -> None:
        files_of, changed = episode_files(self.run_dir), set()
        for iteration, files in files_of.items():
            # A run may delete its older pictures (`keep_images_of_last_n_iterations`).
            folders = (self.run_dir / name / f"it_{iteration:06d}" for name in PICTURE_FOLDERS)
            seen = (sum(path.stat().st_size for path in files), *map(Path.is_dir, folders))
            known = self._iterations.get(iteration)
            if known is None or known.seen != seen:
                self._iterations[iteration] = self._write_iteration(iteration, files, seen)
                changed.add(iteration // CHUNK)
        for chunk in changed:
            its = [iteration for iteration in files_of if iteration // CHUNK == chunk]
            self._write(f"find_{chunk:06d}", {it: self._iterations[it].groups for it in its})

    def _write_iteration(
        self, iteration: int, files: Sequence[Path], seen: tuple[Any, ...]
    ) -> _Iteration:
        contents = [read_rows(path) for path in files]
        rows: list[Record] = [row for of_file, _ in contents for row in of_file]
        names, groups = part_names(rows), groups_of(rows)
        shown = [group_row(group, names, self.run_dir, self._pieces) for group in groups]
        self._write(f"it_{iteration:06d}", {"parts": names, "rows": shown})
        rewards, advantages = (
            [rounded(row.get(name)) for row in rows] for name in ("reward", "advantage")
        )
        return _Iteration(
            seen,
            {"parts": names, "rows": [finding_row(group, names, self.run_dir) for group in groups]},
            (
                iteration,
                histogram(rewards, 0.05, 0, NUM_REWARD_BINS),
                histogram(advantages, 0.25, -3, NUM_ADVANTAGE_BINS),
            ),
            sum(len(numbers) for _, numbers in contents),
        )

    def _write_evaluations(self) -> dict[str, int]:
        """Returns evaluation -> number of unreadable lines."""
        damaged = {}
        stock_folder = self.run_dir / "stock"
        stock_rows, _ = named_rows(stock_folder / "rewards.jsonl", "files")
        stock = {str(row.get("id")): at(row, "files.stock") for row in stock_rows}
        for iteration, folder in evaluation_folders(self.run_dir).items():
            rows, numbers = named_rows(folder / "records.jsonl", "id")
            names = part_names(rows)
            shown = []
            for row in rows:
                drawn = picture(stock_folder, stock.get(str(row["id"])), may_be_link=True)
                shown.append(record_row(row, names, folder, drawn, self._pieces))
            self._write(f"eval_{iteration:06d}", {"parts": names, "rows": shown})
            damaged[f"evaluation/{folder.name}"] = len(numbers)
        return damaged

    def _html(
        self, metrics: Sequence[Record], config: Mapping[str, Any], damaged: Mapping[str, int]
    ) -> str:
        base, name = config.get("base_exp_dir"), config.get("run_name")
        groups = [len(each.groups["rows"]) for each in self._iterations.values()]
        evaluations = evaluation_folders(self.run_dir)
        facts = {
            "iterations": list(self._iterations),
            "groups": groups,
            "chunks": sorted({iteration // CHUNK for iteration in self._iterations}),
            "sets": [
                {"page": f"eval_{it:06d}", "it": it, "base": f"../evaluation/it_{it:06d}/"}
                for it in evaluations
            ],
            # As the config names it: a page that is sent away has no path of this user.
            "run": f"{base}/{name}" if base and name else self.run_dir.name,
            "checkpoints": [iteration_of(path) for path in steps_of(self.run_dir)],
            "curves": CURVES,
        }
        done = max((int(row["iteration"]) for row in metrics), default=0)
        found = read_evaluations(self.run_dir)
        page = template("index.html.j2").render(
            name=str(name or self.run_dir.resolve().name),
            progress=f"{done:,} of {config.get('num_iterations', '?')} iterations, "
            f"{len(evaluations)} held-out evaluations, {sum(groups):,} groups on record",
            learnt=learnt(found),
            scores=scores(found[0]) if len(found) == 1 else [],
            interval=INTERVAL,
            context=context(metrics),
            alarms=alarms(metrics, config, damaged),
            has_metrics=any(len(row) > 1 for row in metrics),
            times=times(metrics),
            settings=flat(config),
            sources={file: Markup((PAGE_FOLDER / file).read_text("utf-8")) for file in _SOURCES},  # nosec B704
            facts=Markup(literal(facts)),  # nosec B704
            is_drift_measured=any(row.get("drift/alarm") is not None for row in metrics),
        )
        return without_lone_surrogates(page)


def pictures_per_iteration(config: Mapping[str, Any]) -> int | None:
    """None if the config is damaged."""
    keys = ("prompts_per_iteration", "generations_per_prompt", "images_per_completion")
    factors: list[Any] = [config.get(key) for key in keys]
    known = all(type(factor) is int and 0 < factor < 10**6 for factor in factors)
    return prod(factors) if known else None


def times(metrics: Sequence[Record]) -> list[tuple[str, float, float]]:
    """(phase, seconds, share of total time), longest first; time outside phases is '(other)'."""
    seconds_of: dict[str, float] = {}
    for name in {name for row in metrics for name in row}:
        if match := re.fullmatch("time/(.*)_s", name):
            seconds_of[match[1]] = sum(values_of(metrics, name))
    total = seconds_of.pop("iteration", 0.0)
    if total <= 0:
        return []
    seconds_of["(other)"] = max(0.0, total - sum(seconds_of.values()))
    longest = sorted(seconds_of.items(), key=lambda item: -item[1])
    return [(name, seconds, seconds / total) for name, seconds in longest if seconds > 0]


def flat(config: Mapping[str, Any]) -> dict[str, str]:
    """Dotted key -> value, a string or JSON."""
    return {
        key: item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)
        for key, item in leaves(config)
        if key
    }
