"""The sd3 plug as a config sees it: light, checked, and loadable from a folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tiny_sd3
from pydantic import ValidationError
from tiny_pictures import as_floats
from tiny_rounding import PICTURE, apart
from tiny_sd3 import TINY, make_jobs

from rl.api.plug import Resources
from rl.config.messages import sections
from rl.files.model_files import model_problems
from rl.renderers.sd3 import plug as sd3


@pytest.fixture(scope="module")
def sd3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sd3")
    tiny_sd3.save_sd3(tiny_sd3.make_parts(), folder)
    return folder


def make_config(folder: Path, **changes: object) -> sd3.Config:
    return sd3.Config(**{**TINY, "model_path": str(folder), **changes})


def test_a_saved_pipeline_is_what_was_saved(sd3_folder: Path, capfd) -> None:
    capfd.readouterr()
    loaded = sd3.SD3(make_config(sd3_folder), Resources(None, "cpu")).loop
    assert "Loading weights" not in capfd.readouterr().err
    direct = tiny_sd3.make_renderer(tiny_sd3.make_parts())
    jobs = make_jobs()[:1]
    drawn, expected = (as_floats(loop.render_tensor(jobs)) for loop in (loaded, direct))
    assert apart(drawn, expected) <= PICTURE
    modules = [loaded.parts.transformer, loaded.parts.vae, *loaded.parts.text.encoders]
    assert loaded.parts.text.encoder_3 is not None
    for module in [*modules, loaded.parts.text.encoder_3]:
        assert not module.training and not any(p.requires_grad for p in module.parameters())


def test_the_third_encoder_is_not_even_looked_for(sd3_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sd3"
    shutil.copytree(sd3_folder, folder)
    for part in ("text_encoder_3", "tokenizer_3"):
        shutil.rmtree(folder / part)
    (problem,) = model_problems(sd3.SD3.models(make_config(folder)))
    assert "lacks text_encoder_3/config.json, text_encoder_3/model.safetensors" in problem
    config = make_config(folder, use_t5=False)
    assert list(model_problems(sd3.SD3.models(config))) == []
    assert list(model_problems(sd3.SD3.models(make_config(sd3_folder)))) == []
    assert "text_encoder_3" not in sd3.SD3.parameter_counts(config)
    ((_, picture),) = sd3.SD3(config, Resources(None, "cpu")).render(make_jobs()[:1])
    assert picture.size == (64, 64)


def test_scheduler_keys_are_replaced(sd3_folder: Path) -> None:
    config = make_config(sd3_folder, scheduler_overrides={"shift": 1.0})
    assert sd3.SD3(config, Resources(None, "cpu")).loop.parts.scheduler.config.shift == 1.0
    assert (
        sd3.SD3(make_config(sd3_folder), Resources(None, "cpu")).loop.parts.scheduler.config.shift
        == 3.0
    )


def test_the_device_of_the_config_wins(sd3_folder: Path) -> None:
    for device, expected in (("auto", "cpu"), ("meta", "meta")):
        parts = sd3.SD3(make_config(sd3_folder, device=device), Resources(None, "cpu")).loop.parts
        for module in (parts.transformer, parts.vae, *parts.text.encoders, parts.text.encoder_3):
            assert module.device.type == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_precisions_render(sd3_folder: Path, dtype: str) -> None:
    ((_, picture),) = sd3.SD3(make_config(sd3_folder, dtype=dtype), Resources(None, "cpu")).render(
        make_jobs()[:1]
    )
    assert picture.size == (64, 64)


def test_parameters_are_counted_from_the_folder(sd3_folder: Path) -> None:
    parts = tiny_sd3.make_parts()
    modules = {
        "transformer": parts.transformer,
        "text_encoder": parts.text.encoders[0],
        "text_encoder_2": parts.text.encoders[1],
        "text_encoder_3": parts.text.encoder_3,
        "vae": parts.vae,
    }
    expected = {
        name: sum(parameter.numel() for parameter in module.parameters())
        for name, module in modules.items()
    }
    # A table of positions, resident though no parameter.
    expected["transformer"] += parts.transformer.pos_embed.pos_embed.numel()
    assert sd3.SD3.parameter_counts(make_config(sd3_folder)) == expected
    assert sd3.SD3.parameter_counts(make_config(Path("owner/unknown"))) == {}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"height_px": 500}, "height_px: 500 is not a multiple of 16; try 496"),
        ({"width_px": 1000}, "width_px: 1000 is not a multiple of 16; try 992"),
    ],
)
def test_each_problem_is_named(sd3_folder: Path, changes: dict[str, object], named: str) -> None:
    (problem,) = sd3.SD3.problems(make_config(sd3_folder, **changes), None)
    assert named in problem
    assert sd3.SD3.problems(make_config(sd3_folder), None) == []


@pytest.mark.parametrize(
    "typo",
    [
        {"num_step": 4},
        {"guidance_scale": 0.5},
        {"max_t5_tokens": 513},
        {"dtype": "fp16"},
        {"max_memory_gb": 0},
    ],
)
def test_bad_values_are_refused(sd3_folder: Path, typo: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(typo))):
        make_config(sd3_folder, **typo)


def test_every_key_is_documented() -> None:
    for _, section in sections(sd3.Config):
        assert all(field.description for field in section.model_fields.values())


def test_activations_grow_with_what_makes_them_grow() -> None:
    base = sd3.SD3.activation_counts(sd3.Config(type="sd3"))
    unguided = sd3.SD3.activation_counts(sd3.Config(type="sd3", guidance_scale=1.0))
    assert unguided["transformer"] == base["transformer"] / 2
    two = sd3.SD3.activation_counts(sd3.Config(type="sd3", batch_size=16))
    assert two["transformer"] == 2 * base["transformer"] and two["vae"] == base["vae"]
    # 16 rows of 4096 picture and 333 text tokens
    assert base["transformer"] == 20 * 1536 * 16 * (4096 + 77 + 256)
