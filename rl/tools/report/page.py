"""What a run learnt, in lines, and its page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from itertools import groupby
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

from jinja2 import Template
from markupsafe import Markup
from pydantic import BaseModel, StringConstraints

from rl.config.loading import printable, read_bytes
from rl.files import read_rows, write_atomically
from rl.printing import load_template, without_lone_surrogates
from rl.run.alarms import EXPLOITS, HELD_OUT, Watch
from rl.run.paired import NUM_RESAMPLES, are_alike, interval
from rl.tools.report.reading import (
    CURVES,
    LEVELS,
    WHOLE,
    Curve,
    Evaluation,
    Limits,
    Pieces,
    Record,
    curve_data,
    episode_files,
    evaluation_folders,
    finding_row,
    for_one_report,
    group_row,
    groups_of,
    histogram,
    is_control,
    named_rows,
    number,
    part_names,
    picture,
    points,
    read_config,
    read_evaluations,
    record_row,
    short,
    shown_of,
)

# ---- summary -------------------------------------------------------------------------------------
# Compares held-out rewards before and after training, with intervals; lists a run's alarms.

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
    watch = Watch([*EXPLOITS, *HELD_OUT])
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


# ---- pages ---------------------------------------------------------------------------------------
# Writes those data pages of a report, `<run>/report/data/*.js`, whose sources have changed.

MAX_PAGE_BYTES = 300_000
CHUNK = 20
"""Number of iterations whose pages are rewritten together."""
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
_CALL = re.compile(r'page\.data\("[a-z0-9_]+",(.*)\);\n', re.DOTALL)
"""What `call` writes. A page opened from disk can load classic scripts, not modules or `fetch`."""
_SPECIAL = re.compile("[<>&\u2028\u2029\x7f\ud800-\udfff]")
_PAGE_FILE = re.compile(r"(?:it|find|eval)_\d{6,}(?:_\d+)?\.js")


@dataclass
class PageIndex:
    """The pages in the folder."""

    iterations: list[tuple[int, int]] = field(default_factory=list)
    """(iteration, number of groups) of each iteration that has a page."""
    evaluations: list[tuple[int, int]] = field(default_factory=list)
    """(iterations done, number of pages) of each evaluation."""
    histograms: list[tuple[int, list[int], list[int]]] = field(default_factory=list)
    """(iteration, counts of its rewards by bin, counts of its advantages by bin)."""
    damaged: dict[str, int] = field(default_factory=dict)
    """File -> number of unreadable lines."""
    num_written: int = 0
    """Number of pages that `refresh` wrote."""


class _Part(BaseModel):
    """Pages that are written together."""

    stamp: list[Any]
    """Path, size, times and inode of each source file."""
    files: list[Annotated[str, StringConstraints(pattern=f"^(?:{_PAGE_FILE.pattern})$")]]
    groups: list[tuple[int, int]]
    """(iteration, number of groups)."""
    histograms: list[tuple[int, list[int], list[int]]]
    damaged: dict[str, int]
    """File -> number of unreadable lines."""


class _Manifest(BaseModel):
    """`made_of.json`; untrusted, because it may come with another user's run."""

    format: Literal[5] = 5
    parts: dict[str, _Part] = {}


class _Folder:
    """The data folder; writes the parts whose sources have changed."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.num_written = self._num_made = 0
        self._current = _Manifest()
        try:
            self._previous = _Manifest.model_validate_json(read_bytes(folder / "made_of.json"))
        except (OSError, ValueError):
            self._previous = _Manifest()

    def part(self, name: str, sources: Sequence[Path], make: Callable[[_Part], None]) -> _Part:
        """The part called `name`. Calls `make` to write its files if a source has changed or was
        copied (a copy has another ctime), or if one of its files is gone."""
        stats = [(path, path.stat()) for path in sources if path.exists()]
        stamp = [
            [str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
            for path, stat in stats
        ]
        part = self._previous.parts.get(name)
        is_whole = part is not None and all((self.path / file).is_file() for file in part.files)
        if part is None or not is_whole or part.stamp != stamp:
            part = _Part(stamp=stamp, files=[], groups=[], histograms=[], damaged={})
            make(part)
            self._current.parts[name] = part
            self._num_made += 1
            # An interrupted refresh will continue here. After 1, 2, 4, 8, ... parts, because the
            # manifest names all of them.
            if self._num_made.bit_count() == 1:
                self._save_manifest(self._previous.parts | self._current.parts)
        self._current.parts[name] = part
        return part

    def write(self, part: _Part, page: str, content: str) -> None:
        write_atomically(self.path / f"{page}.js", content)
        part.files.append(f"{page}.js")
        self.num_written += 1

    def _save_manifest(self, parts: Mapping[str, _Part]) -> None:
        content = _Manifest(parts=dict(parts)).model_dump_json()
        write_atomically(self.path / "made_of.json", content)

    def close(self) -> None:
        """Remove pages whose sources are gone."""
        self._save_manifest(self._current.parts)
        kept = {file for part in self._current.parts.values() for file in part.files}
        for path in self.path.iterdir():
            if _PAGE_FILE.fullmatch(path.name) and path.name not in kept:
                path.unlink()


def refresh(run_dir: Path, folder: Path) -> PageIndex:
    """Update the pages in `folder` from `run_dir`."""
    pages, index = _Folder(folder), PageIndex()
    pieces = Pieces(read_config(run_dir))
    for chunk, in_chunk in groupby(episode_files(run_dir).items(), lambda it: it[0] // CHUNK):
        files_of = dict(in_chunk)
        sources = [path for files in files_of.values() for path in files]
        for kind in ("images", "thumbnails"):
            sources += [run_dir / kind / f"it_{iteration:06d}" for iteration in files_of]
        name = f"find_{chunk:06d}"
        make = partial(_write_chunk, pages, name, files_of, run_dir, pieces)
        part = pages.part(name, sources, make)
        index.iterations += part.groups
        index.histograms += part.histograms
        index.damaged |= part.damaged
    stock_file = run_dir / "stock" / "rewards.jsonl"
    stock = _stock_pictures(stock_file)
    for iteration, source in evaluation_folders(run_dir).items():
        name = f"eval_{iteration:06d}"
        make = partial(_write_evaluation, pages, name, iteration, source, stock, pieces)
        part = pages.part(name, [source / "records.jsonl", stock_file], make)
        index.evaluations.append((iteration, len(part.files)))
        index.damaged |= part.damaged
    pages.close()
    index.num_written = pages.num_written
    return index


def _write_chunk(
    pages: _Folder,
    name: str,
    files_of: Mapping[int, Sequence[Path]],
    run_dir: Path,
    pieces: Pieces,
    part: _Part,
) -> None:
    rows_of: dict[str, Any] = {}
    for iteration, files in files_of.items():
        rows_and_damage = [read_rows(path) for path in files]
        rows: list[Record] = [row for file_rows, _ in rows_and_damage for row in file_rows]
        names, groups = part_names(rows), groups_of(rows)
        page = f"it_{iteration:06d}"
        makers = [partial(group_row, group, names, run_dir, pieces) for group in groups]
        _write(pages, part, page, {"it": iteration, "parts": names}, makers)
        finding = [finding_row(g, group, names, run_dir) for g, group in enumerate(groups)]
        rows_of[str(iteration)] = {"parts": names, "rows": finding}
        part.groups.append((iteration, len(groups)))
        rewards = histogram([short(row.get("reward")) for row in rows], 0.05, 0, NUM_REWARD_BINS)
        advantages = [short(row.get("advantage")) for row in rows]
        counts = histogram(advantages, 0.25, -3, NUM_ADVANTAGE_BINS)
        part.histograms.append((iteration, rewards, counts))
        if damaged := sum(len(numbers) for _, numbers in rows_and_damage):
            part.damaged[f"episodes/{page}"] = damaged
    pages.write(part, name, call(name, rows_of))


def _write_evaluation(
    pages: _Folder,
    name: str,
    iteration: int,
    folder: Path,
    stock: Mapping[str, str | None],
    pieces: Pieces,
    part: _Part,
) -> None:
    rows, damaged = named_rows(folder / "records.jsonl", "id")
    names = part_names(rows)
    makers = [
        partial(record_row, row, names, folder, stock.get(str(row["id"])), pieces) for row in rows
    ]
    _write(pages, part, name, {"it": iteration, "parts": names}, makers)
    if damaged:
        part.damaged[f"evaluation/{folder.name}"] = len(damaged)


def _write(
    pages: _Folder,
    part: _Part,
    name: str,
    head: Mapping[str, Any],
    makers: Sequence[Callable[[Limits], Mapping[str, Any]]],
) -> None:
    """Write one row per maker, with the first limits of `LEVELS` under which all rows fit in one
    page; under the last limits they may take several pages."""
    max_bytes = MAX_PAGE_BYTES - 2000
    rows: list[str] = []
    limits = WHOLE
    for limits in LEVELS:
        rows = [literal(make(limits)) for make in makers]
        if sum(len(row.encode()) + 1 for row in rows) < max_bytes:
            break
    pages_rows: list[list[str]] = [[]]
    size = 0
    for row in rows:
        num_bytes = len(row.encode()) + 1
        if size + num_bytes > max_bytes and pages_rows[-1]:
            pages_rows.append([])
            size = 0
        pages_rows[-1].append(row)
        size += num_bytes
    starts = [sum(map(len, pages_rows[:n])) for n in range(len(pages_rows))]
    cut = None if limits is WHOLE else [limits.text_chars, limits.reply_chars, limits.num_tokens]
    for count, page_rows in enumerate(pages_rows, 1):
        page = name if count == 1 else f"{name}_{count}"
        # The rows are JavaScript already.
        content = call(page, {**head, "starts": starts, "cut": cut, "rows": []})
        content = content.replace('"rows":[]});', f'"rows":[{",".join(page_rows)}]}});')
        pages.write(part, page, content)


def _stock_pictures(path: Path) -> dict[str, str | None]:
    """Sample id -> file of the stock arm's picture."""
    rows = read_rows(path)[0]
    files = {str(row.get("id")): row.get("files") for row in rows}
    return {
        sample_id: picture(path.parent, arm_files.get("stock"))
        for sample_id, arm_files in files.items()
        if isinstance(arm_files, Mapping)
    }


def literal(value: Any) -> str:
    """`value` as JSON that is also JavaScript and cannot end the `<script>` around it, whatever
    text it holds."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _SPECIAL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def call(name: str, value: Any) -> str:
    """The script of the data page `name`, which passes its value to `rl/report/page/base.js`."""
    return f"page.data({literal(name)},{literal(value)});\n"


def value_of(script: str) -> Any:
    """The value in a data page. Raises ValueError if `script` is not exactly what `call` writes."""
    match = _CALL.fullmatch(script)
    if match is None:
        raise ValueError("no data page")
    return json.loads(match[1])


# ---- page ----------------------------------------------------------------------------------------
# Writes `<run>/report/index.html`, a page that loads only files beside it and escapes all text.

NAMING = ("run_name", "base_exp_dir")
"""Config keys that differ between any two runs."""
PAGE_FOLDER = Path(__file__).with_name("page")
_SOURCES = ("page.css", "base.js", "lists.js", "charts.js", "samples.js", "start.js")


def write_page(run_dir: Path) -> tuple[Path, PageIndex]:
    """Update `<run>/report/` from the run folder."""
    folder = run_dir / "report"
    with for_one_report(folder):
        index = refresh(run_dir, folder / "data")
        data = call("metrics", metrics_data(run_dir, index))
        write_atomically(folder / "data" / "metrics.js", data)
        write_atomically(folder / "index.html", rendered(run_dir, index))
    return folder / "index.html", index


def rendered(run_dir: Path, index: PageIndex) -> str:
    """The page's HTML."""
    metrics, damaged = named_rows(run_dir / "metrics.jsonl", "iteration")
    config = read_config(run_dir)
    num_damaged = dict(index.damaged)
    if damaged:
        num_damaged["metrics.jsonl"] = len(damaged)
    evaluations = read_evaluations(run_dir)
    facts = _facts(run_dir, config, index)
    page = template("index.html.j2").render(
        name=str(config.get("run_name") or run_dir.resolve().name),
        progress=_progress(metrics, config, index),
        learnt=learnt(evaluations),
        interval=INTERVAL,
        context=context(metrics),
        alarms=alarms(metrics, config, num_damaged),
        has_metrics=any(len(row) > 1 for row in metrics),
        times=times(metrics),
        settings=flat(config),
        sources={name: Markup((PAGE_FOLDER / name).read_text("utf-8")) for name in _SOURCES},  # nosec B704
        facts=Markup(literal(facts | {"first": first_drawn(evaluations)})),  # nosec B704
        is_drift_measured=any(row.get("drift/alarm") is not None for row in metrics),
    )
    return without_lone_surrogates(page)


@cache
def template(name: str) -> Template:
    return load_template(PAGE_FOLDER / name, autoescape=True)


def metrics_data(run_dir: Path, index: PageIndex) -> dict[str, Any]:
    """The data page `metrics`: every metric, and the histograms of rewards and advantages."""
    config = read_config(run_dir)
    keys = ("prompts_per_iteration", "generations_per_prompt", "images_per_completion")
    factors: list[Any] = [config.get(key) for key in keys]
    known = all(type(factor) is int and 0 < factor < 10**6 for factor in factors)
    metrics = named_rows(run_dir / "metrics.jsonl", "iteration")[0]
    data = curve_data(metrics, prod(factors) if known else None)
    return data | {"histograms": index.histograms}


def _facts(run_dir: Path, config: Mapping[str, Any], index: PageIndex) -> dict[str, Any]:
    """Data for the page's scripts."""
    sets = [
        {
            "page": f"eval_{it:06d}",
            "it": it,
            "files": num_files,
            "base": f"../evaluation/it_{it:06d}/",
        }
        for it, num_files in index.evaluations
    ]
    return {
        "iterations": [it for it, _ in index.iterations],
        "groups": [num for _, num in index.iterations],
        "chunks": sorted({iteration // CHUNK for iteration, _ in index.iterations}),
        "sets": sets,
        "run": _path(run_dir, config),
        "checkpoints": _checkpoints(run_dir),
        "curves": list(map(_spec, sorted(CURVES, key=_rank))),
    }


def first_drawn(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """The first held-out sample that both evaluations have and the second drew, as rows of their
    data pages with short texts; [] if there is none."""
    if len(evaluations) < 2:
        return []
    before, after = evaluations
    both = (name for name in after.records if name in before.records)
    name = next(
        (n for n in both if picture(after.folder, after.records[n].get("image_file"))), None
    )
    return [
        record_row(each.records[name], (), each.folder, None, Pieces({}), Limits(160, 0, 0))
        for each in (before, after)
        if name is not None
    ]


def _rank(curve: Curve) -> int:
    """Position of the curve's metric among `MAIN_METRICS`, or behind them."""
    main = list(MAIN_METRICS)
    metrics = [line.metric for line in curve.lines if line.style == "main"]
    return min((main.index(name) for name in metrics if name in main), default=len(main))


def _spec(curve: Curve) -> dict[str, Any]:
    """A curve for `page/charts.js`."""
    lines = [[line.metric, line.label, line.style] for line in curve.lines]
    main = _rank(curve) < len(MAIN_METRICS)
    return {"title": curve.title, "top": curve.top, "lines": lines, "main": main}


def _path(run_dir: Path, config: Mapping[str, Any]) -> str:
    """The run folder as its config names it: a page that is sent away has no path of this user."""
    base, name = config.get("base_exp_dir"), config.get("run_name")
    return f"{base}/{name}" if isinstance(base, str) and isinstance(name, str) else run_dir.name


def _checkpoints(run_dir: Path) -> list[int]:
    names = (path.name.removeprefix("step_") for path in run_dir.glob("checkpoints/step_*"))
    return sorted(int(name) for name in names if name.isdecimal() and name.isascii())


def _progress(metrics: Sequence[Record], config: Mapping[str, Any], index: PageIndex) -> str:
    last = max((int(row["iteration"]) for row in metrics), default=0)
    planned = config.get("num_iterations")
    of_planned = f" of {planned}" if type(planned) is int and planned > 0 else ""
    num_groups = sum(num for _, num in index.iterations)
    num_evaluations = len(index.evaluations)
    evaluations = f"{num_evaluations} held-out evaluation{'' if num_evaluations == 1 else 's'}"
    return f"{last:,}{of_planned} iterations, {evaluations}, {num_groups:,} groups on record"


def times(metrics: Sequence[Record]) -> list[tuple[str, float, float]]:
    """(phase, seconds, share of total time), longest first; time outside phases is '(other)'."""
    total = sum(value for _, value in points(metrics, "time/iteration_s"))
    names = {
        name: name.removeprefix("time/").removesuffix("_s")
        for row in metrics
        for name in row
        if name.startswith("time/") and name.endswith("_s") and name != "time/iteration_s"
    }
    seconds_of = {short: sum(v for _, v in points(metrics, name)) for name, short in names.items()}
    if total <= 0:
        return []
    seconds_of["(other)"] = max(0.0, total - sum(seconds_of.values()))
    longest = sorted(seconds_of.items(), key=lambda item: -item[1])
    return [(name, seconds, seconds / total) for name, seconds in longest if seconds > 0]


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, item in value.items():
        name = f"{prefix}{key}"
        children: Any = item
        if isinstance(item, list) and any(isinstance(entry, Mapping) for entry in item):
            children = {str(position): entry for position, entry in enumerate(item)}
        if isinstance(children, Mapping) and children:
            found |= flat(children, f"{name}.")
        else:
            found[name] = item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)
    return found
