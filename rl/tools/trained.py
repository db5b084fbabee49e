"""Finds trained weights, or an untrained policy, and adapts their config for this machine."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from PIL.Image import DecompressionBombError
from pydantic import BaseModel

from rl import build
from rl.api.renderer import Renderer
from rl.config import loading
from rl.config.loading import evaluate, is_dotted_path, validate
from rl.config.schema import ConfigError, RunConfig, load_config
from rl.files import open_picture, read_object
from rl.model_files import ADAPTER_CONFIG, is_hub_id, read_config
from rl.policies.policy_base import ADAPTER_KEYS
from rl.printing import excerpt
from rl.record.checkpoint import checkpoint_of, model_folder, read_state, rows_of
from rl.record.publish import at
from rl.record.run_summary import not_a_run

UNUSED: dict[str, Any] = {
    "engine": {"type": "transformers"},
    "rewards": {},
    "final_reward": {},
    "data": {"train": []},
    "render_pool": {},
    "images_per_completion": 1,
    "algorithm": {},
}
"""Sections that only training needs. Nothing is graded, so neither judge nor rewards load."""
READ = ("policy", "renderer", "engine", "sampling", "evaluation")
"""Sections that settings may change where nothing is graded."""
WITHOUT_TEMPLATE = ("sd3", "diffusers", "images_api")
"""Renderers that read words and leave the prompt to the policy."""
OF_AN_ENDPOINT = {"api_base": "URL", "start_command": "[]", "api_key_env": "''"}
"""Keys that decide who gets the data and which secret, with what to write in their place."""
ENVIRONMENT = {
    "APP__RUN_NAME": "untrained",
    "APP__BASE_EXP_DIR": "runs",
    "APP__DATA_DIR": "data",
    "APP__REWARD_FUNCTION_API_BASE": "none",
}
"""Variables that shipped configs read, where the user has not set them: only training needs most of
them, and an empty judge.api_base is reported where a judge is asked."""


@dataclass(frozen=True)
class Trained:
    """The weights of a checkpoint, or an untrained policy, and what is known about the run."""

    model: Path
    """A PEFT folder, or the folder of a whole model."""
    is_adapter: bool
    config: Mapping[str, Any]
    """The run's config, with the current names of keys."""
    run_dir: Path | None = None
    """The run's folder; None if it holds no record of the training."""
    iterations: int = 0
    """Iterations finished when the checkpoint was written."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The scalars of that iteration, as far as the checkpoint or the run's metrics have them."""
    file: str = ""
    """The user's config file, if `config` is from there."""
    trusted: bool = False
    """Whether plugins and a judge that `config` names may get the user's data; else it may be a
    stranger's."""
    untrained: bool = False
    """The policy as `config` has it; there is no `model`."""

    @property
    def name(self) -> str:
        """Where it is from."""
        return self.file or str(self.run_dir or self.model)

    def __str__(self) -> str:
        if not self.iterations:
            return f"{self.name}, {'untrained' if self.untrained else self.model}"
        reward = self.metrics.get("eval/reward")
        reward_text = "" if reward is None else f", held-out reward {reward:.3f}"
        return f"{self.name} after {self.iterations} iterations{reward_text}"

    def policy(self) -> dict[str, Any]:
        """The run's policy section with these weights: a whole model replaces the base model, an
        adapter is added to it."""
        section: Mapping[str, Any] = self.config["policy"]
        if self.untrained:
            return {**section}
        if self.is_adapter:
            return {**section, "adapter_path": str(self.model)}
        keys = ("revision", "init_text_encoder_from", "adapter_path")
        kept = {key: value for key, value in section.items() if key not in keys}
        return {**kept, "model_path": str(self.model), "lora": None}

    def source_area_px(self) -> int:
        """Area of the source pictures that the run was trained on, from one that it recorded.

        Raises ValueError if it recorded none.
        """
        folder = self.run_dir or self.model
        for file in sorted(folder.glob("evaluation/it_*/*_source.png")):
            with (
                suppress(OSError, ValueError, DecompressionBombError),
                open_picture(file) as picture,
            ):
                return picture.width * picture.height
        raise ValueError(
            f"{self.name} has no recorded picture, so the picture size is unknown: give "
            "--size, as large as the pictures that it was trained on"
        )


def load_trained(source: Path, checkpoint: str = "latest") -> Trained:
    """The weights in a run folder, in one of its checkpoints, or in a checkpoint's `model` folder.

    Args:
        source: that folder.
        checkpoint: for a run folder: 'latest' (the newest complete one), 'best' on held-out
            samples, or a number of iterations.

    Raises ValueError for problems that the user can fix.
    """
    if not source.is_dir():
        raise ValueError(not_a_run(source))
    model = model_folder(source if checkpoint == "latest" else checkpoint_of(source, checkpoint))
    is_adapter = (model / ADAPTER_CONFIG).is_file()
    step = model.resolve().parent
    if not (is_adapter or (model / "config.json").is_file()) or not (step / "state.json").is_file():
        raise ValueError(
            f"{model} belongs to no run: it needs an {ADAPTER_CONFIG} or config.json, and a "
            "state.json beside it, which says how it was trained; name a run folder, or one of its "
            "checkpoints/step_*"
        )
    state = read_state(step, loading.CHANGED_OUTPUT)
    run_dir = source if (source / "checkpoints").is_dir() else step.parent.parent
    file = run_dir / "config.json"
    config = state["meta"].get("config")
    if file.exists():
        if (stored := read_object(file)) is None:
            raise ValueError(f"{file} is damaged: it holds no config; copy it from a backup")
        config = loading.stored(stored, str(file), loading.CHANGED_OUTPUT)
    if not isinstance(at(config, "policy.type"), str):
        raise ValueError(f"{step} is damaged: its run's config names no policy")
    saved = state["meta"].get("metrics")
    metrics = saved if isinstance(saved, Mapping) else {}
    metrics = {**metrics, **rows_of(run_dir).get(state["iteration"], {})}
    return Trained(
        model,
        is_adapter,
        config,
        run_dir if (run_dir / "metrics.jsonl").is_file() else None,
        state["iteration"],
        {
            name: value
            for name, value in metrics.items()
            if isinstance(value, int | float) and math.isfinite(value)
        },
    )


def from_config(file: str, overrides: Sequence[str] = (), adapter: str = "") -> Trained:
    """The untrained policy of the user's own config, or a published adapter of it.

    Args:
        file: the config.
        overrides: `key=value` changes of it.
        adapter: a PEFT folder, a run or one of its checkpoints, or a hub id; '': none.

    Raises ValueError (also ConfigError) for problems that the user can fix.
    """
    if os.getcwd() not in sys.path:  # a plugin beside the config, as in `rl train`
        sys.path.append(os.getcwd())
    config = load_config(file, overrides, {**ENVIRONMENT, **os.environ}).model_dump(mode="json")
    if not adapter:
        return Trained(Path(), False, config, file=file, trusted=True, untrained=True)
    model = _adapter_folder(adapter)
    step, saved = model.parent, read_config(model)
    iterations = read_state(step)["iteration"] if (step / "state.json").is_file() else 0
    lora = {key: saved[name] for key, name in ADAPTER_KEYS.items() if name in saved}
    config["policy"]["lora"] = {**(config["policy"].get("lora") or {}), **lora}
    return Trained(model, True, config, iterations=iterations, file=file, trusted=True)


def load(source: str, is_config: bool, checkpoint: str = "", adapter: str = "") -> Trained:
    """A run's weights, or a config's policy (`from_config`). `checkpoint`: '': the latest. Raises
    ValueError, also for an option that does not apply."""
    if is_config and checkpoint:
        raise ValueError(f"--checkpoint {checkpoint} is for a run, and {source} is a config")
    if adapter and not is_config:
        raise ValueError(f"--adapter {adapter} is for a config, and {source} is a run")
    if is_config:
        return from_config(source, adapter=adapter)
    return load_trained(Path(source), checkpoint or "latest")


def _adapter_folder(adapter: str) -> Path:
    if Path(adapter).is_dir():
        folder = model_folder(Path(adapter))
    elif "/" in adapter and is_hub_id(adapter):
        from huggingface_hub import snapshot_download

        try:
            folder = Path(
                snapshot_download(adapter, allow_patterns=["adapter_*"])  # nosec B615 # the newest
            )
        except Exception as error:  # the network or the library may raise anything
            raise ValueError(
                f"--adapter {adapter} cannot be fetched ({error}); fetch it by `hf download` (a "
                "private one needs HF_TOKEN), or name a folder"
            ) from error
    else:
        raise ValueError(f"--adapter {adapter}: no folder here, and not a hub id 'owner/name'")
    if not (folder / ADAPTER_CONFIG).is_file():
        raise ValueError(f"--adapter {adapter} holds no {ADAPTER_CONFIG}: it is no PEFT adapter")
    return folder


def config_for_use(
    trained: Trained,
    settings: Sequence[str] = (),
    device: str = "auto",
    num_steps: int | None = None,
    size_px: tuple[int, ...] = (),
    only_words: bool = False,
    replaced: Mapping[str, Any] = UNUSED,
    read: Sequence[str] = READ,
) -> tuple[RunConfig, Mapping[str, Any]]:
    """The run's config with the trained weights, and its policy section without them.

    Args:
        trained: the weights and their run.
        settings: `key=value` overrides of the run's config, as `rl train` takes them.
        device: 'auto' = CUDA if available, else the CPU. On the CPU everything is float32.
        num_steps: the renderer's denoising steps; None: the run's.
        size_px: (width, height); or (side,): a square, or about as many pixels in the source's
            aspect ratio if the renderer keeps that; or (): the run's size.
        only_words: nothing will be drawn.
        replaced: sections in place of the run's.
        read: sections that settings may change.

    Raises ValueError (also ConfigError) for problems that the user can fix, before anything loads.
    """
    where = trained.name
    values = {**trained.config, **replaced}
    if only_words and (values.get("renderer") or {}).get("type") in WITHOUT_TEMPLATE:
        values["renderer"] = {"type": "none"}  # its files or key may be missing
    config = config_of(values, where)
    for key in ("policy.type", "renderer.type", "renderer.pipeline"):
        section, _, field = key.partition(".")
        name = getattr(config, section).get(field)
        option = f"--policy {name}" if section == "policy" else f"--set {key}={name}"
        is_trusted = f"{key}={name}" in settings or trained.trusted
        require_trusted(name, is_trusted, f"{where}: {key}", f"rl edit {option}")
    resolved = build.resolve(config)
    require_own(trained, "renderer", resolved.renderer.config, settings)
    # This machine may lack the run's devices.
    local_values = {"device": "auto"}
    if pick_device(device) == "cpu":
        local_values["dtype"] = "float32"
    plugins: list[build.Plugin[Any]] = [resolved.policy, *resolved.model_runners]
    values["rewards"] = {**values["rewards"]}
    for plugin in plugins:
        keys = type(plugin.config).model_fields
        supported = {key: value for key, value in local_values.items() if key in keys}
        holder, _, name = plugin.key.rpartition(".")
        sections = values[holder] if holder else values
        sections[name] = {**sections[name], **supported}
        sections[name].pop("max_memory_gb", None)
    values["renderer"] |= _renderer_overrides(resolved.renderer, num_steps, size_px)
    if settings:
        changed, problems = evaluate(Path(where), settings, os.environ, values)
        if changed is None or problems:
            raise ConfigError(problems)
        values = changed
    for setting in settings:
        if re.split("[.=]", setting)[0] not in read:
            raise ValueError(
                f"setting {setting!r} has no effect here: only {', '.join(read)}; see --seed"
            )
    base = config_of(values, where).policy
    policy = replace(trained, config={"policy": base}).policy()
    return config_of({**values, "policy": policy}, where), base


def require_trusted(name: object, is_trusted: bool, key: str, command: str) -> None:
    """Raises ValueError for a plugin that a run's config names by its dotted path, unless the user
    trusts it: a run folder may come from a stranger, and importing a plugin runs its code. A
    trusted one may be in the working folder, as in `rl train`. `command`: names it as trusted."""
    if not isinstance(name, str) or not is_dotted_path(name):
        return
    if not is_trusted:
        raise ValueError(
            f"{key} names {excerpt(name, 200)}, whose code would run here; if you trust it: "
            f"{excerpt(command, 200)}"
        )
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def require_own(trained: Trained, key: str, section: BaseModel, settings: Sequence[str]) -> None:
    """Raises ValueError if the section `key` of a run that may be a stranger's names an endpoint or
    its secret, and no setting names another."""
    stated = {setting.partition("=")[0].strip() for setting in settings}
    own = {name: getattr(section, name, None) for name in OF_AN_ENDPOINT}
    foreign = [name for name in own if own[name] and f"{key}.{name}" not in stated]
    if foreign and not trained.trusted:
        what = ", ".join(f"{name} {own[name]}" for name in foreign)
        remedy = " ".join(f"--set {key}.{name}={OF_AN_ENDPOINT[name]}" for name in foreign)
        raise ValueError(
            f"{trained.name}: {key} is the run's ({excerpt(what, 300)}), and would get your data: "
            f"name your own: {remedy} (rl eval: or --trust, if the run is yours)"
        )


def config_of(values: Mapping[str, Any], where: str) -> RunConfig:
    """Raises ConfigError; `where`: whose values they are."""
    config, problems = validate(RunConfig, values)
    if config is None:
        raise ConfigError([f"{where}: {problem}" for problem in problems])
    return config


def _renderer_overrides(
    renderer: build.Plugin[Renderer], num_steps: int | None, size_px: tuple[int, ...]
) -> dict[str, Any]:
    """The renderer's keys for steps and size. Raises ValueError if it takes no steps."""
    keys = type(renderer.config).model_fields
    overrides: dict[str, Any] = {}
    if num_steps is not None:
        if "num_steps" not in keys:
            raise ValueError(f"renderer {renderer.name!r} has no steps: --steps is invalid")
        overrides["num_steps"] = num_steps
    if len(size_px) == 1 and "output_area_px" in keys:
        overrides |= {"output_area_px": size_px[0] ** 2, "width_px": None, "height_px": None}
    elif size_px and "width_px" in keys:
        overrides |= {"width_px": size_px[0], "height_px": size_px[-1]}
    return overrides


def pick_device(device: str = "auto") -> str:
    """'cuda:0' or 'cpu' for 'auto'; else `device`. Raises ValueError if this machine lacks it. From
    now on, convolutions use no TF32, as on a run's ranks."""
    import torch

    torch.backends.cudnn.allow_tf32 = False
    if device == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"--device {device} cannot be used: {reason}; try --device cpu") from error
    return device
