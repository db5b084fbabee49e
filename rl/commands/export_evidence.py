"""Gathers what a run's own record says of an exported model, for its card.

Pictures and lines of a run folder are anybody's: a picture is decoded and written anew, under a
name of ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from PIL.Image import DecompressionBombError, Image

from rl.files.images import downscale, open_picture, png_bytes
from rl.record.model_card import OWN_WORDS, Comparison, Evidence, Shown
from rl.report.figures import draw_curve
from rl.report.reading import (
    Evaluation,
    other_sources,
    read_evaluations,
    read_named,
    shown_of,
    words_of,
)
from rl.report.summary import Change, compare

PICTURES_FOLDER = "pictures"
NUM_SAMPLES_SHOWN = 6
PICTURE_SIDE_PX = 512


def gather(run_dir: Path, done: int, target: Path, with_pictures: bool) -> Evidence | None:
    """Of the model after `done` iterations, by the last held-out run up to there; what is drawn
    lands in `target`. None where fewer than two were made by then."""
    lines = read_named(run_dir / "metrics.jsonl", "iteration")
    metrics = [
        {name: value for name, value in line.items() if is_number(value)}
        for line in lines
        if type(line["iteration"]) is int and line["iteration"] <= done
    ]
    made = [_readable(e) for e in read_evaluations(run_dir) if e.iteration <= done]
    if len(made) < 2:
        return None
    before, after = made[0], made[-1]
    learnt = [comparison(change) for change in compare(before, after)]
    graded_both = learnt[0].num_samples if learnt else 0
    curve = None
    if with_pictures:
        (target / PICTURES_FOLDER).mkdir()
        curve = f"{PICTURES_FOLDER}/reward_curve.png"
        draw_curve(target / curve, metrics)
    return Evidence(
        iterations=(before.iteration, after.iteration),
        learnt=learnt,
        arms=list(_arms(after)),
        num_left_out=len(before.records) - graded_both,
        ungraded_share=_mean(metrics, "status/ungraded"),
        drift_alarms=_drift_alarms(metrics),
        curve=curve,
        samples=_first_samples(before, after, target if with_pictures else None),
    )


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _readable(evaluation: Evaluation) -> Evaluation:
    """Without records that no run writes."""
    records = {
        identity: record
        for identity, record in evaluation.records.items()
        if all(isinstance(record.get(key), str) for key in ("id", "instruction", "completion"))
        and isinstance(record.get("category"), str | None)
        and all(
            record.get(key) is None or is_number(record[key])
            for key in ("reward", "bare_reward", "stock_reward")
        )
    }
    return replace(evaluation, records=records)


def comparison(change: Change) -> Comparison:
    """As a card has it."""
    return Comparison(
        change.name, len(change.rewards), change.before, change.after, change.interval
    )


def _arms(after: Evaluation) -> list[Comparison]:
    """The model beside what was drawn without its words."""
    found = []
    for key, name in (
        ("stock_reward", "the untrained system, given the user's own words (stock)"),
        ("bare_reward", "this model, given the user's own words as they are (bare)"),
    ):
        graded = [
            record
            for record in after.records.values()
            if record.get(key) is not None and record.get("reward") is not None
        ]
        if graded:
            rewards = [(record[key], record["reward"]) for record in graded]
            shown = [shown_of(record) or [record["id"]] for record in graded]
            found.append(comparison(Change(name, rewards, shown)))
    return found


def _mean(metrics: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [row[name] for row in metrics if row.get(name) is not None]
    return fmean(values) if values else None


def _drift_alarms(metrics: Sequence[Mapping[str, Any]]) -> list[int] | None:
    rows = [row for row in metrics if row.get("drift/alarm") is not None]
    return [row["iteration"] for row in rows if row["drift/alarm"]] if rows else None


def _first_samples(before: Evaluation, after: Evaluation, target: Path | None) -> list[Shown]:
    """`target` None: their words alone."""
    both = [identity for identity in before.records if identity in after.records]
    return [
        _sample(number, before, after, identity, target)
        for number, identity in enumerate(both[:NUM_SAMPLES_SHOWN], start=1)
    ]


def _sample(
    number: int,
    before: Evaluation,
    after: Evaluation,
    identity: str,
    target: Path | None,
) -> Shown:
    old, new = before.records[identity], after.records[identity]
    has_source = old.get("source_file") is not None
    given = {OWN_WORDS: old.get("bare_file")}
    if has_source:
        others = {f"source{n}": file for n, file in enumerate(other_sources(old), 2)}
        given = {"source": old["source_file"], **others}
    sides = {side: (before, file) for side, file in given.items()} | {
        "before": (before, old.get("image_file")),
        "after": (after, new.get("image_file")),
    }
    files = []
    if target is not None:
        drawn = {side: _picture(run.folder, file) for side, (run, file) in sides.items()}
        for side, picture in drawn.items():
            if picture is not None and None not in drawn.values():
                files.append(f"{PICTURES_FOLDER}/{number:02d}_{side}.png")
                (target / files[-1]).write_bytes(png_bytes(downscale(picture, PICTURE_SIDE_PX)))
    return Shown(
        instruction=str(old["instruction"]),
        words=(str(words_of(old)), str(words_of(new))),
        rewards=(old.get("reward"), new.get("reward")),
        files=tuple(files),
    )


def _picture(folder: Path, file: object) -> Image | None:
    """None for what is no picture in that very folder."""
    if not isinstance(file, str) or Path(file).name != file or (folder / file).is_symlink():
        return None
    try:
        with open_picture(folder / file) as image:
            return image.convert("RGB")
    except (OSError, ValueError, DecompressionBombError):
        return None
