"""The shipped policies, and which of them loads a model, by what its files say of themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl import build
from rl.api import find
from rl.files.atomic import row_of
from rl.policies.shared.loading import local_folder
from rl.policies.shared.policy import TrainedPolicy
from rl.record import adapter_base

DEFAULT = "qwen2_5_vl"
"""Where no file tells."""


def policies() -> dict[str, type[TrainedPolicy[Any]]]:
    """Type -> plug."""
    found = {}
    for name in build.plugs_of("policies"):
        module, _ = find.import_plug(build.module_of("policies", name))
        [plug] = find.plugs_in(module, build.ROOMS["policies"])
        assert issubclass(plug, TrainedPolicy)
        found[name] = plug
    return found


def of_model(path: str, revision: str | None = None) -> str | None:
    """Type of a folder's or hub id's model by its config.json, which is fetched where need be; None
    where that does not tell."""
    try:
        file = local_folder(path, revision, ["config.json"]) / "config.json"
        kind = (row_of(file.read_bytes()) or {}).get("model_type")
    except (OSError, ValueError):  # loading it will say what is wrong
        return None
    return _first(lambda plug: isinstance(kind, str) and kind in plug.model_types)


def of_folder(model: Path, base: str | None = None) -> str:
    """The same of what a run left, where its config is not beside it: as the adapter's config says
    it, or that of its base (or `base`), or of the whole model itself; else `DEFAULT`."""
    if not (model / adapter_base.ADAPTER_CONFIG).is_file():
        return of_model(str(model)) or DEFAULT
    noted = adapter_base.read_config(model)
    model_class = adapter_base.model_class_of(noted)
    named = _first(lambda plug: model_class in plug.model_classes)
    path = base or noted.get(adapter_base.NAME)
    if named is None and isinstance(path, str):
        named = of_model(path)
    return named or DEFAULT


def _first(fits: Callable[[type[TrainedPolicy[Any]]], bool]) -> str | None:
    return next((name for name, plug in policies().items() if fits(plug)), None)
