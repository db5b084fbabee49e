"""One process downloads the hub's models before the ranks start."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import tiny_config
from tiny_faulty_judge import MODEL, FaultyJudge
from tiny_messages import holds, refusal

from rl import build, simple_launch
from rl.check import check_report
from rl.check.this_machine import fetch_small_files, fetch_weights

QWEN, EDIT = "Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen-Image-Edit"
OLDER = "Qwen/Qwen2-VL-7B-Instruct"


def fetch_models(resolved: build.Resolved) -> list[str]:
    return fetch_small_files(resolved) or fetch_weights(resolved)


def has_weights(patterns: Mapping[str, Sequence[str]]) -> bool:
    return any("safetensors" in name for names in patterns.values() for name in names)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Hub id -> requested file patterns; the download of the weights of `EDIT` fails."""
    patterns: dict[str, list[str]] = defaultdict(list)

    def snapshot_download(path: str, **options: Any) -> None:
        patterns[path] += options["allow_patterns"]
        if path == EDIT and "*.json" not in options["allow_patterns"]:
            raise ConnectionError("401 gated")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    return patterns


def test_files_that_are_read_are_fetched_and_failures_named(fetched, monkeypatch) -> None:
    resolved = build.resolve(tiny_config.shipped("qwen_image_edit"))
    [problem] = fetch_models(resolved)
    assert holds(problem, f"renderer.model_path: {EDIT} ... 401 gated ... HF_TOKEN")
    shard, part = "model-00001-of-00005.safetensors", "diffusion_pytorch_model"
    for path, name, is_read in (
        (QWEN, "merges.txt", True),
        (QWEN, shard, False),  # the editor's copy is read instead
        (EDIT, f"text_encoder/{shard}", True),
        (EDIT, f"transformer/{part}-00001-of-00009.safetensors", True),
        (EDIT, f"transformer/{part}.bin", False),
    ):
        assert any(fnmatch(name, pattern) for pattern in fetched[path]) == is_read, name
    monkeypatch.setattr("rl.check.this_machine._is_cached", lambda model: True)
    assert fetch_models(resolved) == [], "cached models are not fetched"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    fetched.clear()
    assert (fetch_models(resolved), fetched) == ([], {})


def test_a_model_of_another_kind_is_refused_before_any_weights(
    fetched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of the renderer, whose model is the right one, are not fetched, either."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    note = huggingface_hub.snapshot_download

    def snapshot_download(path: str, **options: Any) -> None:
        note(path, **options)
        if path == OLDER:
            tiny_config.cache_config(tmp_path, path, '{"model_type": "qwen2_vl"}')

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    config = tiny_config.shipped("qwen_image_edit", f"policy.model_path={OLDER}")
    [problem] = fetch_models(build.resolve(config))
    assert holds(problem, f"policy.model_path: {OLDER} ... 'qwen2_vl' ... only 'qwen2_5_vl'")
    assert set(fetched) == {OLDER, EDIT} and not has_weights(fetched)


def test_data_and_judge_are_checked_before_models_are_fetched(
    fetched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_report, "START_PATIENCE_S", 0.0)
    monkeypatch.setattr(check_report, "problems", lambda config, with_data: [])
    monkeypatch.setattr("rl.check.this_machine._is_cached", lambda model: False)

    def refusal_of(column: str, judge: dict[str, Any]) -> str:
        local = {"path": str(tmp_path / "train.jsonl"), "columns": {"instruction": column}}
        rows = [{"path": "nobody/data-of-the-hub"}, local] if column == "wrong" else [local]
        data = {"train": [{"type": "hf_dataset"} | section for section in rows]}
        values = tiny_config.real(tmp_path, judge=judge, data=data)
        return refusal(simple_launch.main, [str(tiny_config.write(tmp_path, values))])

    gone = {"api_base": "http://127.0.0.1:9", "model": MODEL, "max_attempts": 1}
    assert holds(refusal_of("wrong", gone), "train.jsonl[train], row 1: has no 'wrong'"), (
        "the local file first"
    )
    assert holds(refusal_of("instruction", gone), "no judge at http://127.0.0.1:9")
    assert not has_weights(fetched)
    with FaultyJudge() as judge:
        gated = refusal_of("instruction", {**gone, "api_base": judge.api_base})
    assert holds(gated, "401 gated") and has_weights(fetched)
