"""A read-only fixture that many tests share: the folder of a finished run."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_loop


@pytest.fixture(scope="session")
def uninterrupted(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of `tiny_loop.config_of` that nothing interrupted."""
    return tiny_loop.run_once(tmp_path_factory, "uninterrupted", models)
