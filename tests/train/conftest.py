"""Read-only fixtures that many tests share: tiny models and the folder of a finished run."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_loop


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Role ('policy', 'editor') -> folder of a model with random weights."""
    folder = tiny_loop.made_once(tmp_path_factory, "models", tiny_loop.save_models)
    return {"policy": str(folder / "policy"), "editor": str(folder / "editor")}


@pytest.fixture(scope="session")
def uninterrupted(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of `tiny_loop.config_of` that nothing interrupted."""
    return tiny_loop.run_once(tmp_path_factory, "uninterrupted", models)
