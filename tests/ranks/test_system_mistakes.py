"""Which errors are told in a sentence, and which need their traceback."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_messages import names

from rl import build
from rl.config.schema import ConfigError, load_config
from rl.judge.endpoint import resolve_api_base
from rl.ranks.dist import Dist
from rl.ranks.error_messages import sentence


def told(call: Callable[[], object]) -> str | None:
    with pytest.raises(Exception) as caught:
        call()
    return sentence(caught.value)


def test_what_the_package_raises_is_a_sentence() -> None:
    text = told(lambda: resolve_api_base(""))
    assert names(text, "judge.api_base ... empty")


def test_every_problem_of_a_config_is_a_line() -> None:
    def fail() -> None:
        raise ConfigError(["a: wrong", "b: wrong too"])

    assert told(fail) is None, "raised here, not in the package"
    text = told(lambda: load_config("missing.jsonnet"))
    assert text is not None and text.splitlines()[1].startswith("  - missing.jsonnet: ")


def test_a_model_that_cannot_be_had_is_named_by_its_key() -> None:
    overrides = ["run_name=x", "renderer.model_path=nobody/knows"]
    config = load_config(Path(__file__).parents[2] / "configs" / "quickstart.jsonnet", overrides)
    text = told(lambda: build.build_renderer(build.resolve(config), Dist.from_env()))
    assert names(text, "renderer: qwen_image_edit ... files ... nobody")


def test_memory_that_ends_is_a_sentence_with_what_to_lower() -> None:
    assert names(sentence(MemoryError()), "no memory")
    text = sentence(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert names(text, "Tried to allocate 2.00 ... optimizer.max_tokens_per_micro_batch")


def test_what_nobody_foresaw_keeps_its_traceback() -> None:
    assert told(lambda: int("x")) is None, "raised by Python"
    assert told(lambda: resolve_api_base(3)) is None, "a bug, seen in a frame of the package"  # type: ignore[arg-type]
    assert sentence(ValueError("never raised")) is None


@pytest.mark.slow
def test_a_rank_started_by_hand_says_it_too(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "rl.train", str(tmp_path / "none.jsonnet")],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    assert ended.returncode == 1
    assert "none.jsonnet: " in ended.stderr
    assert "Traceback" not in ended.stderr
