"""Makes an audit's cases: from drawn scenes, the config's data, labelled pairs or a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from PIL.Image import Image

from rl import build
from rl.api.data import DataSource
from rl.api.types import Sample, UnusableSampleError
from rl.audit.audit_cases import CORRECT, Case, cases_of
from rl.audit.audit_scenes import scene_cases
from rl.build import Resolved
from rl.config.loading import is_folder, not_a_file
from rl.config.schema import ConfigError
from rl.files import open_picture, read_rows
from rl.printing import excerpt
from rl.rollout.prompt_order import first_samples

PAIR_COLUMNS = ("instruction", "source", "better", "worse")


def configured_cases(
    resolved: Resolved, rewards: Sequence[str], num_cases: int, seed: int
) -> list[Case]:
    """Cases from the source that `judge.audit_set` names. Raises ConfigError if there are none."""
    if resolved.config.judge.audit_set == "scenes":
        asking = [resolved.rewards[name] for name in rewards]
        with_sources = any("source" in each.cls.needs_with(each.config) for each in asking)
        return scene_cases(num_cases, seed, with_sources)
    plugins = resolved.validation or resolved.train
    sources = build.build_data(resolved, plugins)
    try:
        # Some samples lack a target, or have one that equals the source.
        samples = first_samples(sources, [1.0] * len(sources), 4 * num_cases, "skip")
    finally:
        for source in sources:
            source.close()
    cases = cases_of(samples, num_cases)
    if not cases:
        raise ConfigError(
            [
                "judge.audit_set: 'data' needs samples with a target that differs from the source, "
                f"and none of the first {len(samples)} has one; name the data's target column, or "
                "set judge.audit_set: 'scenes'"
            ]
        )
    return cases


def pair_cases(resolved: Resolved, path: str, columns: Mapping[str, str]) -> list[Case]:
    """Labelled pairs: each row of a parquet, csv, json or jsonl file (or of a data set on the hub)
    has an instruction, perhaps a source picture, a better and a worse result.

    `columns`: names from `PAIR_COLUMNS` -> columns; 'source' may be missing, 'category' is read if
    named. Raises ConfigError naming what is missing.
    """
    if (why := not_a_file(path)) and not is_folder(path) and path.count("/") != 1:
        raise ConfigError([f"--pairs: {path} {why}; give a file, or the id of a data set"])
    if missing := [name for name in PAIR_COLUMNS if name not in columns and name != "source"]:
        raise ConfigError([f"--columns: nothing for {', '.join(missing)}; e.g. better=chosen"])
    if unknown := columns.keys() - {*PAIR_COLUMNS, "category"}:
        raise ConfigError([f"--columns: {', '.join(sorted(unknown))} unknown; {PAIR_COLUMNS}"])
    kept = {name: columns[name] for name in ("instruction", "category") if name in columns}
    sections = [
        {
            "type": "hf_dataset",
            "path": path,
            "columns": {**kept, "source": columns.get("source", ""), "target": columns[side]},
        }
        for side in ("better", "worse")
    ]
    data = resolved.config.data.model_copy(update={"validation": sections})
    with_pairs = build.resolve(resolved.config.model_copy(update={"data": data}))
    better, worse = build.build_data(with_pairs, with_pairs.validation)
    with closing(better), closing(worse):
        worse_results = {each.id: each.target for each in _rows(worse)}
        rows = [(each, each.target, worse_results.get(each.id)) for each in _rows(better)]
    return [
        Case(sample, {CORRECT: (sample, right), "worse": (sample, wrong)})
        for sample, right, wrong in rows
        if right is not None and wrong is not None
    ]


def _rows(source: DataSource) -> Iterator[Sample]:
    """The usable rows of a data source."""
    for index in range(len(source)):
        with suppress(UnusableSampleError):
            yield source[index]


def run_cases(run_dir: Path, num_groups: int) -> list[Case]:
    """The last `num_groups` groups of a run whose pictures are on disk. `Case.results` names their
    members 'm0', 'm1', ...; which of them are right is unknown."""
    cases: list[Case] = []
    for file in sorted((run_dir / "episodes").glob("it_*.jsonl"), reverse=True):
        groups: dict[Any, list[dict[str, Any]]] = {}
        for row in read_rows(file)[0]:
            if row.get("image_file") and isinstance(row.get("reward"), float):
                groups.setdefault(row["group_id"], []).append(row)
        for rows in groups.values():
            if len(rows) < 2 or len(cases) == num_groups:
                continue
            sample = _recorded_sample(run_dir, rows[0])
            results = {
                f"m{row['member']}": (sample, _picture(run_dir, row["image_file"])) for row in rows
            }
            cases.append(Case(sample, results))
    return cases


def _recorded_sample(run_dir: Path, row: Mapping[str, Any]) -> Sample:
    files = [row["source_file"], *row.get("other_source_files", ())]
    target = row.get("target_file")
    return Sample(
        str(row["sample_id"]),
        str(row["instruction"]),
        tuple(_picture(run_dir, file) for file in files if file),
        target=_picture(run_dir, target) if target else None,
        category=str(row.get("category", "")),
    )


def _picture(run_dir: Path, file: str) -> Image:
    path = Path(file)
    if path.is_absolute() or ".." in path.parts or (run_dir / path).is_symlink():
        raise ValueError(f"--run: {run_dir} names a picture elsewhere: {excerpt(file, 200)}")
    return open_picture(run_dir / path).convert("RGB")
