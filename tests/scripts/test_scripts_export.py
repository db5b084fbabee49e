"""An exported model gives the outputs of the trained policy, in transformers and in vLLM."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_editor
import tiny_emu3
import tiny_loop
import tiny_policy
import tiny_qwen
import tiny_qwen3
import torch
from safetensors.torch import load_file
from tiny_messages import holds, refusal
from tiny_policy import move, randomize_lora_b, trainable
from tiny_rounding import FORWARD_TOL, PRODUCT_TOL, apart

from rl import build
from rl.api.data import RowRules
from rl.api.engine import EngineSetup
from rl.api.plugin import PluginConfig
from rl.api.policy import PolicySetup
from rl.api.types import Prompt, Sample, SamplingParams
from rl.config.schema import RunConfig
from rl.engines import vllm as vllm_engine
from rl.engines.transformers import TransformersEngine
from rl.policies import qwen_vl
from rl.policies.qwen_vl import Qwen25VL
from rl.ranks.dist import Dist
from rl.record.checkpoint import _write_manifest, model_folder
from rl.tools.commands import export
from rl.tools.editor import Editor
from tiny_world.data import shape_questions
from tiny_world.data.synthetic import SyntheticConfig
from tiny_world.questions import SYSTEM_PROMPT

pytestmark = pytest.mark.slow

BASE = str(Path(__file__).parents[2] / "tiny_world" / "weights" / "reasoner")
GREEDY = SamplingParams(0.0, top_p=1.0, top_k=-1, max_tokens=40, num_completions=1)
SECTION = {
    "type": "qwen2_5_vl",
    "model_path": BASE,
    "dtype": "float32",
    "lora": {"r": 4, "alpha": 8},
    "system_prompt": SYSTEM_PROMPT,
    "max_prompt_tokens": 256,
}


def make_policy(section: Mapping[str, Any] = SECTION) -> Qwen25VL:
    """A policy whose adapter is far from zero, as after training."""
    setup = PolicySetup("text", max_completion_tokens=GREEDY.max_tokens)
    policy = Qwen25VL(Qwen25VL.Config(**section), setup)
    if section["lora"]:
        move(policy)
    return policy


def samples() -> list[Sample]:
    config = SyntheticConfig(type="shape_questions", num_samples=8, seed=3)
    return list(map(shape_questions.ShapeQuestions(config, RowRules()).__getitem__, range(8)))


def greedy(policy: Qwen25VL) -> tuple[list[Prompt], list[tuple[int, ...]]]:
    prompts = [policy.build_prompt(sample) for sample in samples()]
    groups = TransformersEngine(PluginConfig(), EngineSetup(policy, "cpu")).generate(
        prompts, GREEDY, [0] * len(prompts)
    )
    return prompts, [group[0].token_ids for group in groups]


def checkpoint(folder: Path, policy: Any, section: Mapping[str, Any], **config: Any) -> Path:
    """A run folder with one whole checkpoint and a newer, damaged one."""
    step = folder / "run" / "checkpoints" / "step_000002"
    policy.save_pretrained(str(step / "model"), trainable(policy))
    state = {"iteration": 2, "meta": {"config": {"policy": dict(section), **config}}}
    (step / "state.json").write_text(json.dumps(state))
    _write_manifest(step)
    damaged = shutil.copytree(step, step.parent / "step_000004")
    next((damaged / "model").glob("*config.json")).unlink()
    return folder / "run"


def exported(
    folder: Path, policy: Any, section: Mapping[str, Any], *options: str, **config: Any
) -> Path:
    """The export of such a run."""
    run = checkpoint(folder, policy, section, **config)
    assert export.main([str(run), str(folder / "out"), *options]) == 0
    return folder / "out"


def load(folder: str | Path) -> Any:
    from transformers import Qwen2_5_VLForConditionalGeneration

    return Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)


def test_a_merged_adapter_generates_what_the_policy_did(tmp_path: Path) -> None:
    policy = make_policy()
    prompts, expected = greedy(policy)
    out = exported(tmp_path, policy, SECTION)
    merged = make_policy({**SECTION, "model_path": str(out), "lora": None})
    assert greedy(merged)[1] == expected
    assert greedy(make_policy({**SECTION, "lora": None}))[1] != expected
    config = vllm_engine.Config(type="vllm", max_num_seqs=8)
    engine = vllm_engine.VllmEngine(config, EngineSetup(merged, "cpu"))
    try:
        groups = engine.generate(prompts, GREEDY, [0] * len(prompts))
        assert [group[0].token_ids for group in groups] == expected
    finally:
        engine.close()


def test_an_exported_folder_has_the_processor_and_chat_template_of_the_run(tmp_path: Path) -> None:
    section = {**SECTION, "image_max_pixels": 56 * 56}
    policy = make_policy(section)
    out = exported(tmp_path, policy, section)
    from transformers import AutoTokenizer, Qwen2VLImageProcessorPil

    tokenizer = AutoTokenizer.from_pretrained(out)
    processor = Qwen2VLImageProcessorPil.from_pretrained(out)
    sample = samples()[0]
    prompt = policy.build_prompt(sample)
    content = [{"type": "image"}, {"type": "text", "text": sample.instruction}]
    chat = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    pixels = processor(images=[sample.source], return_tensors="pt")["pixel_values"]
    assert torch.equal(pixels, prompt.model_inputs["pixel_values"])
    num_image_tokens = len(pixels) // 4
    expanded = text.replace("<|image_pad|>", "<|image_pad|>" * num_image_tokens)
    assert tuple(tokenizer(expanded).input_ids) == prompt.token_ids


@pytest.mark.parametrize(
    ("system", "form", "num_pictures"),
    [
        ("quickstart", "adapter", 1),
        ("tiny_qwen_image_21", "model", 2),
        ("tiny_thinking", "adapter", 1),
        ("tiny_prompts", "model", 0),
    ],
)
def test_the_program_on_the_card_writes_the_words_of_rl_edit(
    tmp_path: Path, system: str, form: str, num_pictures: int
) -> None:
    """It runs without this project."""
    values = tiny_loop.shortened(system, tmp_path, "transformers")
    values["policy"]["max_prompt_tokens"] = 256
    resolved = build.resolve(RunConfig(**values))
    policy = build.build_policy(resolved, Dist())
    randomize_lora_b(policy)
    config = resolved.config.model_dump(mode="json")
    out = exported(tmp_path, policy, config.pop("policy"), "--as", form, **config)
    pictures = [tmp_path / f"{number}.png" for number in range(num_pictures)]
    for number, file in enumerate(pictures):
        tiny_qwen.picture(number, 96, 64).rotate(5, fillcolor="green").resize((140, 80)).save(file)
    instruction = "paint the square the color of pumpkin"
    with Editor.from_run(tmp_path / "run", device="cpu", only_words=True) as editor:
        expected = editor.edit(pictures, instruction)
        prompt = editor.policy.build_prompt(Sample("edit", instruction, expected.sources))
    program = (out / "README.md").read_text().split("```python\n")[1].split("```")[0]
    base = str(Path(policy.config.model_path).resolve())
    for placeholder, folder in (("<the base>", base), ("<this folder>", str(out))):
        program = program.replace(placeholder, folder)
    program += "torch.save(inputs, 'inputs.pt')\nassert 'rl' not in sys.modules\n"
    (tmp_path / "words.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-I", "words.py", instruction, *map(str, pictures)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert expected.failure is None and done.stdout == expected.words + "\n"
    assert len(expected.words) > 10
    inputs = torch.load(tmp_path / "inputs.pt")
    assert tuple(inputs["input_ids"][0].tolist()) == prompt.token_ids
    for name, tensor in prompt.model_inputs.items():
        assert torch.equal(inputs[name], tensor), name


def test_an_adapter_is_merged_in_float32_and_rounded_once(tmp_path: Path) -> None:
    out = exported(tmp_path, make_policy(), {**SECTION, "dtype": "bfloat16"})
    adapter = load_file(model_folder(tmp_path / "run") / "adapter_model.safetensors")
    base, merged = (load_file(Path(f) / "model.safetensors") for f in (BASE, out))
    assert all(tensor.dtype == torch.bfloat16 for tensor in merged.values())
    name = "language_model.layers.1.self_attn.o_proj"
    a, b = (adapter[f"base_model.model.model.{name}.lora_{side}.weight"] for side in ("A", "B"))
    [key] = [key for key in merged if key.endswith("layers.1.self_attn.o_proj.weight")]
    exact = base[key].float() + 2.0 * (b @ a)  # alpha / r = 2
    half_a_unit = torch.finfo(torch.bfloat16).eps / 2 * exact.abs()
    assert ((merged[key].float() - exact).abs() <= half_a_unit + PRODUCT_TOL).all()
    untouched = [key for key in merged if "visual" in key]
    assert untouched
    assert all(torch.equal(merged[key], base[key].float().bfloat16()) for key in untouched)


def test_an_adapter_of_a_text_encoder_is_merged_into_that_text_encoder(tmp_path: Path) -> None:
    policy_base = tiny_qwen.save_policy_folder(tmp_path / "policy")
    encoder = tmp_path / "editor" / "text_encoder"
    tiny_qwen.make_model(tiny_qwen.make_tokenizer(), seed=7).save_pretrained(encoder)
    section = {
        **SECTION,
        "model_path": policy_base,
        "init_text_encoder_from": str(tmp_path / "editor"),
    }
    policy = make_policy(section)
    out = exported(tmp_path, policy, section)
    adapter_config = model_folder(tmp_path / "run") / "adapter_config.json"
    assert json.loads(adapter_config.read_text())["base_model_name_or_path"] == str(encoder)
    bases = ["--base", policy_base, "--text-encoder-from", str(tmp_path / "editor")]
    moved = exported(tmp_path / "lost", policy, section | {"model_path": "gone"}, *bases)
    merged, base, again = (load_file(f / "model.safetensors") for f in (out, encoder, moved))
    assert all(torch.equal(merged[key], base[key]) for key in merged if "visual" in key)
    assert all(apart(merged[k], base[k]) > 1e-3 for k in merged if "q_proj.weight" in k)
    assert all(apart(merged[key], again[key]) <= PRODUCT_TOL for key in merged)


def test_a_qwen3_adapter_is_merged_into_a_qwen3_model(tmp_path: Path) -> None:
    from transformers import Qwen2VLImageProcessorPil, Qwen3VLForConditionalGeneration

    base = tiny_qwen3.save_policy_folder(tmp_path / "base", tied=True)
    section = {**SECTION, "type": "qwen3_vl", "model_path": base}
    policy = tiny_policy.make(base, kind="text", template=None)
    move(policy)
    out = exported(tmp_path, policy, section)
    merged = Qwen3VLForConditionalGeneration.from_pretrained(out)
    assert Qwen2VLImageProcessorPil.from_pretrained(out).patch_size == 16
    prompt = policy.build_prompt(tiny_qwen.sample(0))
    batch = policy.collate([(prompt, (5, 6, 7))])
    ids = torch.tensor([[*prompt.token_ids, 5, 6, 7]])
    with torch.no_grad():
        states = policy.module(batch).hidden
        types = (ids == merged.config.image_token_id).long()
        again = merged.model(input_ids=ids, mm_token_type_ids=types, **prompt.model_inputs)
        with policy.reference():
            assert (policy.module(batch).hidden - states).abs().max() > 1e-2
    assert (again.last_hidden_state[0] - states).abs().max() < FORWARD_TOL
    card = (out / "README.md").read_text()
    assert "Qwen3VLForConditionalGeneration" in card and "qwen3_vl policy" in card


def test_an_emu3_adapter_is_merged_into_an_emu3_model(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import Emu3ForCausalLM

    base = tiny_emu3.save_policy_folder(tmp_path / "base")
    section = {"type": "emu3", "model_path": base, "dtype": "float32", "lora": {"r": 4, "alpha": 8}}
    policy = tiny_policy.make(base, lora=section["lora"])
    move(policy)
    out = exported(tmp_path, policy, section)
    ids = torch.arange(10, 40)[None]
    with torch.no_grad():
        merged = Emu3ForCausalLM.from_pretrained(out)(ids).logits
        stock = Emu3ForCausalLM.from_pretrained(base, dtype=torch.float32)
        unmerged = stock(ids).logits
        adapted = PeftModel.from_pretrained(stock, model_folder(tmp_path / "run"))(ids).logits
    assert float((merged - adapted).abs().max()) < 1e-4
    assert float((unmerged - adapted).abs().max()) > 1e-2
    assert (out / "tokenizer.json").is_file()


def test_a_merge_that_fails_midway_leaves_nothing(tmp_path, monkeypatch) -> None:
    run = checkpoint(tmp_path, make_policy(), SECTION)

    def fail(config: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(qwen_vl, "load_image_processor", fail)  # written last
        assert "disk full" in refusal(export.main, [str(run), str(tmp_path / "merged")])
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    (tmp_path / ".merged.rl-export").mkdir()  # left by an export that was killed
    (tmp_path / ".merged.rl-export" / "model-00009.safetensors").touch()
    export.main([str(run), str(tmp_path / "merged")])
    assert file_names(tmp_path) == ["merged", "run"]
    assert not list((tmp_path / "merged").glob("model-*"))


def test_an_impossible_export_is_refused_with_its_cause(tmp_path: Path) -> None:
    refused = partial(refusal, export.main)
    target = str(tmp_path / "target")
    assert "belongs to no run" in refused([BASE, target])
    assert "belongs to no run" in refused([str(tmp_path), target])
    policy = make_policy()
    run = checkpoint(tmp_path, policy, SECTION)
    assert "exists" in refused([str(run), str(tmp_path)])
    for which, why in (
        ("7", "'7' ... 2, 4"),
        ("4", "step_000004 ... damaged"),
        ("best", "measured"),
    ):
        assert holds(refused([str(run), target, "--checkpoint", which]), why)
    for renderer, keys, why in (
        ({"type": "sd3"}, {}, "renderer 'sd3' is not"),
        ({"type": "qwen_image_edit"}, {"conditioning": "base"}, "untrained states"),
    ):
        section = {**SECTION, **keys}
        run = checkpoint(tmp_path / renderer["type"], policy, section, renderer=renderer)
        assert why in refused([str(run), target, "--as", "text-encoder"])
    moved = {**SECTION, "model_path": str(tmp_path / "gone")}
    run = checkpoint(tmp_path / "moved", policy, moved)
    assert "--base" in refused([str(run), target])
    assert not (tmp_path / "target").exists()


def test_an_adapter_is_copied_unchanged(tmp_path: Path, capsys: Any) -> None:
    run, target = checkpoint(tmp_path, make_policy(), SECTION), tmp_path / "adapter"
    (run / "metrics.jsonl").write_text('{"iteration": 2, "drift/alarm": 0}\n')
    assert export.main([str(run), str(target), "--as", "adapter", "--checkpoint", "2"]) == 0
    assert f"wrote {target}" in capsys.readouterr().out
    written = ["adapter_config.json", "adapter_model.safetensors"]
    assert file_names(target) == ["README.md", *written]
    for name in written:
        assert (target / name).read_bytes() == (model_folder(run) / name).read_bytes()
    card = (target / "README.md").read_text()
    assert "A PEFT adapter of a qwen2_5_vl policy after 2 iterations" in card
    assert "No drift alarm" in card  # which the checkpoint was written before


def file_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_fully_finetuned_model_is_copied_unchanged(tmp_path: Path) -> None:
    section = {**SECTION, "lora": None}
    policy = make_policy(section)
    run = checkpoint(tmp_path, policy, section)
    arguments = [str(run), str(tmp_path / "model"), "--as", "adapter"]
    assert "there is no adapter" in refusal(export.main, arguments)
    model_dir = model_folder(run)
    written = file_names(model_dir)
    for folder in (run, model_dir):
        (folder / "picture.png").touch()
    export.main([str(run), str(tmp_path / "model"), "--checkpoint", "2"])
    assert set(file_names(tmp_path / "model")) == {*written, "README.md"}
    ids = torch.arange(10, 40)[None]
    with torch.no_grad():
        expected = policy.module.base_model(ids).logits
        assert apart(load(tmp_path / "model")(ids).logits, expected) <= FORWARD_TOL
        export.main([str(run), str(tmp_path / "encoder"), "--as", "text-encoder"])
        assert apart(load(tmp_path / "encoder")(ids).logits, expected) <= FORWARD_TOL


def test_a_stock_editor_loads_the_exported_text_encoder(tmp_path, capsys) -> None:
    """The export replaces a stock pipeline's `text_encoder`; its states are of base + adapter."""
    from diffusers import QwenImageEditPipeline
    from peft import PeftModel

    editor = tmp_path / "editor"
    parts = tiny_editor.make_stock()
    QwenImageEditPipeline(
        parts.scheduler, parts.vae, load(BASE), None, None, parts.transformer
    ).save_pretrained(editor)
    section = {**SECTION, "model_path": BASE, "init_text_encoder_from": str(editor)}
    encoder = exported(tmp_path, make_policy(section), section, "--as", "text-encoder")
    assert holds(capsys.readouterr().out, "loading ... adapter ... weights in float32")
    files = ["README.md", "config.json", "generation_config.json", "model.safetensors"]
    assert file_names(encoder) == files
    before = load_file(editor / "text_encoder" / "model.safetensors")
    assert set(load_file(encoder / "model.safetensors")) == set(before), "the names are equal"
    shutil.rmtree(editor / "text_encoder")
    shutil.copytree(encoder, editor / "text_encoder")
    pipeline = QwenImageEditPipeline.from_pretrained(editor, tokenizer=None, processor=None)
    adapted = PeftModel.from_pretrained(load(BASE), model_folder(tmp_path / "run"))
    ids = torch.arange(10, 40)[None]

    def states(model: Any) -> torch.Tensor:
        return model(ids, output_hidden_states=True).hidden_states[-1]

    with torch.no_grad():
        expected = states(adapted)
        assert float((states(pipeline.text_encoder) - expected).abs().max()) < 1e-4
        with adapted.disable_adapter():
            assert float((states(adapted) - expected).abs().max()) > 1e-2


def test_a_checkpoint_outside_a_run_is_exported_if_its_state_names_a_policy(tmp_path: Path) -> None:
    run = checkpoint(tmp_path, make_policy(), SECTION, rewards=[1], renderer="x", data=None)
    step = shutil.copytree(run / "checkpoints" / "step_000002", tmp_path / "elsewhere")
    state = json.loads((step / "state.json").read_text())
    state["meta"]["metrics"] = {"eval/reward": "high", "reward/mean": 1}
    (step / "state.json").write_text(json.dumps(state))
    export.main([str(step), str(tmp_path / "out"), "--as", "adapter"])
    card = (tmp_path / "out" / "README.md").read_text()
    assert "policy after 2 iterations" in card
    assert "| reward/mean | 1 |" in card and "eval/reward" not in card
    for policy in (None, 3, {"type": ["x"]}):
        state["meta"]["config"]["policy"] = policy
        (step / "state.json").write_text(json.dumps(state))
        assert "damaged" in refusal(export.main, [str(step), str(tmp_path / "another")])


def test_a_link_out_of_the_checkpoint_is_not_exported(tmp_path: Path) -> None:
    run = checkpoint(tmp_path, make_policy(), SECTION)
    step = shutil.copytree(run / "checkpoints" / "step_000002", tmp_path / "step")
    weights = step / "model" / "adapter_model.safetensors"
    weights.symlink_to(weights.rename(tmp_path / "secret"))
    message = refusal(export.main, [str(step), str(tmp_path / "out"), "--as", "adapter"])
    assert "adapter_model.safetensors is a link" in message
    assert not (tmp_path / "out").exists()
