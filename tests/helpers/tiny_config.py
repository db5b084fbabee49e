"""Small configs for tests of loading, checking and launching, and shipped ones with changes.

`real` names shipped plugins and hub ids, so that no model is needed; `nothing` names plugins that
do nothing, for the launcher.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rl.config.loading import validate
from rl.config.schema import ConfigError, RunConfig, load_config

REPO = Path(__file__).resolve().parents[2]
WEIGHTS = REPO / "tiny_world/weights"
SHIPPED = [path.stem for path in sorted((REPO / "configs").glob("*.jsonnet"))]
DISTINCT = [
    name
    for name in SHIPPED
    if not name.endswith("_control") and (name == "sft_s__rl_sc" or not name.startswith("sft"))
]
"""Without controls, which only shuffle rewards, and with only one of EARL's ten."""
ENVIRONMENT = {
    "APP__BASE_EXP_DIR": "runs",
    "APP__RUN_NAME": "mine",
    "APP__REWARD_FUNCTION_API_BASE": "http://judge:4877",
    "APP__DATA_DIR": "nowhere",
}


@cache
def evaluated(name: str, *overrides: str) -> RunConfig:
    """A shipped config, with the values that its Jsonnet derives from the overrides."""
    return load_config(f"configs/{name}.jsonnet", overrides, ENVIRONMENT)


def changed(values: dict[str, Any], *changes: str) -> dict[str, Any]:
    """The values with 'key=value' changes, the value JSON or a string."""
    for change in changes:
        key, _, value = change.partition("=")
        *sections, last = key.split(".")
        section = values
        for part in sections:
            is_list = isinstance(section, list)
            section = section[int(part)] if is_list else section.setdefault(part, {})
        try:
            section[last] = json.loads(value)
        except ValueError:
            section[last] = value
    return values


def shipped(name: str, *changes: str) -> RunConfig:
    """A shipped config with changes. Derived values stay, as evaluating the Jsonnet again would
    take a fifth of a second."""
    return RunConfig.model_validate_json(
        json.dumps(changed(evaluated(name).model_dump(), *changes))
    )


def validated(values: dict[str, Any]) -> RunConfig:
    """As `load_config` of a file with these values, but without the slow Jsonnet."""
    config, wrong = validate(RunConfig, json.loads(json.dumps(values, sort_keys=True)))
    if config is None:
        raise ConfigError(wrong)
    return config


def problems_of(
    path: str | Path, *overrides: str, env: Mapping[str, str] | None = None
) -> list[str]:
    """Why a config is refused when it is loaded."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, env or {})
    return list(caught.value.problems)


def write(folder: Path, values: dict[str, Any], name: str = "run.jsonnet") -> Path:
    path = folder / name
    path.write_text(json.dumps(values, indent=1))
    return path


def cache_config(cache: Path, hub_id: str, text: str) -> Path:
    """Writes the config.json of a model into a cache of the hub's layout."""
    repository = cache / f"models--{hub_id.replace('/', '--')}"
    file = repository / "snapshots" / "c0ffee" / "config.json"
    for folder in (file.parent, repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("c0ffee")
    file.write_text(text)
    return file


def nothing(folder: Path, **changes: Any) -> dict[str, Any]:
    plugin = {"type": "tiny_plugins.nothing"}
    return {
        "run_name": "tiny",
        "base_exp_dir": str(folder / "runs"),
        "num_iterations": 3,
        "prompts_per_iteration": 4,
        "generations_per_prompt": 2,
        "policy": plugin,
        "engine": plugin,
        "renderer": plugin,
        "rewards": {"one": plugin},
        "data": {"train": [plugin]},
    } | changes


def real(folder: Path, **changes: Any) -> dict[str, Any]:
    """A config without problems; writes its data file and picture."""
    Image.new("RGB", (32, 32), "red").save(folder / "red.png")
    row = json.dumps({"image": "red.png", "instruction": "paint it blue"})
    (folder / "train.jsonl").write_text(row + "\n" + row.replace("blue", "green") + "\n")
    values = {
        "policy": {"type": "qwen2_5_vl", "model_path": "Qwen/Qwen2.5-VL-7B-Instruct"},
        "engine": {"type": "vllm"},
        "renderer": {"type": "qwen_image_edit"},
        "rewards": {"vie": {"type": "viescore"}},
        "judge": {"api_base": "http://127.0.0.1:4877"},
        "data": {"train": [{"type": "edit_jsonl", "path": str(folder / "train.jsonl")}]},
    }
    return nothing(folder) | values | changes


def save_checkpoint(config: RunConfig, iteration: int) -> None:
    """Writes the files of a checkpoint that a check reads."""
    folder = config.run_dir / "checkpoints" / f"step_{iteration:06d}"
    folder.mkdir(parents=True)
    meta = {"config": config.model_dump(mode="json")}
    text = json.dumps({"iteration": iteration, "world_size": 1, "meta": meta})
    (folder / "state.json").write_text(text)
    manifest = {"state.json": {"size": len(text), "sha256": "unchecked here"}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
