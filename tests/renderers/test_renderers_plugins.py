"""The renderer plugins: config checks, parameter counts, and loading from a folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_editor
import tiny_qwen_image_21
import tiny_sd3
import torch
from diffusers import QwenImage21Pipeline, QwenImageEditPipeline, QwenImageEditPlusPipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions
from peft import LoraConfig, get_peft_model_state_dict
from pydantic import ValidationError
from tiny_editor import make_job
from tiny_messages import holds
from tiny_pictures import make_picture
from tiny_rounding import PICTURE_TOL, apart
from tiny_run import run_config

from rl.api.plugin import PluginConfig, Resources
from rl.api.types import RenderJob
from rl.files import size_of_area
from rl.model_files import model_problems
from rl.policies.prompting import PICTURE as PICTURE_TOKENS
from rl.policies.prompting import for_pictures
from rl.renderers import none, qwen_image_config
from rl.renderers.qwen_image_21 import QwenImage21
from rl.renderers.qwen_image_edit import QwenImageEdit, QwenImageEditPlus
from rl.renderers.sd3 import SD3

EDIT, IMAGE_21 = "qwen_image_edit", "qwen_image_21"
PLUGINS: dict[str, Any] = {EDIT: QwenImageEdit, IMAGE_21: QwenImage21, "sd3": SD3}
MODELS: dict[str, Any] = {EDIT: tiny_editor, IMAGE_21: tiny_qwen_image_21, "sd3": tiny_sd3}
CPU = Resources(None, "cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Type of the plugin -> folder of its tiny model."""
    folders = {name: tmp_path_factory.mktemp(name) for name in PLUGINS}
    tiny_editor.make_stock().save(folders["qwen_image_edit"])
    tiny_qwen_image_21.make_stock().save(folders["qwen_image_21"])
    tiny_sd3.save_sd3(tiny_sd3.make_parts(), folders["sd3"])
    return folders


def config_of(name: str, path: Path | str = "owner/unknown", **changes: object) -> Any:
    return PLUGINS[name].Config(**MODELS[name].TINY | {"model_path": str(path)} | changes)


def load(config: Any) -> Any:
    return PLUGINS[config.type](config, CPU).loop


def problems(config: Any, **policy: object) -> list[str]:
    """`policy`: config keys of the policy, which by default accepts pictures of any size."""
    bounds = {"image_min_pixels": 1, "image_max_pixels": 10**9}
    section = {"type": "qwen3_vl", "model_path": "some/base", **bounds, **policy}
    messages: list[str] = PLUGINS[config.type].problems(config, run_config(policy=section))
    return messages


def job_of(name: str, index: int = 0, noise_seed: int = 3) -> RenderJob:
    """`index`: one of three prompts of different length; all have the same picture."""
    if name == "sd3":
        return tiny_sd3.make_job(tiny_sd3.PROMPTS[index], noise_seed)
    if name == "qwen_image_21":
        tiny = tiny_qwen_image_21
        return tiny.make_group([tiny.WORDS[index]], tiny.references(1), noise_seed, "blurry")[0]
    length, picture = (9, 14, 11)[index], make_picture(0)
    return make_job(picture, length, noise_seed, states_seed=index, negative_length=5)


def draw(name: str, loop: Any, *jobs: RenderJob) -> torch.Tensor:
    """The pictures of the jobs, drawn in one batch: [B, C, H, W] in 0..1."""
    drawn: torch.Tensor = MODELS[name].render_floats(loop, jobs or [job_of(name)])
    return drawn


def num_parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("plugin", "pipeline", "num_pictures", "area_px"),
    [
        (QwenImageEdit, QwenImageEditPipeline, 1, 1024 * 1024),
        (QwenImageEditPlus, QwenImageEditPlusPipeline, 1, 384 * 384),
        (QwenImageEditPlus, QwenImageEditPlusPipeline, 3, 384 * 384),
    ],
)
def test_editors_use_the_prompts_of_their_stock_pipelines(
    plugin: Any, pipeline: type, num_pictures: int, area_px: int
) -> None:
    stock = tiny_editor.stock_pipeline(tiny_editor.make_stock(), pipeline)
    template = plugin.prompt_template(plugin.Config(type="x"))
    text = for_pictures(template, num_pictures).text
    ours = text.replace("{image}", PICTURE_TOKENS).replace("{instruction}", "make it blue")
    # `_get_qwen_prompt_embeds` of Edit-Plus puts this label before every picture.
    labels = [f"Picture {number}: {PICTURE_TOKENS}" for number in range(1, num_pictures + 1)]
    instruction = "make it blue" if plugin is QwenImageEdit else "".join(labels) + "make it blue"
    assert ours == stock.prompt_template_encode.format(instruction)
    assert template.image_area_px == area_px
    assert template.text.startswith(template.drop_prefix)
    assert template.drop_prefix.endswith("<|im_end|>\n<|im_start|>user\n")
    assert template.text.count("<|im_start|>user\n") == 1


def test_no_negative_prompt_without_guidance() -> None:
    assert QwenImageEdit.negative_prompt(config_of("qwen_image_edit")) is None
    guided = config_of("qwen_image_edit", true_cfg_scale=2.5, negative_prompt="blurry")
    assert QwenImageEdit.negative_prompt(guided) == "blurry"


@pytest.mark.parametrize("area", [64 * 64, 384 * 384, 512 * 512, 1024 * 1024])
@pytest.mark.parametrize("size", [(64, 64), (640, 427), (427, 640), (3000, 1000), (1, 1)])
def test_sizes_follow_the_stock_pipeline(area: int, size: tuple[int, int]) -> None:
    assert size_of_area(*size, area, 32) == calculate_dimensions(area, size[0] / size[1])[:2]


def test_a_very_wide_picture_keeps_a_row_of_patches() -> None:
    assert calculate_dimensions(64 * 64, 100)[:2] == (640, 0)
    assert size_of_area(1000, 10, 64 * 64, 32) == (640, 32)


def test_a_fixed_size_overrides_the_area() -> None:
    config = config_of("qwen_image_edit", height_px=48, width_px=80)
    job = make_job(None, 1, 0)
    assert qwen_image_config.output_size(config, job) == (80, 48)


@pytest.mark.parametrize(
    ("name", "changes", "parts"),
    [
        (EDIT, {"height_px": 512}, "set both"),
        (EDIT, {"height_px": 500, "width_px": 512}, "height_px: 500 ... 16 ... 496"),
        (EDIT, {"lora_path": "/no/such/file"}, "/no/such/file"),
        (IMAGE_21, {"height_px": 48, "width_px": 64}, "height_px: 48 ... 32; try 64"),
        (IMAGE_21, {"policy_image_area_px": 1024}, "policy_image_area_px: 1024 ... condition"),
        ("sd3", {"height_px": 500}, "height_px: 500 ... 16; try 496"),
        ("sd3", {"width_px": 1000}, "width_px: 1000 ... 16; try 992"),
    ],
)
def test_each_config_problem_is_named(
    folders: dict[str, Path], name: str, changes: dict[str, object], parts: str
) -> None:
    (problem,) = problems(config_of(name, folders[name], **changes))
    assert holds(problem, parts), problem


@pytest.mark.parametrize(
    ("bounds", "parts"),
    [
        ({"image_max_pixels": 512}, "policy.image_max_pixels is 512"),
        ({"image_min_pixels": 65536}, "policy.image_min_pixels is 65536"),
    ],
)
def test_a_policy_that_scales_the_pictures_of_image_21_is_named(
    folders: dict[str, Path], bounds: dict[str, object], parts: str
) -> None:
    (problem,) = problems(config_of(IMAGE_21, folders[IMAGE_21]), **bounds)
    assert holds(problem, parts), problem


@pytest.mark.parametrize("name", PLUGINS)
def test_valid_configs_have_no_problem(folders: dict[str, Path], name: str) -> None:
    config = config_of(name, folders[name])
    assert problems(config) == problems(config_of(name)) == []
    assert list(model_problems(PLUGINS[name].models(config))) == []


@pytest.mark.parametrize(
    ("name", "typo"),
    [(EDIT, {"fp8": "compute"}), (EDIT, {"scheduler_overrides": {"base_shift": None}})],
)
def test_bad_values_are_refused(name: str, typo: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(typo))):
        config_of(name, **typo)


def test_parameters_are_counted_from_the_folder(folders: dict[str, Path]) -> None:
    """Counts what is on the device: without the editor's modulation (two blocks of two [192, 32]
    layers), but with SD3's table of positions, which is a buffer."""
    modulation = 2 * 2 * 192 * (32 + 1)
    edit, image_21 = tiny_editor.make_stock(), tiny_qwen_image_21.make_stock()
    sd3 = tiny_sd3.make_parts()
    expected = {
        EDIT: {"transformer": num_parameters(edit.transformer) - modulation, "vae": edit.vae},
        IMAGE_21: {"transformer": image_21.transformer, "vae": image_21.vae},
        "sd3": {
            "transformer": num_parameters(sd3.transformer)
            + sd3.transformer.pos_embed.pos_embed.numel(),
            "text_encoder": sd3.text_encoder,
            "text_encoder_2": sd3.text_encoder_2,
            "text_encoder_3": sd3.text_encoder_3,
            "vae": sd3.vae,
        },
    }
    for name, parts in expected.items():
        counts = PLUGINS[name].cost(config_of(name, folders[name])).weights
        assert counts == {
            part: one if isinstance(one, int) else num_parameters(one)
            for part, one in parts.items()
        }
        assert PLUGINS[name].cost(config_of(name)).weights == {}
    assert QwenImageEdit.cost(config_of(EDIT, folders[EDIT])).host_weights == modulation
    assert QwenImageEdit.cost(config_of(EDIT)).host_weights == 0


def test_with_a_fused_adapter_ranks_do_not_share_host_parameters() -> None:
    for lora_path, shares in ((None, True), ("lightx2v/Qwen-Image-Lightning", False)):
        config = config_of(EDIT, lora_path=lora_path)
        assert QwenImageEdit.cost(config).host_shared == shares


def test_sd3_activations_grow_with_guidance_and_batch_size() -> None:
    large_path = {"model_path": "stabilityai/stable-diffusion-3.5-large"}
    base, unguided, two, large = (
        SD3.cost(SD3.Config(type="sd3", **changes)).activations
        for changes in ({}, {"guidance_scale": 1.0}, {"batch_size": 16}, large_path)
    )
    assert unguided["transformer"] == base["transformer"] / 2
    assert two["transformer"] == 2 * base["transformer"] and two["vae"] == base["vae"]
    # 16 rows of 4096 picture tokens and 333 text tokens
    assert base["transformer"] == 14 * 1536 * 16 * (4096 + 77 + 256)
    assert large["transformer"] == 14 * 2432 * 16 * (4096 + 77 + 256)


@pytest.mark.parametrize("name", PLUGINS)
def test_a_loaded_checkpoint_draws_the_same_picture_as_the_saved_model(
    folders: dict[str, Path], name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    loaded = load(config_of(name, folders[name]))
    assert "Loading weights" not in capfd.readouterr().err
    parts = MODELS[name].make_parts()
    assert apart(draw(name, loaded), draw(name, MODELS[name].make_renderer(parts))) <= PICTURE_TOL
    modules = [loaded.parts.transformer, loaded.parts.vae]
    if name == "sd3":
        modules += [
            loaded.parts.text_encoder,
            loaded.parts.text_encoder_2,
            loaded.parts.text_encoder_3,
        ]
    for module in modules:
        assert not module.training and not any(p.requires_grad for p in module.parameters())


def test_without_use_t5_no_file_of_the_third_encoder_is_needed(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "sd3"
    shutil.copytree(folders["sd3"], folder)
    for part in ("text_encoder_3", "tokenizer_3"):
        shutil.rmtree(folder / part)
    (problem,) = model_problems(SD3.models(config_of("sd3", folder)))
    assert holds(problem, "lacks text_encoder_3/config.json, text_encoder_3/model.safetensors")
    config = config_of("sd3", folder, use_t5=False, dtype="bfloat16")
    assert list(model_problems(SD3.models(config))) == []
    assert "text_encoder_3" not in SD3.cost(config).weights
    ((_, picture),) = load(config).render([job_of("sd3")])
    assert picture.size == (64, 64)


@pytest.mark.parametrize(
    ("name", "guidance"), [(EDIT, {}), (EDIT, {"true_cfg_scale": 4.0}), (IMAGE_21, {}), ("sd3", {})]
)
def test_a_picture_depends_only_on_its_job(name: str, guidance: dict[str, object]) -> None:
    """It depends neither on the batch nor on pictures drawn before, even by another loop."""
    parts = MODELS[name].make_parts()
    sigmas_before = parts.scheduler.sigmas.clone()
    loop = MODELS[name].make_renderer(parts, **guidance)
    jobs = [job_of(name, index, seed) for index, seed in ((0, 3), (1, 2**63 - 1), (2, 5), (0, 4))]
    together = draw(name, loop, *jobs)
    draw(name, MODELS[name].make_renderer(parts, num_steps=2), jobs[0])
    alone = torch.cat([draw(name, loop, job) for job in jobs])
    assert apart(together, alone) <= PICTURE_TOL
    if name != "sd3":  # its pipeline sets its scheduler's steps anew
        assert torch.equal(parts.scheduler.sigmas, sigmas_before)
    assert apart(together[0], together[1]) > 1e-2, "another prompt"
    assert apart(together[0], together[3]) > 1e-2, "another noise"


@pytest.mark.parametrize("name", [EDIT, "sd3"])
def test_a_device_in_the_config_overrides_the_default(folders: dict[str, Path], name: str) -> None:
    for device, expected in (("auto", "cpu"), ("meta", "meta")):
        config = config_of(name, folders[name]).model_copy(update={"device": device})
        parts = load(config).parts
        modules = [parts.transformer]
        modules += (
            [parts.vae.mean]
            if name == EDIT
            else [parts.vae, parts.text_encoder, parts.text_encoder_2]
        )
        assert {module.device.type for module in modules} == {expected}


@pytest.mark.parametrize(
    ("name", "pipeline"), [(EDIT, QwenImageEditPipeline), (IMAGE_21, QwenImage21Pipeline)]
)
def test_an_adapter_is_fused(
    folders: dict[str, Path], tmp_path: Path, name: str, pipeline: Any
) -> None:
    parts = MODELS[name].make_parts()
    lora = LoraConfig(r=2, lora_alpha=4, target_modules=["to_q", "to_v"])
    parts.transformer.add_adapter(lora)
    generator = torch.Generator().manual_seed(1)
    for key, parameter in parts.transformer.named_parameters():
        if "lora_" in key:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    file = "few_steps.safetensors"
    pipeline.save_lora_weights(
        tmp_path,
        transformer_lora_layers=get_peft_model_state_dict(parts.transformer),
        transformer_lora_adapter_metadata=lora.to_dict(),
        weight_name=file,
    )
    config = config_of(name, folders[name], lora_path=str(tmp_path), lora_weight_name=file)
    fused = draw(name, load(config))
    assert apart(fused, draw(name, MODELS[name].make_renderer(parts))) <= PICTURE_TOL
    assert apart(fused, draw(name, load(config_of(name, folders[name])))) > 1e-2


@pytest.mark.parametrize("name", [EDIT, IMAGE_21])
def test_scheduler_overrides_are_applied(folders: dict[str, Path], name: str) -> None:
    overrides = {"max_shift": 1.5, "shift_terminal": None}
    config = config_of(name, folders[name], scheduler_overrides=overrides)
    kept = load(config_of(name, folders[name])).parts.scheduler.config
    assert dict(load(config).parts.scheduler.config) == dict(kept) | overrides


def test_the_renderer_none_renders_nothing() -> None:
    renderer = none.NoRenderer(PluginConfig(), CPU)
    jobs = [make_job(None, 3, noise_seed=0)] * 3
    assert list(renderer.render(jobs)) == [(0, None), (1, None), (2, None)]
    assert (none.NoRenderer.accepts, none.NoRenderer.makes_images) == ("text", False)
    assert none.NoRenderer.prompt_template(PluginConfig()) is None
