"""A folder with another model, or an incomplete one, is refused before anything is loaded."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_config
from tiny_messages import holds

from rl import build
from rl.api.plugin import ModelFiles
from rl.check import check_report
from rl.model_files import model_problems

SECTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "policy": ("policies", {"type": "qwen2_5_vl"}),
    "emu3": ("policies", {"type": "emu3"}),
    "editor": ("renderers", {"type": "qwen_image_edit"}),
    "sd3": ("renderers", {"type": "sd3", "use_t5": False}),
    "emu3_vq": ("renderers", {"type": "emu3_vq"}),
    "clip": ("rewards", {"type": "clip"}),
}
"""Folder of the tiny world -> (plugin directory, config section that loads it)."""


def models(directory: str, section: dict[str, Any]) -> Sequence[ModelFiles]:
    plugin, problems = build.find_plugin(directory, directory, section)
    assert plugin is not None and not problems, problems
    declared: Sequence[ModelFiles] = plugin.cls.models(plugin.config)
    return declared


def linked(name: str, folder: Path) -> Path:
    return Path(
        shutil.copytree(tiny_config.WEIGHTS / name, folder / name, copy_function=os.symlink)
    )


def rewrite(file: Path, content: bytes) -> None:
    """Replaces a link, so that its target does not change."""
    file.unlink(missing_ok=True)
    file.write_bytes(content)


PARTS = [
    (name, model.subfolder, model.config, bool(model.weights), bool(model.kinds))
    for name, (directory, section) in SECTIONS.items()
    for model in models(directory, section | {"model_path": str(tiny_config.WEIGHTS / name)})
    if model.config_required
]


def problems_with(
    name: str, folder: Path, damage: Callable[[Path], None], subfolder: str = ""
) -> list[str]:
    directory, section = SECTIONS[name]
    shutil.rmtree(folder / name, ignore_errors=True)
    copy = linked(name, folder)
    declared = models(directory, section | {"model_path": str(copy)})
    assert list(model_problems(declared)) == []
    damage(copy / subfolder)
    return list(model_problems(declared))


@pytest.mark.parametrize(("name", "subfolder", "config", "has_weights", "has_kind"), PARTS)
def test_damage_is_found_in_every_part_of_a_model(
    name: str, subfolder: str, config: str, has_weights: bool, has_kind: bool, tmp_path: Path
) -> None:
    part = tiny_config.WEIGHTS / name / subfolder
    cut = (part / config).read_bytes()[:-9]
    cases: list[tuple[Callable[[Path], None], str]] = [
        (
            lambda part: (part / config).unlink(),
            f"lacks {os.path.join(subfolder, config)}; ... copy",
        ),
        (lambda part: rewrite(part / config, cut), f"{config} ... JSON"),
    ]
    if has_kind:
        other = b'{"model_type": "qwen2_vl"}'
        message = f"{config} ... model_type 'qwen2_vl' ... only '"
        cases.append((lambda part: rewrite(part / config, other), message))
    if has_weights:
        [weights] = part.glob("*.safetensors")
        content, file = weights.read_bytes(), os.path.join(subfolder, weights.name)
        message = f"lacks {file} or {file}.index.json"
        cases.append((lambda part: (part / weights.name).unlink(), message))
        message = f"{len(content) - 1} bytes; ... copy"
        cases.append((lambda part: rewrite(part / weights.name, content[:-1]), message))
    for damage, parts in cases:
        [problem] = problems_with(name, tmp_path, damage, subfolder)
        assert holds(problem, f"model_path: {tmp_path / name} ... {parts}"), problem


def header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        *(
            ("config.json", content, "")
            for content in (
                b"", b"[1]", b"\xff\xfe{}", b"[" * 100_000, b"null", b'{"model_type": null}',
                b'{"model_type": {"qwen2_5_vl": 1}, "architectures": [3]}',
                b'{"model_type": "qwen2_5_vl", "architectures": [["x"]]}',
                b'{"_class_name": 7}',
            )
        ),
        *(
            ("model.safetensors", content, message)
            for content, message in (
                (b"", "damaged (0 bytes"),
                (b"\xff" * 64, "header"),
                (header(b"[]"), "header"),
                (header(b"{" * 9000), "header"),
                (header(b'{"w": {"data_offsets": [0, "8"]}}'), "header"),
                (header(b'{"w": {"data_offsets": [0, 8]}}') + bytes(7), "46 bytes"),
                (b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS"),
            )
        ),
    ],
)  # fmt: skip
def test_damaged_files_give_messages_not_tracebacks(
    file: str, content: bytes, message: str, tmp_path: Path
) -> None:
    [problem] = problems_with("policy", tmp_path, lambda part: rewrite(part / file, content))
    assert holds(problem, f"model_path: {tmp_path}/policy ... {file} ... {message}"), problem


def shard(folder: Path) -> None:
    """Splits the weights into two files that an index names, as models are published."""
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "second")
    (folder / "second").rename(folder / "model-00002-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = {"metadata": {}, "weight_map": names}
    rewrite(folder / "model.safetensors.index.json", json.dumps(index).encode())


def test_files_that_an_index_names_must_exist(tmp_path: Path) -> None:
    assert problems_with("policy", tmp_path, shard) == []
    index = "model.safetensors.index.json"
    cases: list[tuple[Callable[[Path], None], str]] = [
        (lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(),
         "lacks model-00002-of-00002.safetensors ... copy"),
        *(
            (lambda folder, content=content: rewrite(folder / index, content),
             f"lacks names of weights in {index}")
            for content in (b"{", b"{}", b'{"weight_map": ["x"]}')
        ),
    ]  # fmt: skip
    for damage, parts in cases:

        def damaged(folder: Path, damage: Callable[[Path], None] = damage) -> None:
            shard(folder)
            damage(folder)

        [problem] = problems_with("policy", tmp_path, damaged)
        assert holds(problem, parts), problem


def quickstart(*overrides: str) -> list[str]:
    return check_report.problems(tiny_config.shipped("quickstart", *overrides))


def test_a_folder_of_an_older_model_is_refused_by_check(tmp_path, capsys) -> None:
    folder = linked("policy", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"]}
    rewrite(folder / "config.json", json.dumps(config).encode())
    [older] = quickstart(f"policy.model_path={folder}")
    assert holds(older, f"policy.model_path: {folder}/config.json ... 'qwen2_vl' ... 'qwen2_5_vl'")
    config |= {"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLModel"]}
    rewrite(folder / "config.json", json.dumps(config).encode())
    [headless] = quickstart(f"policy.model_path={folder}")
    assert holds(headless, "architectures 'Qwen2_5_VLModel' ... 'Qwen2_5_VLForCond")


def test_tokenizer_and_weights_may_be_in_two_folders(tmp_path: Path) -> None:
    editor = tmp_path / "editor"
    linked("policy", editor).rename(editor / "text_encoder")
    processor = linked("policy", tmp_path)
    (processor / "model.safetensors").unlink()
    overrides = [f"policy.model_path={processor}", f"policy.init_text_encoder_from={editor}"]
    assert quickstart(*overrides) == []
    (editor / "text_encoder" / "config.json").rename(tmp_path / "moved.json")
    [problem] = quickstart(*overrides)
    assert holds(problem, f"policy.init_text_encoder_from: {editor} ... text_encoder/config.json")
    (tmp_path / "moved.json").rename(editor / "text_encoder" / "config.json")
    (processor / "tokenizer.json").unlink()
    [problem] = quickstart(*overrides)
    assert holds(problem, f"policy.model_path: {processor} ... tokenizer.json or vocab.json")


def test_an_editor_of_another_pipeline_is_refused(tmp_path: Path) -> None:
    folder = linked("editor", tmp_path)
    change = f"renderer.model_path={folder}"
    rewrite(folder / "model_index.json", b'{"_class_name": "QwenImageEditPlusPipeline"}')
    [problem] = quickstart(change)
    assert holds(problem, "_class_name 'QwenImageEditPlusPipeline' ... 'QwenImageEditPipeline'")
    assert quickstart(change, "renderer.type=qwen_image_edit_plus") == []


def test_a_hub_id_is_checked_by_its_cached_files(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    change = "policy.model_path=some/one"
    assert quickstart(change) == []
    repository = tmp_path / "models--some--one"
    file = repository / "snapshots" / "c0ffee" / "config.json"
    file.parent.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c0ffee")
    assert quickstart(change) == [], "nothing of it is cached yet"
    file.write_text('{"model_type": "qwen3_vl"}')
    [problem] = quickstart(change)
    assert holds(problem, f"policy.model_path: some/one ({file}) ... 'qwen3_vl' ... 'qwen2_5_vl'")
    assert quickstart(change, "policy.revision=other") == []
    file.write_text('{"model_type": "qwen2_5_vl"}')
    assert quickstart(change) == [], "its weights are fetched when it is loaded"
