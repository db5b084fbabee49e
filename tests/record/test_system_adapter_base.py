"""A saved adapter names its base weights so that other loaders find them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import tiny_qwen
import torch
from huggingface_hub.utils import validate_repo_id
from tiny_policy import make, trainable
from tiny_rounding import FORWARD_TOL, apart

from rl.model_files import Base, is_hub_id, noted
from rl.policies import emu3
from rl.policies.qwen_vl import Qwen25VL

QWEN = "Qwen2_5_VLForConditionalGeneration"
EDITOR = {
    "model_path": "Qwen/Qwen2.5-VL-7B-Instruct",
    "init_text_encoder_from": "Qwen/Qwen-Image-Edit",
}


def qwen(**section: Any) -> Base:
    return Qwen25VL.base(Qwen25VL.Config(type="qwen2_5_vl", **section))


@pytest.mark.parametrize(
    ("base", "path", "revision", "subfolder"),
    [
        (qwen(**EDITOR), "Qwen/Qwen-Image-Edit", None, "text_encoder"),
        (qwen(**EDITOR, revision="of-the-tokenizer"), "Qwen/Qwen-Image-Edit", None, "text_encoder"),
        (qwen(model_path="some/model", revision="v2"), "some/model", "v2", ""),
        (qwen(model_path="model-of-one-word"), "model-of-one-word", None, ""),
        (emu3.Emu3.base(emu3.Config(type="emu3", model_path="a/b", revision="c")), "a/b", "c", ""),
    ],
)
def test_a_hub_id_is_written_with_revision_and_subfolder(
    base: Base, path: str, revision: str | None, subfolder: str
) -> None:
    written = json.loads(json.dumps(noted(base, QWEN)))
    validate_repo_id(written["base_model_name_or_path"])
    assert (written["base_model_name_or_path"], written["revision"]) == (path, revision)
    assert written["auto_mapping"].get("base_model_subfolder", "") == subfolder


def test_a_local_editor_is_written_with_its_subfolder(tmp_path: Path) -> None:
    (tmp_path / "editor").mkdir()
    written = noted(qwen(model_path="a/b", init_text_encoder_from=f"{tmp_path}/editor"), QWEN)
    assert written["base_model_name_or_path"] == f"{tmp_path}/editor/text_encoder"
    assert written["auto_mapping"]["base_model_tokenizer"] == "a/b"


def test_hub_ids_are_distinguished_from_paths(tmp_path: Path) -> None:
    (tmp_path / "here" / "model").mkdir(parents=True)
    ids = ("a/b", "gpt2", "Qwen/Qwen2.5-VL-7B-Instruct")
    others = ("here/model", "/a/b", "./a", "~/a", "a/b/c", "", "a b/c", "a/")
    assert [is_hub_id(path) for path in (*ids, *others)] == [True] * 3 + [False] * 8


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An editor, and the adapter of a policy whose base is the editor's text encoder."""
    folder = tmp_path_factory.mktemp("published")
    policy_folder = tiny_qwen.save_policy_folder(folder / "tokenizer")
    encoder = folder / "editor" / "text_encoder"
    tiny_qwen.make_model(tiny_qwen.make_tokenizer(), seed=7).save_pretrained(encoder)
    policy = make(policy_folder, kind="text", init_text_encoder_from=str(folder / "editor"))
    tensors = {name: tensor.detach() + 0.1 for name, tensor in trainable(policy).items()}
    policy.save_pretrained(str(folder / "adapter"), tensors)
    return folder


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(10, 30)[None]).logits


def test_peft_and_transformers_load_the_adapter_without_naming_its_base(trained: Path) -> None:
    from peft import AutoPeftModel, AutoPeftModelForCausalLM, PeftModel
    from transformers import AutoModelForImageTextToText, Qwen2_5_VLForConditionalGeneration

    adapter, encoder = trained / "adapter", trained / "editor" / "text_encoder"
    base = Qwen2_5_VLForConditionalGeneration.from_pretrained(encoder)
    plain = logits(base)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PEFT warns about unknown keys
        expected = logits(PeftModel.from_pretrained(base, adapter))
    assert (expected - plain).abs().max() > 1e-2
    for auto in (AutoPeftModel, AutoPeftModelForCausalLM, AutoModelForImageTextToText):
        assert apart(logits(auto.from_pretrained(str(adapter))), expected) <= FORWARD_TOL, auto


def test_the_adapter_loads_as_documented(trained: Path) -> None:
    text = (Path(__file__).parents[2] / "docs/report-and-edit.md").read_text(encoding="utf-8")
    example = text.partition("### A published adapter")[2].partition("\n\n    ")[2]
    code = example.partition("\n\n")[0].replace("\n    ", "\n")
    for documented, local in (("Qwen/Qwen-Image-Edit", "editor"), ("me/my-run", "adapter")):
        assert f'"{documented}"' in code
        code = code.replace(f'"{documented}"', repr(str(trained / local)))
    names: dict[str, Any] = {}
    exec(code, names)
    assert apart(logits(names["policy"]), logits(names["policy"].get_base_model())) <= FORWARD_TOL
    with names["policy"].disable_adapter():
        plain = logits(names["policy"])
    assert (logits(names["policy"]) - plain).abs().max() > 1e-2
