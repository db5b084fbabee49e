"""Expected errors become a message without traceback; unexpected ones keep their traceback."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from tiny_messages import holds

from rl import build
from rl.config.schema import ConfigError, load_config
from rl.judge.http import resolve_api_base
from rl.ranks.dist import Dist
from rl.ranks.signals import sentence


def message_of(call: Callable[[], object]) -> str | None:
    with pytest.raises(Exception) as caught:
        call()
    return sentence(caught.value)


def test_an_error_that_the_package_raises_becomes_a_message() -> None:
    assert holds(message_of(lambda: resolve_api_base("")), "judge.api_base ... empty")


def test_each_problem_of_a_config_is_a_line_of_the_message() -> None:
    own = Mock(side_effect=ConfigError(["a: wrong", "b: wrong too"]))
    assert message_of(own) is None, "it was raised in the test, not in the package"
    text = message_of(lambda: load_config("missing.jsonnet"))
    assert text is not None and text.splitlines()[1].startswith("  - missing.jsonnet: ")


def test_a_model_that_cannot_be_loaded_is_named_by_its_key() -> None:
    overrides = ["run_name=x", "renderer.model_path=nobody/knows"]
    config = load_config(Path(__file__).parents[2] / "configs" / "quickstart.jsonnet", overrides)
    text = message_of(lambda: build.build_renderer(build.resolve(config), Dist.from_env()))
    assert holds(text, "renderer: qwen_image_edit ... files ... nobody")


def test_out_of_memory_names_the_keys_to_lower() -> None:
    assert holds(sentence(MemoryError()), "no memory")
    text = sentence(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert holds(text, "Tried to allocate 2.00 ... optimizer.max_tokens_per_micro_batch")


def test_an_unexpected_error_keeps_its_traceback() -> None:
    assert message_of(lambda: int("x")) is None, "raised by Python"
    assert message_of(lambda: resolve_api_base(3)) is None, "a bug: the package itself fails"  # type: ignore[arg-type]
    assert sentence(ValueError("never raised")) is None


@pytest.mark.slow
def test_a_rank_started_without_the_launcher_prints_the_message_too(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "rl.train", str(tmp_path / "none.jsonnet")],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    assert result.returncode == 1
    assert "none.jsonnet: " in result.stderr and "Traceback" not in result.stderr
