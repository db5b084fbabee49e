"""The renderer plugs as a config sees them: light, checked, and loadable from a folder."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_editor
import tiny_rounding
import torch
from diffusers import QwenImageEditPipeline, QwenImageEditPlusPipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions
from peft import LoraConfig, get_peft_model_state_dict
from pydantic import ValidationError
from tiny_editor import make_job
from tiny_messages import names
from tiny_pictures import make_picture
from tiny_rounding import apart

from rl.api.plug import PlugConfig, Resources
from rl.api.types import RenderJob
from rl.config.messages import sections
from rl.files.model_files import model_problems
from rl.policies.shared.prompting import for_pictures
from rl.renderers import none, qwen_image_edit, qwen_image_edit_plus
from rl.renderers.qwen_image import config as qwen_image
from rl.renderers.qwen_image.loop import QwenImageLoop

EDITORS = [qwen_image_edit.QwenImageEdit, qwen_image_edit_plus.QwenImageEditPlus]
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def editor_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("editor")
    tiny_editor.make_stock().save(folder)
    return folder


def make_config(folder: Path, **changes: object) -> qwen_image_edit.Config:
    settings = {
        "type": "qwen_image_edit",
        "model_path": str(folder),
        "dtype": "float32",
        "num_steps": 3,
        "true_cfg_scale": 1.0,
        "output_area_px": 64 * 64,
        "condition_area_px": 64 * 64,
    }
    return qwen_image_edit.Config(**{**settings, **changes})


def render_one(renderer: QwenImageLoop, job: RenderJob) -> torch.Tensor:
    return renderer.render_tensor([job], renderer.bucket_of(job.sample.sources))


def test_plugs_import_without_torch() -> None:
    script = """
import sys
for heavy in ("torch", "diffusers", "transformers", "numpy", "PIL"):
    sys.modules[heavy] = None
from rl.renderers import none
from rl.renderers.qwen_image_edit import QwenImageEdit
from rl.renderers.qwen_image_edit_plus import QwenImageEditPlus
for plug in (QwenImageEdit, QwenImageEditPlus):
    config = plug.Config(type="x")
    assert plug.problems(config, None) == []
    assert 13.7e9 < sum(plug.parameter_counts(config).values()) < 13.8e9
    assert plug.prompt_template(config) and plug.negative_prompt(config) == " "
from rl.renderers.sd3.plug import SD3
config = SD3.Config(type="sd3")
assert SD3.problems(config, None) == []
assert 7.6e9 < sum(SD3.parameter_counts(config).values()) < 7.8e9
assert SD3.prompt_template(config) is None and SD3.negative_prompt(config) is None
from rl.renderers.qwen_image_21.plug import QwenImage21
config = QwenImage21.Config(type="x")
assert 7.45e9 < sum(QwenImage21.parameter_counts(config).values()) < 7.46e9
assert QwenImage21.activation_counts(config)
assert QwenImage21.prompt_template(config) and QwenImage21.negative_prompt(config) is None
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2])


def test_edit_asks_as_the_stock_pipeline_does() -> None:
    stock = tiny_editor.stock_pipeline(tiny_editor.make_stock(), QwenImageEditPipeline)
    template = qwen_image_edit.QwenImageEdit.prompt_template(qwen_image_edit.Config(type="x"))
    asked = template.text.replace("{image}", PICTURE).replace("{instruction}", "make it blue")
    assert asked == stock.prompt_template_encode.format("make it blue")
    assert template.image_area_px == 1024 * 1024


@pytest.mark.parametrize("num_pictures", [1, 2, 3])
def test_plus_asks_as_the_stock_pipeline_does(num_pictures: int) -> None:
    stock = tiny_editor.stock_pipeline(tiny_editor.make_stock(), QwenImageEditPlusPipeline)
    template = qwen_image_edit_plus.QwenImageEditPlus.prompt_template(
        qwen_image_edit_plus.Config(type="x")
    )
    text = for_pictures(template, num_pictures).text
    asked = text.replace("{image}", PICTURE).replace("{instruction}", "make it blue")
    # `_get_qwen_prompt_embeds` puts this label before every picture.
    shown = "".join(f"Picture {number}: {PICTURE}" for number in range(1, num_pictures + 1))
    assert asked == stock.prompt_template_encode.format(f"{shown}make it blue")
    assert template.image_area_px == 384 * 384


@pytest.mark.parametrize("plug", EDITORS)
def test_the_dropped_prefix_ends_where_the_user_begins(plug: object) -> None:
    template = plug.prompt_template(plug.Config(type="x"))
    assert template.text.startswith(template.drop_prefix)
    assert template.drop_prefix.endswith("<|im_end|>\n<|im_start|>user\n")
    assert template.text.count("<|im_start|>user\n") == 1


def test_no_negative_prompt_without_guidance() -> None:
    assert qwen_image_edit.QwenImageEdit.negative_prompt(make_config(Path("a/b"))) is None
    guided = make_config(Path("a/b"), true_cfg_scale=2.5, negative_prompt="blurry")
    assert qwen_image_edit.QwenImageEdit.negative_prompt(guided) == "blurry"


@pytest.mark.parametrize("area", [64 * 64, 384 * 384, 512 * 512, 1024 * 1024])
@pytest.mark.parametrize("size", [(64, 64), (640, 427), (427, 640), (3000, 1000), (1, 1)])
def test_sizes_follow_the_stock_pipeline(area: int, size: tuple[int, int]) -> None:
    assert qwen_image.fit_area(area, size) == calculate_dimensions(area, size[0] / size[1])[:2]


def test_a_very_long_picture_keeps_a_row() -> None:
    assert calculate_dimensions(64 * 64, 100)[:2] == (640, 0)
    assert qwen_image.fit_area(64 * 64, (1000, 10)) == (640, 32)


def test_a_fixed_size_wins_over_the_area() -> None:
    config = make_config(Path("a/b"), height_px=48, width_px=80)
    assert qwen_image.output_size(config, (64, 64)) == (80, 48)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"height_px": 512}, "set both"),
        ({"height_px": 500, "width_px": 512}, "height_px: 500 ... 16 ... 496"),
        ({"num_steps": 1}, "num_steps"),
        ({"lora_weight_name": "x.safetensors"}, "lora_path"),
        ({"lora_path": "/no/such/file"}, "/no/such/file"),
    ],
)
def test_each_problem_is_named(editor_folder: Path, changes: dict[str, object], named: str) -> None:
    (problem,) = qwen_image_edit.QwenImageEdit.problems(make_config(editor_folder, **changes), None)
    assert names(problem, named)


def test_sound_configs_have_no_problem(editor_folder: Path) -> None:
    unstretched = {"num_steps": 1, "scheduler_overrides": {"shift_terminal": None}}
    assert qwen_image_edit.QwenImageEdit.problems(make_config(editor_folder), None) == []
    models = qwen_image_edit.QwenImageEdit.models(make_config(editor_folder))
    assert list(model_problems(models)) == []
    assert (
        qwen_image_edit.QwenImageEdit.problems(make_config(editor_folder, **unstretched), None)
        == []
    )
    assert qwen_image_edit.QwenImageEdit.problems(make_config(Path("owner/name")), None) == []


def test_a_folder_that_lacks_a_part_is_named(tmp_path: Path) -> None:
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text("{}")
    (problem,) = model_problems(qwen_image_edit.QwenImageEdit.models(make_config(tmp_path)))
    assert names(problem, "/vae/config.json ... 'AutoencoderKLQwenImage'")
    (tmp_path / "vae" / "config.json").unlink()
    (problem,) = model_problems(qwen_image_edit.QwenImageEdit.models(make_config(tmp_path)))
    weights = "diffusion_pytorch_model.safetensors"
    parts = f"transformer/config.json, transformer/{weights} or transformer/"
    assert names(problem, f"lacks {parts} ... scheduler/scheduler_config.json ... copy")


@pytest.mark.parametrize(
    "typo",
    [
        {"num_step": 4},
        {"true_cfg_scale": 0.5},
        {"dtype": "fp16"},
        {"scheduler_overrides": {"shift_terminl": None}},
        {"scheduler_overrides": {"use_dynamic_shifting": None}},
        {"scheduler_overrides": {"shift": None}},
    ],
)
def test_bad_values_are_refused(editor_folder: Path, typo: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(typo))):
        make_config(editor_folder, **typo)


@pytest.mark.parametrize("plug", [*EDITORS, none.NoRenderer])
def test_every_key_is_documented(plug: object) -> None:
    for _, section in sections(plug.Config):
        assert all(field.description for field in section.model_fields.values())


def test_parameters_are_counted_from_the_folder(editor_folder: Path) -> None:
    """All that comes to the device: not the modulation, two blocks of two [192, 32] layers."""
    stock = tiny_editor.make_stock()
    counts = qwen_image_edit.QwenImageEdit.parameter_counts(make_config(editor_folder))
    modulation = 2 * 2 * 192 * (32 + 1)
    assert counts == {
        "transformer": sum(p.numel() for p in stock.transformer.parameters()) - modulation,
        "vae": sum(p.numel() for p in stock.vae.parameters()),
    }
    assert qwen_image_edit.QwenImageEdit.parameter_counts(make_config(Path("owner/unknown"))) == {}
    assert qwen_image_edit.QwenImageEdit.host_parameters(make_config(editor_folder)) == modulation
    assert qwen_image_edit.QwenImageEdit.host_parameters(make_config(Path("owner/unknown"))) == 0


def test_a_fused_adapter_makes_copies_of_what_ranks_share() -> None:
    for lora_path, shares in ((None, True), ("lightx2v/Qwen-Image-Lightning", False)):
        config = qwen_image_edit.Config(type="x", lora_path=lora_path)
        assert qwen_image_edit.QwenImageEdit.shares_host_parameters(config) == shares


def test_half_precision_weights_run_in_float32(tmp_path: Path) -> None:
    stock = tiny_editor.make_stock()
    stock.transformer.half()
    stock.vae.half()
    stock.save(tmp_path)
    job = make_job(make_picture(0), 9, noise_seed=0)
    loaded = qwen_image_edit.QwenImageEdit(make_config(tmp_path), Resources(None, "cpu"))
    stock.transformer.float()
    stock.vae.float()
    direct = QwenImageLoop(loaded.config, stock.ours())
    drawn, expected = (render_one(one, job) for one in (loaded.loop, direct))
    assert apart(drawn, expected) <= tiny_rounding.PICTURE
    assert not any(p.requires_grad for p in loaded.loop.parts.transformer.parameters())
    assert not loaded.loop.parts.vae.training


def test_the_device_of_the_config_wins(editor_folder: Path) -> None:
    for device, expected in (("auto", "cpu"), ("meta", "meta")):
        config = make_config(editor_folder, device=device)
        parts = qwen_image_edit.QwenImageEdit(config, Resources(None, "cpu")).loop.parts
        assert parts.transformer.device.type == parts.vae.mean.device.type == expected


def test_an_adapter_is_fused(editor_folder: Path, tmp_path: Path) -> None:
    parts = tiny_editor.make_parts()
    lora = LoraConfig(r=2, lora_alpha=4, target_modules=["to_q", "to_v"])
    parts.transformer.add_adapter(lora)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in parts.transformer.named_parameters():
        if "lora_" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    QwenImageEditPipeline.save_lora_weights(
        tmp_path,
        transformer_lora_layers=get_peft_model_state_dict(parts.transformer),
        transformer_lora_adapter_metadata=lora.to_dict(),
        weight_name="few_steps.safetensors",
    )
    config = make_config(
        editor_folder, lora_path=str(tmp_path), lora_weight_name="few_steps.safetensors"
    )
    job = make_job(make_picture(0), 9, noise_seed=0)
    fused = render_one(qwen_image_edit.QwenImageEdit(config, Resources(None, "cpu")).loop, job)
    unfused = render_one(QwenImageLoop(config, parts), job)
    plain = render_one(
        qwen_image_edit.QwenImageEdit(make_config(editor_folder), Resources(None, "cpu")).loop, job
    )
    assert apart(fused, unfused) <= tiny_rounding.PICTURE
    assert (fused - plain).abs().max() > 1e-2


def test_overrides_reach_the_scheduler(editor_folder: Path) -> None:
    overrides = {"base_shift": math.log(3), "shift_terminal": None}
    config = make_config(editor_folder, scheduler_overrides=overrides)
    scheduler = qwen_image_edit.QwenImageEdit(config, Resources(None, "cpu")).loop.parts.scheduler
    changed = {key: scheduler.config[key] for key in ("base_shift", "shift_terminal", "max_shift")}
    assert changed == {"base_shift": math.log(3), "shift_terminal": None, "max_shift": 0.9}


def test_none_renders_nothing() -> None:
    renderer = none.NoRenderer(PlugConfig(), Resources(None, "cpu"))
    jobs = [make_job(None, 3, noise_seed=0)] * 3
    assert list(renderer.render(jobs)) == [(0, None), (1, None), (2, None)]
    assert (none.NoRenderer.accepts, none.NoRenderer.makes_images) == ("text", False)
    assert none.NoRenderer.prompt_template(PlugConfig()) is None
