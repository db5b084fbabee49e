"""Gathers evidence about an exported model from its run's records, for the model card."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from PIL.Image import DecompressionBombError, Image

from rl.files import downscale, open_picture, png_bytes
from rl.record.publish import OWN_WORDS, Comparison, Evidence, Shown
from rl.report import reading
from rl.report.curves import points
from rl.report.reading import Evaluation
from rl.report.summary import Change, learnt

PICTURES_FOLDER = "pictures"
NUM_SAMPLES_SHOWN = 6
PICTURE_SIDE_PX = 512
ARMS = {
    "stock_reward": "the untrained system, given the user's own words (stock)",
    "bare_reward": "this model, given the user's own words as they are (bare)",
}


def gather(run_dir: Path, done: int, target: Path, with_pictures: bool) -> Evidence | None:
    """Evidence about the model after `done` iterations, from the last evaluation up to then;
    writes pictures into `target`. None if there were fewer than two evaluations by then."""
    metrics = [
        row
        for row in reading.read_named(run_dir / "metrics.jsonl", "iteration")
        if row["iteration"] <= done
    ]
    evaluations = reading.read_evaluations(run_dir, done)
    gain = learnt(evaluations)
    if gain is None:
        return None
    before, after = evaluations
    if with_pictures:
        (target / PICTURES_FOLDER).mkdir()
    ungraded = [share for _, share in points(metrics, "status/ungraded")]
    drift = points(metrics, "drift/alarm")
    shared_ids = [identity for identity in before.records if identity in after.records]
    return Evidence(
        iterations=(before.iteration, after.iteration),
        learnt=[comparison(change) for change in gain.changes],
        arms=_arms(after),
        num_left_out=gain.num_left_out,
        ungraded_share=fmean(ungraded) if ungraded else None,
        drift_alarms=[int(iteration) for iteration, alarm in drift if alarm] if drift else None,
        samples=[
            _sample(number, before, after, identity, target if with_pictures else None)
            for number, identity in enumerate(shared_ids[:NUM_SAMPLES_SHOWN], start=1)
        ],
    )


def comparison(change: Change) -> Comparison:
    return Comparison(
        change.name, len(change.rewards), change.before, change.after, change.interval
    )


def _arms(after: Evaluation) -> Sequence[Comparison]:
    """Compares the model with each arm that is drawn without the model's words."""
    comparisons = []
    for key, name in ARMS.items():
        change = Change(name, [], [])
        for record in after.records.values():
            other, own = (reading.number(record.get(name)) for name in (key, "reward"))
            if other is not None and own is not None:
                change.rewards.append((other, own))
                change.shown.append(reading.shown_of(record) or [str(record["id"])])
        if change.rewards:
            comparisons.append(comparison(change))
    return comparisons


def _sample(
    number: int, before: Evaluation, after: Evaluation, identity: str, target: Path | None
) -> Shown:
    """One held-out sample before and after training. `target` None: without pictures."""
    old, new = before.records[identity], after.records[identity]
    sides = {OWN_WORDS: (before, old.get("bare_file"))}
    if old.get("source_file") is not None:
        sources = [old["source_file"], *reading.other_sources(old)]
        sides = {f"source{n}" if n > 1 else "source": (before, f) for n, f in enumerate(sources, 1)}
    sides |= {"before": (before, old.get("image_file")), "after": (after, new.get("image_file"))}
    files: list[str] = []
    if target is not None:
        images = {side: _picture(run.folder, file) for side, (run, file) in sides.items()}
        for side, image in images.items():
            if image is not None and None not in images.values():
                files.append(f"{PICTURES_FOLDER}/{number:02d}_{side}.png")
                (target / files[-1]).write_bytes(png_bytes(downscale(image, PICTURE_SIDE_PX)))
    return Shown(
        instruction=str(old.get("instruction")),
        words=(str(reading.words_of(old)), str(reading.words_of(new))),
        rewards=(reading.number(old.get("reward")), reading.number(new.get("reward"))),
        files=tuple(files),
    )


def _picture(folder: Path, file: object) -> Image | None:
    """The picture; None if `file` is not a readable picture directly in `folder`."""
    name = reading.picture(folder, file)
    if name is None or "/" in name:
        return None
    try:
        with open_picture(folder / name) as image:
            return image.convert("RGB")
    except (OSError, ValueError, DecompressionBombError):
        return None
