"""`--check` accepts or refuses any value of any key, however hostile, without a traceback."""

from __future__ import annotations

import random
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import tiny_config

from rl import build
from rl.check import check_report
from rl.config.loading import validate
from rl.config.schema import RunConfig, listed

ODD: list[Any] = [
    9 * 10**15, 10**400, 1e300, 5e-324, "a\0b", "x" * 200_000, {"a\0b": 1},
    -1, 0, 1.5, True, None, "", "x" * 300, "x" * 99_000, "/dev/zero", "/tmp",
    "\x1b[2J\n", [], {}, ["y" * 300], [2, 3], ".", "../../..", "http://[::1", "pkg://",
    "pkg://rl/../../b", "pkg://rl/" + "x" * 300,
]  # fmt: skip
NUM_TRIED = 60


def full(folder: Path) -> dict[str, Any]:
    """A config that states every key of every section."""
    config = tiny_config.validated(tiny_config.real(folder))
    resolved = build.resolve(config)
    sections = {
        name: getattr(resolved, name).config.model_dump(mode="json")
        for name in ("policy", "engine", "renderer")
    }
    sections["renderer"].pop("scheduler_overrides", None)
    rewards = {
        name: plugin.config.model_dump(mode="json") for name, plugin in resolved.rewards.items()
    }
    return config.model_dump(mode="json") | sections | {"rewards": rewards}


def keys(values: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in items:
        yield (*prefix, key)
        if isinstance(value, (dict, list)):
            yield from keys(value, (*prefix, key))


def with_value(values: dict[str, Any], key: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed = deepcopy(values)
    section: Any = changed
    for part in key[:-1]:
        section = section[part]
    section[key[-1]] = value
    return changed


def test_any_value_of_any_key_is_accepted_or_refused(tmp_path: Path) -> None:
    values = full(tmp_path)
    pairs = [(key, value) for key in keys(values) for value in ODD]
    for key, value in random.Random(12).sample(pairs, NUM_TRIED):
        config, problems = validate(RunConfig, with_value(values, key, value))
        if config is not None:
            problems = check_report.problems(config)
        assert not any(" raises " in problem for problem in problems), (key, value, problems)
        assert all(char.isprintable() or char == "\n" for char in listed(problems)), (key, value)
        if config is not None and not problems:
            assert check_report.report(config, config.gpu_gb)[0]


def test_of_many_unknown_keys_only_some_are_reported(tmp_path: Path) -> None:
    """Searching the nearest known key of 20,000 unknown ones took a minute."""
    many = {f"prompts_per_iteratio{n}": n for n in range(20_000)}
    file = tiny_config.write(tmp_path, {**tiny_config.nothing(tmp_path), **many})
    assert len(tiny_config.problems_of(file)) < 200


@pytest.mark.parametrize("folder", ["/dev/zero", "/dev/null/runs", "x" * 300, "p/" * 3000])
def test_an_impossible_run_folder_is_reported(tmp_path: Path, folder: str) -> None:
    values = tiny_config.real(tmp_path, base_exp_dir=folder)
    [problem] = check_report.problems(tiny_config.validated(values))
    assert problem.startswith("base_exp_dir: ") and len(problem) < 500
