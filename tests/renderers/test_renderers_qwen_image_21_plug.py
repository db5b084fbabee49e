"""The `qwen_image_21` plug as a config sees it: light, checked, and loadable from a folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny_qwen_image_21 as tiny
import torch
from peft import LoraConfig, get_peft_model_state_dict
from pydantic import ValidationError
from tiny_messages import names
from tiny_qwen_image_21 import make_job, references, render_floats
from tiny_rounding import PICTURE, apart
from tiny_run import run_config

from rl.api.plug import Resources
from rl.api.types import Sample
from rl.config.messages import sections
from rl.files.model_files import model_problems
from rl.policies.shared.prompting import PICTURE as BRACKET
from rl.policies.shared.prompting import for_pictures
from rl.renderers.qwen_image_21.config import Config, condition_sizes
from rl.renderers.qwen_image_21.loop import QwenImage21Loop
from rl.renderers.qwen_image_21.plug import QwenImage21
from rl.renderers.qwen_image_21.welded import areas_px

PROCESSOR_BOUNDS = {"image_min_pixels": 1, "image_max_pixels": 10**9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("image21")
    tiny.make_stock().save(folder)
    return folder


def make_config(path: Path | str, **changes: object) -> Config:
    return Config(**{**tiny.TINY, "model_path": str(path), **changes})


def problems(config: Config, **policy: object) -> list[str]:
    section = {"type": "qwen3_vl", "model_path": "some/base", **PROCESSOR_BOUNDS, **policy}
    return QwenImage21.problems(config, run_config(policy=section))


def load(config: Config) -> QwenImage21Loop:
    return QwenImage21(config, Resources(None, "cpu")).loop


@pytest.mark.parametrize("number", [0, 1, 3])
def test_it_asks_as_the_stock_pipeline_does(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    pipeline = tiny.stock_pipeline(tiny.make_stock())
    asked: list[str] = []
    processor = pipeline.processor

    def noting(text: list[str], **more: Any) -> Any:
        asked.extend(text)
        return processor(text=text, **more)

    monkeypatch.setattr(pipeline, "processor", noting)
    pipeline._get_qwen_prompt_embeds("make it blue", references(number) or None)
    template = QwenImage21.prompt_template(make_config("x"))
    shown = for_pictures(template, number).text
    ours = shown.replace("{image}", BRACKET).replace("{instruction}", "make it blue")
    assert [ours] == asked
    tokenizer = tiny.make_encoder()[1].tokenizer
    assert len(tokenizer(template.drop_prefix).input_ids) == pipeline._drop_idx
    assert ours.startswith(template.drop_prefix)
    assert (template.max_pictures, template.needs_picture) == (10, False)


def test_every_key_is_documented() -> None:
    for _, section in sections(Config):
        assert all(field.description for field in section.model_fields.values())


def test_a_sound_config_has_no_problem(folder: Path) -> None:
    config = make_config(folder)
    assert problems(config) == []
    assert list(model_problems(QwenImage21.models(config))) == []
    assert problems(Config(type="qwen_image_21"), image_min_pixels=None) == []


def test_a_folder_of_another_model_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "transformer").mkdir()
    stated = json.loads((folder / "transformer" / "config.json").read_text())
    stated["_class_name"] = "QwenImageTransformer2DModel"
    (tmp_path / "transformer" / "config.json").write_text(json.dumps(stated))
    found = list(model_problems(QwenImage21.models(make_config(tmp_path))))
    assert any("only 'QwenImage21Transformer2DModel' can" in problem for problem in found), found


@pytest.mark.parametrize(
    ("changes", "policy", "named"),
    [
        ({"policy_image_area_px": 32 * 32}, {}, "policy_image_area_px: 1024, but condition_area"),
        ({"height_px": 48, "width_px": 64}, {}, "height_px: 48 is not a multiple of 32; try 64"),
        ({}, {"image_max_pixels": 4096}, r"policy.image_max_pixels is 4096, and the policy would"),
        ({}, {"image_min_pixels": None}, r"own image_min_pixels is 65536.*image_min_pixels: 1024"),
        ({"sigmas": (1.0, 0.5)}, {}, "num_steps: 4, but sigmas are 2; set num_steps: 2"),
        ({"fp8": "compute"}, {}, "fp8: 'compute'"),
    ],
)
def test_each_problem_is_named(
    folder: Path, changes: dict[str, object], policy: dict[str, object], named: str
) -> None:
    (problem,) = problems(make_config(folder, **changes), **policy)
    assert re.search(named, problem), problem


@pytest.mark.parametrize("bad", [(0.5, 1.0), (1.0, 1.0), (), (1.2, 0.5)])
def test_sigmas_that_do_not_fall_are_refused(bad: tuple[float, ...]) -> None:
    with pytest.raises(ValidationError, match="sigmas"):
        make_config("x", sigmas=bad)


@pytest.mark.parametrize("size", [(64, 64), (3000, 1000), (1000, 3000), (2000, 10), (640, 427)])
def test_no_source_is_outside_the_areas_that_are_checked(size: tuple[int, int]) -> None:
    for side in (64, 512, 1024):
        config = make_config("x", condition_area_px=side**2)
        smallest, largest = areas_px(config)
        ((width, height),) = condition_sizes(config, [size])
        assert smallest <= width * height <= largest


def test_it_is_counted_from_the_folder(folder: Path) -> None:
    stock = tiny.make_stock()
    counts = QwenImage21.parameter_counts(make_config(folder))
    assert counts == {
        "transformer": sum(p.numel() for p in stock.transformer.parameters()),
        "vae": sum(p.numel() for p in stock.vae.parameters()),
    }
    assert QwenImage21.state_dim_of(make_config(folder)) == tiny.STATE_DIM
    assert QwenImage21.state_dim_of(Config(type="x")) == 4096
    assert QwenImage21.parameter_counts(make_config("owner/unknown")) == {}


def test_the_plan_counts_the_sources_keys_by_hand() -> None:
    """At 1024^2 in bfloat16, 4096 tokens each: 32 layers x 2 x 4096 x 2 bytes a token, 2.15 GB;
    guidance doubles them."""

    def bytes_of(**changes: object) -> float:
        config = Config(type="x", batch_size=1, **changes)
        return 2 * QwenImage21.activation_counts(config)["transformer"]

    keys, forward = 4096 * 32 * 2 * 4096 * 2, 18 * 4096 * 4096 * 2
    assert bytes_of(max_pictures=3) - bytes_of(max_pictures=2) == keys + forward
    guided = bytes_of(max_pictures=1, true_cfg_scale=2.0, cfg_in_one_forward=False)
    words = 512 * 32 * 2 * 4096 * 2
    assert guided - bytes_of(max_pictures=1) == keys + words + forward


def test_a_checkpoint_loads_and_draws_as_its_parts(folder: Path) -> None:
    job = make_job(tiny.WORDS[0], references(2), 3)
    loaded = load(make_config(folder))
    direct = tiny.make_renderer(tiny.make_stock().ours())
    assert apart(render_floats(loaded, [job]), render_floats(direct, [job])) <= PICTURE
    assert not any(p.requires_grad for p in loaded.parts.transformer.parameters())
    assert not any(p.requires_grad for p in loaded.parts.vae.parameters())
    plug = QwenImage21(make_config(folder), Resources(None, "cpu"))
    assert plug.size_bucket(job.sample) == (64, 64)
    assert plug.size_bucket(Sample("s", "", tuple(references(3)))) == (32, 96)
    assert plug.size_bucket(Sample("s", "")) == (64, 64)
    assert plug.state_dim == tiny.STATE_DIM


def test_a_few_step_checkpoint_brings_its_sigmas(folder: Path, tmp_path: Path) -> None:
    for part in folder.iterdir():
        (tmp_path / part.name).symlink_to(part)
    levels = [1.0, 0.8, 0.3]
    index = {"_class_name": "QwenImage21Pipeline", "sample_sigmas": levels}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    (problem,) = problems(make_config(tmp_path))
    assert names(problem, "num_steps: 4 ... sample_sigmas are 3 ... num_steps: 3")
    with pytest.raises(ValueError, match=r"renderer\.num_steps: 4"):
        load(make_config(tmp_path))
    assert load(make_config(tmp_path, num_steps=3)).parts.sigmas == tuple(levels)
    given = make_config(tmp_path, num_steps=2, sigmas=(1.0, 0.5))
    assert (problems(given), load(given).parts.sigmas) == ([], (1.0, 0.5))
    (tmp_path / "model_index.json").write_text(json.dumps(index | {"sample_sigmas": "low"}))
    (problem,) = problems(make_config(tmp_path))
    assert names(problem, "sample_sigmas ... (0, 1]")


def test_an_adapter_is_fused(folder: Path, tmp_path: Path) -> None:
    from diffusers import QwenImage21Pipeline

    stock = tiny.make_stock()
    lora = LoraConfig(r=2, lora_alpha=4, target_modules=["to_q", "to_v"])
    stock.transformer.add_adapter(lora)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in stock.transformer.named_parameters():
        if "lora_" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    QwenImage21Pipeline.save_lora_weights(
        tmp_path,
        transformer_lora_layers=get_peft_model_state_dict(stock.transformer),
        transformer_lora_adapter_metadata=lora.to_dict(),
        weight_name="few_steps.safetensors",
    )
    job = make_job(tiny.WORDS[0], references(1), 3)
    fused = render_floats(load(make_config(folder, lora_path=str(tmp_path))), [job])
    unfused = render_floats(tiny.make_renderer(stock.ours()), [job])
    assert (fused - unfused).abs().max() <= PICTURE
    assert (fused - render_floats(load(make_config(folder)), [job])).abs().max() > 1e-2


def test_weights_of_8_bits_move_the_picture_and_not_far(folder: Path) -> None:
    job, other = (make_job(words, references(1), 3) for words in tiny.WORDS[:2])
    exact, far = (render_floats(load(make_config(folder)), [one]) for one in (job, other))
    near = render_floats(load(make_config(folder, fp8="storage")), [job])
    assert 0 < (near - exact).abs().mean() < (far - exact).abs().mean() / 2


def test_a_step_that_is_extrapolated_is_not_computed(folder: Path) -> None:
    """Of 8 steps the first three, then each second."""
    loop = load(make_config(folder, num_steps=8, step_cache_interval=2))
    predict, seen = loop._predict, []
    loop._predict = lambda *given: seen.append(1) or predict(*given)  # type: ignore[method-assign]
    render_floats(loop, [make_job(tiny.WORDS[0], [], 3)])
    assert len(seen) == 5
