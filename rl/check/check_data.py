"""Opens a run's data sources before it starts, and reports what is wrong with their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rl import build
from rl.api import find
from rl.build import Resolved

MAX_OPENED = 20_000
"""Pictures of one source that `rl check` opens, in some six seconds."""


@dataclass
class DataReport:
    """What the sources of a run hold, each under its key."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    """The number of rows of each source, and what was not read."""
    num_rows: dict[str, int] = field(default_factory=dict)
    most_pictures: int = 1
    """Largest number of source pictures of a row."""
    checked: dict[str, Sequence[int]] = field(default_factory=dict)
    """For `RowRules.checked`."""


def check_data(resolved: Resolved, is_start: bool = False) -> DataReport:
    """Open each source and check its rows. Without `is_start`, only those that are on this machine
    and are opened quickly, with at most `MAX_OPENED` pictures each."""
    report = DataReport()
    rules = build.row_rules(resolved, None if is_start else MAX_OPENED)
    contents: dict[str, Sequence[int]] = {}
    plugins = [*resolved.train, *resolved.validation]
    for plugin in sorted(plugins, key=lambda plugin: not plugin.cls.is_here(plugin.config)):
        if not plugin.cls.is_here(plugin.config) and (not is_start or report.problems):
            report.lines.append(f"{plugin.key}: not read; a start reads it")
            continue
        try:
            source = build.open_source(plugin, rules)
        except ValueError as error:
            report.problems.append(f"{plugin.key}: {str(error).removeprefix(f'{plugin.key}: ')}")
            continue
        findings = source.findings
        left_out = f"; left out as bad: {source.num_skipped}" if source.num_skipped else ""
        unread = "".join(f"; not read: {text}" for text in findings.unread)
        report.lines.append(f"{plugin.key}: rows: {len(source)}{left_out}{unread}")
        report.lines += [f"  {reason}" for reason in findings.left_out]
        report.num_rows[plugin.key] = len(source)
        report.warnings += [f"{plugin.key}: {warning}" for warning in findings.warnings]
        report.most_pictures = max(report.most_pictures, findings.most_pictures)
        report.checked.update(findings.checked)
        contents[plugin.key] = findings.contents
        label = f"{plugin.key}: closing {plugin.name}"
        report.problems += find.attempt(label, plugin.cls.close, source.close)[1]
    report.warnings += _repeated(resolved, contents)
    return report


def _repeated(resolved: Resolved, contents: Mapping[str, Sequence[int]]) -> list[str]:
    """A warning for each held-out source with rows that are also trained on."""
    warnings = []
    for held_out in resolved.validation:
        rows = contents.get(held_out.key, ())
        distinct = set(rows)
        for trained in resolved.train:
            shared = distinct.intersection(contents.get(trained.key, ()))
            if num := sum(content in shared for content in rows):
                warnings.append(
                    f"{held_out.key}: {num} of its {len(rows)} rows are also in {trained.key}, so "
                    "that their scores say little about other rows"
                )
    return warnings
