"""Fetches a run's models from the hub before its ranks start: by one process, with a bar."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

from rl.build import Resolved
from rl.preflight.leaving import hub_models, is_offline, models_of

SMALL_FILES = ("*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken")
"""Beside the weights: config, tokenizer, template."""


def fetch_models(resolved: Resolved) -> list[str]:
    """Brings them into the local cache; a file that is missed here is fetched by the rank that
    reads it. Returns what is not there and cannot be fetched, with its key and remedy."""
    if is_offline():
        return []
    patterns: dict[tuple[str, str | None], list[str]] = defaultdict(list)
    for _, model in models_of(resolved):
        stems = [Path(name).stem for name in model.weights]
        weights = [f"{stem}{rest}" for stem in stems for rest in (".safetensors*", "-*-of-*")]
        names = [os.path.join(model.subfolder, name) for name in (*SMALL_FILES, *weights)]
        patterns[model.path, model.revision] += names
    problems = []
    missing = {path: key for key, path, is_cached in hub_models(resolved) if not is_cached}
    for (path, revision), wanted in patterns.items():
        from huggingface_hub import snapshot_download

        try:
            snapshot_download(path, revision=revision, allow_patterns=wanted)
        except Exception as error:  # the network and its library may fail in any way
            if path in missing:
                problems.append(
                    f"{missing[path]}: {path} cannot be fetched ({error}); name another or a "
                    "folder, or fetch it by `hf download` (a gated one needs HF_TOKEN)"
                )
    return problems
