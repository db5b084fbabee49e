"""The checkpoint of another run whose adapter a policy starts from (`policy.from_run`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rl.checkpoints.checkpoint import MODEL_FOLDER, held_out_rewards, model_folder, read_state
from rl.model_files import ADAPTER_CONFIG
from rl.printing import excerpt

BASE = ("model_path", "revision", "init_text_encoder_from", "text_encoder_subfolder")
"""Keys of a policy's section that name its base model."""
SHAPE = ("lora.r", "lora.alpha", "lora.target_modules")


@dataclass(frozen=True)
class Start:
    """A checkpoint with an adapter."""

    step: Path
    iterations: int
    policy: Mapping[str, Any]
    """The policy section of the run that wrote it."""

    def __str__(self) -> str:
        reward = held_out_rewards(self.step.parent.parent).get(self.iterations)
        score = "" if reward is None else f", held-out reward {reward:.3f}"
        return f"{self.step} after {self.iterations} iterations{score}"


def start_of(run: str) -> Start:
    """The newest intact checkpoint of a run folder, or the checkpoint that `run` names. Raises
    ValueError, with the remedy, if there is none or it holds no adapter."""
    shown = excerpt(repr(run), 300)
    if not Path(run).is_dir():
        raise ValueError(f"{shown} is no folder; name a run folder or one of its checkpoints")
    model = model_folder(Path(run))
    step = model.parent
    if model.name != MODEL_FOLDER or not (step / "state.json").is_file():
        raise ValueError(f"{shown} has no checkpoint; name a run that has saved one")
    if not (model / ADAPTER_CONFIG).is_file():
        raise ValueError(
            f"{step} holds a whole model, no adapter; start from it with policy.model_path={model}"
        )
    state = read_state(step)
    config = state["meta"].get("config")
    policy = config.get("policy") if isinstance(config, Mapping) else None
    if not isinstance(policy, Mapping):
        raise ValueError(f"{step} is damaged: its state.json names no policy")
    return Start(step, state["iteration"], policy)


def differences(start: Start, config: BaseModel) -> list[str]:
    """'key: why' for each key that makes the policy of the section `config` another model than the
    start's. Raises ValueError (pydantic's) if this version cannot read the start's section."""
    ours, theirs = config.model_dump(), dict(start.policy)
    keys: tuple[str, ...] = ("type",)
    if theirs.get("type") == ours.get("type"):
        theirs = type(config).model_validate(theirs).model_dump()
        keys = BASE + SHAPE
    for section in (ours, theirs):
        section |= {f"lora.{name}": value for name, value in (section.get("lora") or {}).items()}
    return [
        f"{key}: {excerpt(repr(ours.get(key)), 200)} given, but the adapter of from_run was "
        f"trained with {excerpt(repr(theirs.get(key)), 200)}; make them equal"
        for key in keys
        if _comparable(ours.get(key)) != _comparable(theirs.get(key))
    ]


def _comparable(value: object) -> object:
    """The same for all names of a folder, and for a list's items in any order."""
    if isinstance(value, str) and Path(value).exists():
        return Path(value).resolve()
    return set(map(str, value)) if isinstance(value, list | tuple) else value
