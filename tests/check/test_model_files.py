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
    "klein": ("renderers", {"type": "diffusers"}),
}
"""Folder of the tiny world -> (plugin directory, config section that loads it)."""


def models(directory: str, section: dict[str, Any]) -> Sequence[ModelFiles]:
    plugin, problems = build.find_plugin(directory, directory, section)
    assert not problems, problems
    return plugin.cls.models(plugin.config)


def linked(name: str, folder: Path) -> Path:
    return Path(
        shutil.copytree(tiny_config.WEIGHTS / name, folder / name, copy_function=os.symlink)
    )


def rewrite(file: Path, content: bytes | None) -> None:
    """Replaces a link, so that its target does not change; None: removes it."""
    file.unlink(missing_ok=True)
    if content is not None:
        file.write_bytes(content)


PARTS = [
    (name, model.subfolder, model.config, bool(model.weights), bool(model.kinds))
    for name, (directory, section) in SECTIONS.items()
    for model in models(directory, section | {"model_path": str(tiny_config.WEIGHTS / name)})
    if model.config_required
]


def problems_with(
    name: str,
    folder: Path,
    file: str,
    content: bytes | None,
    prepare: Callable[[Path], object] = lambda folder: None,
) -> list[str]:
    """Of a copy of a good model that `prepare` has changed, once the file has another content."""
    directory, section = SECTIONS[name]
    shutil.rmtree(folder / name, ignore_errors=True)
    copy = linked(name, folder)
    prepare(copy)
    declared = models(directory, section | {"model_path": str(copy)})
    assert list(model_problems(declared)) == []
    rewrite(copy / file, content)
    return list(model_problems(declared))


@pytest.mark.parametrize(("name", "subfolder", "config", "has_weights", "has_kind"), PARTS)
def test_damage_is_found_in_every_part_of_a_model(
    name: str, subfolder: str, config: str, has_weights: bool, has_kind: bool, tmp_path: Path
) -> None:
    part = tiny_config.WEIGHTS / name / subfolder
    stated = os.path.join(subfolder, config)
    cases: list[tuple[str, bytes | None, str]] = [
        (stated, None, f"lacks {stated}; ... copy"),
        (stated, (part / config).read_bytes()[:-9], f"{config} ... JSON"),
    ]
    if has_kind:
        message = f"{config} ... model_type 'qwen2_vl' ... only '"
        cases.append((stated, b'{"model_type": "qwen2_vl"}', message))
    if has_weights:
        [weights] = part.glob("*.safetensors")
        content, file = weights.read_bytes(), os.path.join(subfolder, weights.name)
        cases.append((file, None, f"lacks {file} or {file}.index.json"))
        cases.append((file, content[:-1], f"{len(content) - 1} bytes; ... copy"))
    for file, damaged, parts in cases:
        [problem] = problems_with(name, tmp_path, file, damaged)
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
    [problem] = problems_with("policy", tmp_path, file, content)
    assert holds(problem, f"model_path: {tmp_path}/policy ... {file} ... {message}"), problem


def shard(folder: Path) -> None:
    """Splits the weights into two files that an index names, as models are published."""
    names = {n: f"model-0000{n}-of-00002.safetensors" for n in "12"}
    (folder / "model.safetensors").rename(folder / names["1"])
    (folder / names["2"]).symlink_to((folder / names["1"]).resolve())
    index = {"metadata": {}, "weight_map": names}
    rewrite(folder / "model.safetensors.index.json", json.dumps(index).encode())


def test_files_that_an_index_names_must_exist(tmp_path: Path) -> None:
    index, second = "model.safetensors.index.json", "model-00002-of-00002.safetensors"
    for file, content, parts in (
        (second, None, f"lacks {second} ... copy"),
        *(
            (index, content, f"lacks names of weights in {index}")
            for content in (b"{", b"{}", b'{"weight_map": ["x"]}')
        ),
    ):
        [problem] = problems_with("policy", tmp_path, file, content, prepare=shard)
        assert holds(problem, parts), problem


def quickstart(*overrides: str) -> list[str]:
    return check_report.problems(tiny_config.shipped("quickstart", *overrides))


def test_a_model_without_its_head_is_refused_by_check(tmp_path: Path) -> None:
    folder = linked("policy", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["Qwen2_5_VLModel"]
    rewrite(folder / "config.json", json.dumps(config).encode())
    [headless] = quickstart(f"policy.model_path={folder}")
    assert holds(headless, "architectures 'Qwen2_5_VLModel' ... 'Qwen2_5_VLForCond")


def test_tokenizer_and_weights_may_be_in_two_folders(tmp_path: Path) -> None:
    editor, processor = tmp_path / "editor", linked("policy", tmp_path)
    shutil.copytree(processor, editor / "text_encoder")
    (processor / "model.safetensors").unlink()
    overrides = [f"policy.model_path={processor}", f"policy.init_text_encoder_from={editor}"]
    assert quickstart(*overrides) == []
    for file, parts in (
        (processor / "tokenizer.json", f"model_path: {processor} ... tokenizer.json or vocab.json"),
        (
            editor / "text_encoder" / "config.json",
            f"init_text_encoder_from: {editor} ... text_encoder/config.json",
        ),
    ):
        kept = file.rename(tmp_path / "kept")
        [problem] = quickstart(*overrides)
        assert holds(problem, f"policy.{parts}")
        kept.rename(file)


def test_an_editor_of_another_pipeline_is_refused(tmp_path: Path) -> None:
    folder = linked("editor", tmp_path)
    change = f"renderer.model_path={folder}"
    rewrite(folder / "model_index.json", b'{"_class_name": "QwenImageEditPlusPipeline"}')
    [problem] = quickstart(change)
    assert holds(problem, "_class_name 'QwenImageEditPlusPipeline' ... 'QwenImageEditPipeline'")
    assert quickstart(change, "renderer.type=qwen_image_edit_plus") == []


@pytest.mark.parametrize(
    "path", ["a/b c", "a/b ", "a", "a/b/c", "/a/b", "a/ü", "a/b--c", "../a", ""]
)
def test_a_path_that_is_neither_a_folder_nor_a_hub_id_is_refused(path: str) -> None:
    [problem] = quickstart(f"policy.model_path='{path}'")
    assert holds(problem, f"policy.model_path: ... {path!r} ... owner/name")


def test_a_hub_id_is_checked_by_its_cached_files(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    change = "policy.model_path=some/one"
    assert quickstart(change) == []
    file = tiny_config.cache_config(tmp_path, "some/one", '{"model_type": "qwen3_vl"}')
    [problem] = quickstart(change)
    assert holds(problem, f"policy.model_path: some/one ({file}) ... 'qwen3_vl' ... 'qwen2_5_vl'")
    assert quickstart(change, "policy.revision=other") == []
    file.write_text('{"model_type": "qwen2_5_vl"}')
    assert quickstart(change) == [], "its weights are fetched when it is loaded"
    file.unlink()
    assert quickstart(change) == [], "nothing of it is cached yet"
