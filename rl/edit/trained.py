"""A trained run made ready for use: its config, with the weights of one checkpoint in it.

What: which weights, where they lie, what of the run's config stands and what does not (its engine,
rewards and data; its devices and kernels, which were another machine's). What not: loading them
(`writer.py`), what is made with them (`editor.py`, `rl/enhance.py`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL.Image import DecompressionBombError

from rl import build
from rl.api import find
from rl.config import formats
from rl.config.messages import validate
from rl.config.schema import ConfigError, RunConfig
from rl.files.atomic import row_of
from rl.files.images import open_picture
from rl.record.adapter_base import ADAPTER_CONFIG
from rl.record.best import held_out_rewards
from rl.record.checkpoint import checkpoint_of, iteration_of, model_folder, too_new
from rl.record.untrusted import shown

UNUSED: dict[str, Any] = {
    "engine": {"type": "transformers"},
    "rewards": {},
    "final_reward": {},
    "data": {"train": []},
    "images_per_completion": 1,
    "algorithm": {},
}
"""What training needed and use does not. Nothing is graded, so neither judge nor rewards load."""
OWN_PLUGS = ("policy", "renderer")
"""Sections whose plugin is imported."""


@dataclass(frozen=True)
class Trained:
    """A run at one of its checkpoints."""

    run_dir: Path
    checkpoint: Path
    """`<run>/checkpoints/step_000200`."""
    iterations: int
    """Done when it was written."""
    held_out_reward: float | None
    """Mean on the run's held-out samples then, 0 to 1; None: not measured."""
    config: RunConfig
    """As it is used."""
    base_policy: Mapping[str, Any]
    """The policy's section as it was before training."""

    def __str__(self) -> str:
        scored = self.held_out_reward
        told = "" if scored is None else f", held-out reward {scored:.3f}"
        return f"{self.run_dir} after {self.iterations} iterations{told}"

    def source_area_px(self) -> int:
        """Of the pictures that the run was trained on, as it recorded them.

        Raises ValueError where it recorded none.
        """
        for file in sorted(self.run_dir.glob("evaluation/it_*/*_source.png")):
            with (
                suppress(OSError, ValueError, DecompressionBombError),
                open_picture(file) as picture,
            ):
                return picture.width * picture.height
        raise ValueError(
            f"{self.run_dir} has recorded no picture that tells the size its policy reads: give "
            "--size, as large as what it was trained on"
        )


def trained(
    run_dir: Path,
    checkpoint: str = "latest",
    settings: Sequence[str] = (),
    device: str = "auto",
    num_steps: int | None = None,
    size_px: tuple[int, ...] = (),
) -> Trained:
    """Read a run folder.

    Args:
        run_dir: as training wrote it.
        checkpoint: 'latest', 'best' on held-out samples, or a number of iterations.
        settings: `key=value` on top of the run's config; a value is JSON, or else words.
        device: 'auto' = CUDA, else the CPU, where all is float32.
        num_steps: the renderer's denoising steps; None: the run's.
        size_px: (width, height), or one number: a square of that side, or where the renderer keeps
            the source's aspect about as many pixels. (): the run's.

    Raises ValueError (ConfigError among them) for what the user can mend, before anything is
    loaded.
    """
    file = run_dir / "config.json"
    if not file.is_file():
        raise ValueError(f"{run_dir} is no run folder: it holds no config.json")
    if problem := too_new(run_dir):
        raise ValueError(problem)
    values = written_config(file) | UNUSED
    step = checkpoint_of(run_dir, checkpoint)
    config = _config(values, file)
    refuse_plugins({room: getattr(config, room) for room in OWN_PLUGS}, file, settings)
    resolved = build.resolve(config)
    for room, plug in (("policy", resolved.policy), ("renderer", resolved.renderer)):
        keys = type(plug.config).model_fields
        values[room] = _elsewhere(values[room], keys, pick_device(device))
        if room == "renderer":
            values[room] |= _drawn(plug.name, keys, num_steps, size_px)
    for setting in settings:
        values = _set(values, setting)
    base = _config(values, file).policy
    values["policy"] = with_weights(base, find_weights(step))
    reward = held_out_rewards(run_dir).get(iteration_of(step))
    return Trained(run_dir, step, iteration_of(step), reward, _config(values, file), base)


def refuse_plugins(
    sections: Mapping[str, Mapping[str, Any]], file: Path, settings: Sequence[str] = ()
) -> None:
    """Raise ValueError for a plugin that a run's config names by its dotted path, unless the user
    names it too, in `settings`: a run folder may be a stranger's, and importing runs code."""
    for room, section in sections.items():
        name = section.get("type")
        if not isinstance(name, str) or not find.is_dotted_path(name):
            continue
        if (setting := f"{room}.type={name}") not in settings:
            raise ValueError(
                f"{file}: {room}.type names {shown(name, 200)}, whose code would run here; if you "
                f"trust it: rl edit --set {shown(setting, 200)}"
            )
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # where `rl train` looks for it too


def _config(values: Mapping[str, Any], file: Path) -> RunConfig:
    config, problems = validate(RunConfig, values)
    if config is None:
        raise ConfigError([f"{file}: {problem}" for problem in problems])
    return config


def _elsewhere(section: Mapping[str, Any], keys: Container[str], device: str) -> dict[str, Any]:
    """A plug's section on another machine than the run's, whose devices and kernels are not here.
    `keys`: those that it knows."""
    own = dict.fromkeys(("device", "attn_implementation", "attention_backend"), "auto")
    if device == "cpu":
        own["dtype"] = pick_dtype(device)
    moved = {**section, **{name: value for name, value in own.items() if name in keys}}
    moved.pop("max_memory_gb", None)
    return moved


def _drawn(
    renderer: str, keys: Container[str], num_steps: int | None, size_px: tuple[int, ...]
) -> dict[str, Any]:
    """The renderer's keys for steps and size. Raises ValueError where it has none."""
    drawn: dict[str, Any] = {}
    if num_steps is not None:
        if "num_steps" not in keys:
            raise ValueError(f"renderer {renderer!r} draws in one go: it takes no --steps")
        drawn["num_steps"] = num_steps
    if len(size_px) == 1 and "output_area_px" in keys:
        drawn |= {"output_area_px": size_px[0] ** 2, "width_px": None, "height_px": None}
    elif size_px and "width_px" in keys:
        drawn |= {"width_px": size_px[0], "height_px": size_px[-1]}
    return drawn


def pick_device(asked: str = "auto") -> str:
    """'cuda:0' or 'cpu' for 'auto'; else as asked."""
    import torch

    if asked != "auto":
        return asked
    return "cuda:0" if torch.cuda.is_available() else "cpu"


def pick_dtype(device: str) -> str:
    """bfloat16 where it is fast, float32 on the CPU."""
    return "float32" if device == "cpu" else "bfloat16"


def written_config(file: Path) -> dict[str, Any]:
    """A run's `config.json`. Raises ValueError for one that is damaged, or of another format."""
    if (written := row_of(file.read_bytes())) is None:
        raise ValueError(f"{file} is damaged: it holds no config; copy it from a backup")
    return formats.stored(written, str(file))


def find_weights(path: Path) -> Path:
    """Its `model` folder, or itself. Raises ValueError when no weights lie there."""
    folder = model_folder(path)
    if not any((folder / file).is_file() for file in (ADAPTER_CONFIG, "config.json")):
        raise ValueError(
            f"{folder} holds neither {ADAPTER_CONFIG} nor config.json; give a run, a checkpoint, "
            "or a checkpoint's 'model' folder"
        )
    return folder


def with_weights(section: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A run's policy section, with what a checkpoint's `model` folder holds: a whole model takes
    the base's place, an adapter lies on it."""
    if (folder / ADAPTER_CONFIG).is_file():
        return {**section, "adapter_path": str(folder)}
    keys = ("revision", "init_text_encoder_from", "text_encoder_subfolder", "adapter_path")
    kept = {key: value for key, value in section.items() if key not in keys}
    return {**kept, "model_path": str(folder), "lora": None}


def _set(values: Mapping[str, Any], setting: str) -> dict[str, Any]:
    """The config with one `a.b=value` in it. Raises ValueError for anything else."""
    key, equals, text = setting.partition("=")
    names = key.split(".")
    if not equals or not all(names):
        raise ValueError(f"setting {setting!r}: write key.sub=value, renderer.num_steps=8")
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    changed = dict(values)
    inner = changed
    for name in names[:-1]:
        below = inner.get(name, {})
        if not isinstance(below, Mapping):
            raise ValueError(f"setting {setting!r}: {name} is a plain value, not a section")
        inner[name] = dict(below)
        inner = inner[name]
    inner[names[-1]] = value
    return changed
