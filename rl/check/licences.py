"""The licence of every model of a run, and which of them do not allow commercial use."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.build import Plugin, Resolved
from rl.model_files import licence_of

SEE_CARD = "see its card"
"""Stands for an unknown licence, or for unknown terms of commercial use."""
COMMERCIAL = {"apache-2.0", "mit", "bsd-2-clause", "bsd-3-clause", "cc0-1.0"}
"""Licences on a model's card that allow commercial use."""
ADAPTERS = ("adapter_path", "lora_path")
"""Keys of plugins' sections that name an adapter."""


def known_models() -> list[dict[str, str]]:
    """The rows of `known_models.tsv` as column -> value; docs/models.md shows the same table."""
    file = Path(__file__).with_name("known_models.tsv")
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))


@dataclass(frozen=True)
class Licence:
    """The licence of one model of a run."""

    key: str
    """The config key that names the model, e.g. 'renderer.model_path'."""
    model: str
    """Hub id or folder, or the name that is sent to a judge."""
    name: str
    """The licence's name, or `SEE_CARD`."""
    use: str
    """Whether the licence allows commercial use: 'yes', 'no' or `SEE_CARD`."""

    @property
    def text(self) -> str:
        """What a user reads, e.g. 'Qwen Research License, not for commercial use'."""
        uses = {"yes": "", "no": ", not for commercial use"}
        return self.name + ("" if self.name == SEE_CARD else uses.get(self.use, f", {SEE_CARD}"))


def licences(resolved: Resolved) -> list[Licence]:
    """The licences of the run's models, in the order of the config: from `known_models.tsv`, else
    from the README.md in the model's folder or in the hub's cache."""
    known = {row["id"]: row for row in known_models()}
    return [_licence(key, model, known) for key, model in dict.fromkeys(_models(resolved))]


def licence_problems(resolved: Resolved) -> Iterator[str]:
    """'key: why, remedy' for each model that the config's `license` does not allow."""
    config = resolved.config
    for part in licences(resolved) if config.license == "commercial" else []:
        if part.use != "yes" and part.model not in config.licensed_models:
            yield (
                f"{part.key}: {part.model!r} (licence: {part.text}), but license is 'commercial'; "
                "take a model of docs/models.md that allows it or, if this one's owner allows you "
                "this use, name it in licensed_models"
            )


def _models(resolved: Resolved) -> Iterator[tuple[str, str]]:
    """(config key, model) of each model. A plugin that runs a model without naming it, or calls a
    service, counts as the model itself."""
    plugins: list[Plugin[Any]] = [resolved.policy, resolved.renderer, *resolved.rewards.values()]
    for plugin in plugins:
        paths = {model.key: model.path for model in plugin.cls.models(plugin.config)}
        paths |= {key: getattr(plugin.config, key, "") for key in ADAPTERS}
        for key, path in paths.items():
            if path:
                yield f"{plugin.key}.{key}", path
        is_opaque = getattr(plugin.cls, "makes_images", getattr(plugin.cls, "runs_model", True))
        if is_opaque and not any(paths.values()):
            yield f"{plugin.key}.type", plugin.name
    for key, part in resolved.by_judge.items():
        if part.needs_judge:
            yield f"{key}.model", part.config.judge.model


def _licence(key: str, model: str, known: Mapping[str, Mapping[str, str]]) -> Licence:
    if row := known.get(model):
        return Licence(key, model, row["licence"], row["commercial use"])
    licence, name = licence_of(model)
    if name == "unknown":
        return Licence(key, model, SEE_CARD, SEE_CARD)
    use = "yes" if licence.lower() in COMMERCIAL else SEE_CARD
    return Licence(key, model, name or licence, use)
