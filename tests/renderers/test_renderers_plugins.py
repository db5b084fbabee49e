"""The renderer plugins: config checks, parameter counts, and loading from a folder."""

from __future__ import annotations

import json
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
from tiny_messages import holds, raising
from tiny_pictures import make_picture, render_alone, render_floats
from tiny_rounding import PICTURE_TOL, apart
from tiny_run import run_config

from rl.api.plugin import PluginConfig, Resources
from rl.api.types import RenderJob
from rl.files import size_of_area
from rl.model_files import model_problems
from rl.policies.prompting import PICTURE as PICTURE_TOKENS
from rl.policies.prompting import for_pictures
from rl.renderers import none
from rl.renderers.qwen_image_21 import QwenImage21
from rl.renderers.qwen_image_edit import QwenImageEdit, QwenImageEditPlus
from rl.renderers.sd3 import SD3

Folders = dict[str, Path]
EDIT, IMAGE_21 = "qwen_image_edit", "qwen_image_21"
PLUGINS: dict[str, Any] = {EDIT: QwenImageEdit, IMAGE_21: QwenImage21, "sd3": SD3}
MODELS: dict[str, Any] = {EDIT: tiny_editor, IMAGE_21: tiny_qwen_image_21, "sd3": tiny_sd3}
CPU = Resources(None, "cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
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


def problems(
    name: str, path: Path | str = "owner/unknown", policy: Any = (), **changes: object
) -> list[str]:
    """`policy`: config keys of the policy, which by default accepts pictures of any size."""
    bounds = {"image_min_pixels": 1, "image_max_pixels": 10**9}
    section = {"type": "qwen3_vl", "model_path": "some/base", **bounds, **dict(policy)}
    config = config_of(name, path, **changes)
    return list(PLUGINS[name].problems(config, run_config(policy=section)))


def job_of(name: str, index: int = 0, noise_seed: int = 3) -> RenderJob:
    """`index`: one of three prompts of different length; all have the same picture."""
    if name == "sd3":
        return tiny_sd3.make_job(tiny_sd3.PROMPTS[index], noise_seed)
    if name == IMAGE_21:
        words, sources = tiny_qwen_image_21.WORDS[index], tiny_qwen_image_21.references(1)
        return tiny_qwen_image_21.make_group([words], sources, noise_seed, "blurry")[0]
    length = (9, 14, 11)[index]
    return make_job(make_picture(0), length, noise_seed, states_seed=index, negative_length=5)


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("plugin", "pipeline", "num_labels", "area_px"),
    [
        (QwenImageEdit, QwenImageEditPipeline, 0, 1024 * 1024),
        (QwenImageEditPlus, QwenImageEditPlusPipeline, 1, 384 * 384),
        (QwenImageEditPlus, QwenImageEditPlusPipeline, 3, 384 * 384),
    ],
)
def test_editors_use_the_prompts_of_their_stock_pipelines(
    plugin: Any, pipeline: type, num_labels: int, area_px: int
) -> None:
    """`_get_qwen_prompt_embeds` of Edit-Plus puts a label before every picture."""
    stock = tiny_editor.stock_pipeline(tiny_editor.make_stock(), pipeline)
    template = plugin.prompt_template(plugin.Config(type="x"))
    text = for_pictures(template, max(1, num_labels)).text
    labels = [f"Picture {number}: {PICTURE_TOKENS}" for number in range(1, num_labels + 1)]
    expected = stock.prompt_template_encode.format("".join(labels) + "{instruction}")
    assert text.replace("{image}", PICTURE_TOKENS) == expected
    assert template.image_area_px == area_px
    assert template.text.startswith(template.drop_prefix)
    assert template.drop_prefix.endswith("<|im_end|>\n<|im_start|>user\n")
    assert template.text.count("<|im_start|>user\n") == 1


@pytest.mark.parametrize(("scale", "prompt"), [(1.0, None), (2.5, "blurry")])
def test_no_negative_prompt_without_guidance(scale: float, prompt: str | None) -> None:
    config = config_of(EDIT, true_cfg_scale=scale, negative_prompt="blurry")
    assert QwenImageEdit.negative_prompt(config) == prompt


@pytest.mark.parametrize("area", [64 * 64, 384 * 384, 512 * 512, 1024 * 1024])
@pytest.mark.parametrize("size", [(64, 64), (640, 427), (427, 640), (3000, 1000), (1, 1)])
def test_sizes_follow_the_stock_pipeline(area: int, size: tuple[int, int]) -> None:
    assert size_of_area(*size, area, 32) == calculate_dimensions(area, size[0] / size[1])[:2]


def test_a_very_wide_picture_keeps_a_row_of_patches() -> None:
    assert calculate_dimensions(64 * 64, 100)[:2] == (640, 0)
    assert size_of_area(1000, 10, 64 * 64, 32) == (640, 32)


@pytest.mark.parametrize(
    ("name", "changes", "parts"),
    [
        (EDIT, {"height_px": 512}, "set both"),
        (EDIT, {"lora_path": "/no/such/file"}, "/no/such/file"),
        (IMAGE_21, {"policy_image_area_px": 1024}, "policy_image_area_px: 1024 ... condition"),
        (IMAGE_21, {"policy": {"image_max_pixels": 512}}, "policy.image_max_pixels is 512"),
        (IMAGE_21, {"policy": {"image_min_pixels": 65536}}, "policy.image_min_pixels is 65536"),
    ],
)
def test_each_config_problem_is_named(
    folders: Folders, name: str, changes: dict[str, Any], parts: str
) -> None:
    (problem,) = problems(name, folders[name], **changes)
    assert holds(problem, parts), problem


@pytest.mark.parametrize("name", PLUGINS)
def test_valid_configs_have_no_problem(folders: Folders, name: str) -> None:
    assert problems(name, folders[name]) == problems(name) == []
    assert list(model_problems(PLUGINS[name].models(config_of(name, folders[name])))) == []


@pytest.mark.parametrize(
    ("name", "key", "value", "parts"),
    [
        (EDIT, "fp8", "compute", ""),
        (EDIT, "scheduler_overrides", {"base_shift": None}, ""),
        (EDIT, "height_px", 500, "multiple of 16"),
        (IMAGE_21, "width_px", 48, "multiple of 32"),
        ("sd3", "height_px", 500, "multiple of 16"),
    ],
)
def test_bad_values_are_refused(name: str, key: str, value: object, parts: str) -> None:
    with raising(ValidationError, f"{key} ... {parts}"):
        config_of(name, **{key: value})


def test_parameters_are_counted_from_the_folder(folders: Folders) -> None:
    """Counts what is on the device: without the editor's modulation (two blocks of two [192, 32]
    layers), but with SD3's table of positions, which is a buffer."""
    modulation, sd3 = 2 * 2 * 192 * (32 + 1), tiny_sd3.make_parts()
    for name, parts, more in (
        (EDIT, tiny_editor.make_stock(), -modulation),
        (IMAGE_21, tiny_qwen_image_21.make_stock(), 0),
        ("sd3", sd3, sd3.transformer.pos_embed.pos_embed.numel()),
    ):
        config = config_of(name, folders[name])
        counts = {part: count(getattr(parts, part)) for part in PLUGINS[name].part_sizes(config)}
        counts["transformer"] += more
        assert PLUGINS[name].cost(config).weights == counts
        assert PLUGINS[name].cost(config_of(name)).weights == {}
    assert QwenImageEdit.cost(config_of(EDIT, folders[EDIT])).host_weights == modulation
    assert QwenImageEdit.cost(config_of(EDIT)).host_weights == 0


def test_with_a_fused_adapter_ranks_do_not_share_host_parameters() -> None:
    for lora_path, shares in ((None, True), ("lightx2v/Qwen-Image-Lightning", False)):
        assert QwenImageEdit.cost(config_of(EDIT, lora_path=lora_path)).host_shared == shares


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
    folders: Folders, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    loaded, tiny = load(config_of(name, folders[name])), MODELS[name]
    assert "Loading weights" not in capfd.readouterr().err
    saved = tiny.make_renderer(tiny.make_parts())
    assert apart(*(render_floats(loop, [job_of(name)]) for loop in (loaded, saved))) <= PICTURE_TOL
    for part in PLUGINS[name].part_sizes(loaded.config):
        module = getattr(loaded.parts, part)
        assert not module.training and not any(p.requires_grad for p in module.parameters())


def test_without_use_t5_no_file_of_the_third_encoder_is_needed(
    folders: Folders, tmp_path: Path
) -> None:
    folder = tmp_path / "sd3"
    shutil.copytree(folders["sd3"], folder, ignore=shutil.ignore_patterns("*_3"))
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
    tiny = MODELS[name]
    parts = tiny.make_parts()
    sigmas_before = parts.scheduler.sigmas.clone()
    loop = tiny.make_renderer(parts, **guidance)
    jobs = [job_of(name, index, seed) for index, seed in ((0, 3), (1, 2**63 - 1), (2, 5), (0, 4))]
    together = render_floats(loop, jobs)
    render_floats(tiny.make_renderer(parts, num_steps=2), jobs[:1])
    assert apart(together, render_alone(loop, jobs)) <= PICTURE_TOL
    if name != "sd3":  # its pipeline sets its scheduler's steps anew
        assert torch.equal(parts.scheduler.sigmas, sigmas_before)
    assert apart(together[0], together[1]) > 1e-2, "another prompt"
    assert apart(together[0], together[3]) > 1e-2, "another noise"


@pytest.mark.parametrize(("device", "expected"), [("auto", "cpu"), ("meta", "meta")])
def test_a_device_in_the_config_overrides_the_default(
    folders: Folders, device: str, expected: str
) -> None:
    config = config_of("sd3", folders["sd3"]).model_copy(update={"device": device})
    parts = load(config).parts
    assert {getattr(parts, part).device.type for part in SD3.part_sizes(config)} == {expected}


@pytest.mark.parametrize(
    ("name", "pipeline"), [(EDIT, QwenImageEditPipeline), (IMAGE_21, QwenImage21Pipeline)]
)
def test_an_adapter_is_fused(folders: Folders, tmp_path: Path, name: str, pipeline: Any) -> None:
    parts = MODELS[name].make_parts()
    lora = LoraConfig(r=2, lora_alpha=4, target_modules=["to_q", "to_v"])
    parts.transformer.add_adapter(lora)
    for key, parameter in parts.transformer.named_parameters():
        if "lora_" in key:
            parameter.data = 0.3 * torch.randn_like(parameter)
    file = "few_steps.safetensors"
    pipeline.save_lora_weights(
        tmp_path,
        transformer_lora_layers=get_peft_model_state_dict(parts.transformer),
        transformer_lora_adapter_metadata=lora.to_dict(),
        weight_name=file,
    )
    fused, without, expected = (
        render_floats(loop, [job_of(name)])
        for loop in (
            load(config_of(name, folders[name], lora_path=str(tmp_path), lora_weight_name=file)),
            load(config_of(name, folders[name])),
            MODELS[name].make_renderer(parts),
        )
    )
    assert apart(fused, expected) <= PICTURE_TOL
    assert apart(fused, without) > 1e-2


@pytest.mark.parametrize("name", [EDIT, IMAGE_21])
def test_scheduler_overrides_are_applied(folders: Folders, name: str) -> None:
    overrides = {"max_shift": 1.5, "shift_terminal": None}
    config = config_of(name, folders[name], scheduler_overrides=overrides)
    kept = load(config_of(name, folders[name])).parts.scheduler.config
    assert dict(load(config).parts.scheduler.config) == dict(kept) | overrides


def test_the_renderer_none_renders_nothing() -> None:
    renderer = none.NoRenderer(PluginConfig(), CPU)
    assert list(renderer.render([make_job(None, 3)] * 3)) == [(0, None), (1, None), (2, None)]
    assert (none.NoRenderer.accepts, none.NoRenderer.makes_images) == ("text", False)
    assert none.NoRenderer.prompt_template(PluginConfig()) is None


# --- Qwen-Image-2.1 ----------------------------------------------------------------------------


def test_the_width_of_the_states_is_read_from_the_transformer(folders: Folders) -> None:
    width = tiny_qwen_image_21.STATE_DIM
    for config, expected in (
        (config_of(IMAGE_21, folders[IMAGE_21]), width),
        (QwenImage21.Config(type="x"), 4096),
        (config_of(IMAGE_21), None),
    ):
        assert QwenImage21.state_dim_of(config) == expected
    assert QwenImage21(config_of(IMAGE_21, folders[IMAGE_21]), CPU).state_dim == width


def test_it_draws_from_text_or_up_to_ten_pictures() -> None:
    template = QwenImage21.prompt_template(config_of(IMAGE_21))
    assert (template.max_pictures, template.needs_picture) == (10, False)


def test_the_memory_plan_counts_the_keys_of_the_sources() -> None:
    """A source of 1024^2 px has 4096 tokens; keys and values of a token are 32 layers x 2 x 4096 x
    2 bytes in bfloat16, so 2.15 GB per source; guidance doubles them."""

    def bytes_of(**changes: object) -> float:
        config = QwenImage21.Config(type="x", batch_size=1, **changes)
        return 2 * QwenImage21.cost(config).activations["transformer"]

    keys, forward = 4096 * 32 * 2 * 4096 * 2, 18 * 4096 * 4096 * 2
    assert bytes_of(max_pictures=3) - bytes_of(max_pictures=2) == keys + forward
    guided = bytes_of(max_pictures=1, true_cfg_scale=2.0)
    text_keys = 512 * 32 * 2 * 4096 * 2
    # Positive and negative rows have a forward each, so that its memory does not double.
    assert guided - bytes_of(max_pictures=1) == keys + text_keys


def test_a_few_step_checkpoint_contains_its_sigmas(folders: Folders, tmp_path: Path) -> None:
    shutil.copytree(folders[IMAGE_21], tmp_path, dirs_exist_ok=True)

    def write(levels: object) -> None:
        index = {"_class_name": "QwenImage21Pipeline", "sample_sigmas": levels}
        (tmp_path / "model_index.json").write_text(json.dumps(index))

    write([1.0, 0.8, 0.3])
    (problem,) = problems(IMAGE_21, tmp_path)
    assert holds(problem, "num_steps: 4 ... 3 sample_sigmas ... num_steps: 3")
    with pytest.raises(ValueError, match=r"renderer\.num_steps: 4"):
        load(config_of(IMAGE_21, tmp_path))
    assert load(config_of(IMAGE_21, tmp_path, num_steps=3)).parts.sigmas == (1.0, 0.8, 0.3)
    write("low")
    (problem,) = problems(IMAGE_21, tmp_path)
    assert holds(problem, "sample_sigmas ... (0, 1]")
