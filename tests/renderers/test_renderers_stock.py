"""The renderer `diffusers`: stock pipelines called as they are, and what it learns of them."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import _jsonnet
import pytest
import tiny_stock
import torch
from diffusers import Flux2KleinPipeline
from PIL.Image import Image
from tiny_messages import holds, raising
from tiny_pages import printed
from tiny_pictures import make_picture, render_alone, render_floats
from tiny_rounding import PICTURE_TOL, apart
from tiny_stock import make_jobs, make_loop

from rl.api.plugin import Resources
from rl.api.types import RenderFailure, UnusableSampleError
from rl.model_files import model_problems
from rl.renderers.stock_pipeline import StockPipeline, pipelines
from rl.renderers.stock_pipeline_config import INTERFACES, Config

KLEIN = "Flux2KleinPipeline"


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in tiny_stock.OWN_SIZES:
        monkeypatch.setattr(f"diffusers.pipelines.{name}", lambda *_, size=size: size)


@pytest.mark.parametrize("name", tiny_stock.MAKERS)
def test_a_picture_is_the_stock_call_s_and_a_batch_changes_none(name: str) -> None:
    loop = make_loop(name)
    is_single = loop.config.call.together == "one"
    jobs = make_jobs(same_source=loop.config.call.together != "all")
    assert all(isinstance(picture, Image) for _, picture in loop.render(jobs))
    assert loop.config.batch_size == StockPipeline.batch_of(loop.config, jobs[0])[1]
    assert loop.config.batch_size == (1 if is_single else 4)
    alone = render_alone(loop, jobs)
    assert is_single or apart(render_floats(loop, jobs), alone) <= PICTURE_TOL
    [source] = jobs[0].sample.sources
    torch.manual_seed(0)  # of the first job: some draw noise from the global generator
    stock = loop.parts(
        image=source,
        prompt='{"edit_instruction": "make the sky blue"}' if "Fibo" in name else jobs[0].payload,
        generator=torch.Generator().manual_seed(0),
        num_inference_steps=loop.config.num_steps,
        output_type="pt",
        **tiny_stock.stock_arguments(name),
    ).images
    assert apart(alone[:1], stock) <= PICTURE_TOL


SEEDS = itertools.count()
FAULTS: dict[str, Callable[..., Any]] = {
    "another prompt": lambda self, draw, **options: draw(self, **options | {"prompt": "x"}),
    "another source picture": lambda self, draw, **options: draw(
        self, **options | {"image": make_picture(0)}
    ),
    "same seed": lambda self, draw, generator, **options: draw(
        self, generator=generator.manual_seed(next(SEEDS)), **options
    ),
    "2 pictures": lambda self, draw, **options: draw(self, num_images_per_prompt=2, **options),
    "0..1": lambda self, draw, **keys: SimpleNamespace(images=draw(self, **keys).images * 255),
}
"""Word of the message -> a call of a pipeline that ignores the words or the source picture, draws
another picture each time, two pictures, or levels of 0..255; `draw`: the stock call."""


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        *(({}, word) for word in FAULTS),
        ({"arguments": {"strenght": 1.0}}, "strenght"),
        ({"interface": {"tokenizer": "vae"}}, "add_special_tokens"),
    ],
)
def test_a_pipeline_that_cannot_be_trained_on_is_refused(
    changes: dict[str, Any], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if word in FAULTS:
        call: Any = partialmethod(FAULTS[word], Flux2KleinPipeline.__call__)
        monkeypatch.setattr(Flux2KleinPipeline, "__call__", call)
    loop = make_loop(KLEIN, **changes)
    with raising(ValueError, f"renderer.pipeline ... {word}"):
        loop.render(make_jobs())


@pytest.mark.parametrize("batch_size", [2, 3, 4])
def test_a_pipeline_whose_batches_mix_pictures_draws_them_one_by_one(
    batch_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Flux2Klein takes a list of pictures as references for all prompts."""
    loop = make_loop(KLEIN, interface={"together": "all"}, batch_size=batch_size)
    jobs = make_jobs(same_source=False)
    drawn = dict(loop.render(jobs))
    assert "one by one" in caplog.text and loop.config.batch_size == 1
    alone = make_loop(KLEIN)
    assert [drawn[i] for i in range(3)] == [next(iter(alone.render([job])))[1] for job in jobs]


class OfFirst(Flux2KleinPipeline):
    """Reads the first source picture only, and draws a batch from the first seed."""

    def __call__(self, *, image: Any, generator: Any, **options: Any) -> Any:
        first = image[0] if isinstance(image, list) else image
        if isinstance(generator, list):
            generator = [generator[0].clone_state() for _ in generator]
        return super().__call__(image=first, generator=generator, **options)


def test_each_input_counts_in_a_batch_of_two_and_in_several_sources() -> None:
    pipeline = OfFirst(**make_loop(KLEIN).parts.components, is_distilled=True)
    loop = make_loop(KLEIN, pipeline, batch_size=2)
    loop.try_out()
    assert loop.config.batch_size == 1
    with raising(ValueError, "renderer.pipeline ... another source picture"):
        make_loop(KLEIN, pipeline, interface={"max_images": 2}).try_out()


def test_several_source_pictures_are_one_set_of_references() -> None:
    loop, [job, *_] = make_loop(KLEIN, interface={"max_images": 4}), make_jobs()
    several = [
        replace(job, sample=replace(job.sample, sources=tuple(map(make_picture, range(number)))))
        for number in (2, 4, 5)
    ]
    two, four = render_floats(loop, several[:1]), render_floats(loop, several[1:2])
    assert apart(two, four) > 100 * PICTURE_TOL
    loop.try_out()
    [(_, failure)] = loop.render(several[2:])
    assert isinstance(failure, RenderFailure) and "max_images" in failure.reason


def test_a_pipeline_without_its_tokenizer_reports_no_share() -> None:
    loop = make_loop(KLEIN, interface={"tokenizer": "tokenizer_3"})
    list(loop.render(make_jobs()))
    assert loop.take_metrics() == {}


def test_words_that_a_pipeline_can_neither_read_nor_cut_are_the_policy_s_failure() -> None:
    loop, [job, *_] = make_loop("LongCatImageEditPipeline"), make_jobs()
    [(_, failure)] = loop.render([replace(job, payload="z" * 513)])
    assert isinstance(failure, RenderFailure) and failure.blame == "policy"


def test_what_the_text_limit_cuts_off_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    loop, [job, *_] = make_loop(KLEIN), make_jobs()
    jobs = [replace(job, payload="z" * length) for length in (64 - 12, 64 - 12 + 7)]
    list(loop.render(jobs))
    assert loop.take_metrics() == {"cut_share": 0.5, "cut_tokens": 3.5}
    assert loop.take_metrics() == {}
    assert "reads 64 tokens, and a prompt has 7 more" in caplog.text


@pytest.mark.parametrize(
    ("keys", "words", "prompt"),
    [
        ({}, 'a "b" {json}', 'a "b" {json}'),
        ({"pipeline": "BriaFiboEditPipeline"}, 'ä "b"', '{"edit_instruction": "ä \\"b\\""}'),
        ({"interface": {"prompt": "Edit: {words}."}}, "a", "Edit: a."),
        ({"interface": {"prompt": "{words} {json}"}}, "{json}", '{json} "{json}"'),
    ],
)
def test_words_are_put_into_the_pipeline_s_prompt(
    keys: dict[str, Any], words: str, prompt: str
) -> None:
    assert Config(**keys).prompt_of(words) == prompt


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"pipeline": "Flux2KlienPipeline"}, "pipeline: ... Flux2KleinPipeline"),
        ({"pipeline": "my.own.Pipeline"}, None),
        ({"height_px": 64}, "height_px, width_px: set both"),
        ({"pipeline": "LongCatImageEditPipeline", "height_px": 64, "width_px": 64}, "height_px"),
        ({"arguments": {"image": "x"}}, "arguments: 'image'"),
        ({"arguments": {"strenght": 1}}, "arguments: 'strenght'"),
        ({"interface": {"image": "input_images"}}, "interface: 'input_images' ... image, max_seq"),
        ({"interface": {"image": "prompt"}}, "interface: 'prompt'"),
        ({"interface": {"area": "max_area"}}, "interface: 'max_area'"),
        ({"pipeline": "DDPMPipeline", "interface": {"image": None}}, "pipeline: ... no prompt"),
        ({"pipeline": "DiffusionPipeline", "arguments": {"any": 1}}, None),
        ({"pipeline": "StableDiffusionImg2ImgPipeline", "arguments": {"any": 1}}, None),
        ({"pipeline": "diffusers.AutoencoderKL"}, "pipeline: "),
        ({"pipeline": "Flux2KleinModularPipeline"}, "pipeline: ... Flux2KleinPipeline"),
        (
            {"pipeline": "FluxKontextPipeline", "interface": {"max_images": 2}},
            "interface.max_images",
        ),
        ({"arguments": {"num_images_per_prompt": 2}}, "arguments: 'num_images_per_prompt'"),
        ({"interface": {"max_images": 2, "together": "all"}}, "interface.max_images: ... together"),
    ],
)
def test_a_config_s_problems(keys: dict[str, Any], parts: str | None) -> None:
    problems = StockPipeline.problems(Config(**keys), None)  # type: ignore[arg-type]
    assert [holds(each, parts or "") for each in problems] == [True] * (parts is not None)


@pytest.mark.parametrize("module", ["diffusers", "diffusers.pipelines.flux2"])
def test_a_pipeline_may_be_named_by_its_module(module: str) -> None:
    assert Config(pipeline=f"{module}.{KLEIN}").call == INTERFACES[KLEIN]


def test_a_call_that_lacks_an_argument_is_refused_before_weights_are_loaded() -> None:
    config = Config(model_path="no/weights", pipeline="DDPMPipeline")
    with raising(ValueError, "renderer.pipeline: ... no prompt"):
        StockPipeline(config, Resources(None, "cpu"))


@pytest.mark.parametrize(
    ("keys", "sizes", "word"),
    [
        ({}, [(64, 512)], ""),
        ({}, [None], ""),
        ({}, [(63, 64)], "64 px"),
        ({}, [(520, 64)], "up to 8 : 1"),
        ({}, [(64, 64)] * 2, "max_images"),
        ({"interface": {"max_images": 2}}, [(64, 64), (48, 64)], "(48, 64)"),
        ({"interface": {"image": None}}, [(8, 8)], ""),
        ({"pipeline": "FluxKontextPipeline"}, [(8, 64)], "16 px"),
        ({"pipeline": "my.own.Pipeline"}, [(8, 8000)], ""),
    ],
)
def test_sources_that_a_pipeline_refuses_are_bad_rows(
    keys: dict[str, Any], sizes: list[tuple[int, int] | None], word: str
) -> None:
    with raising(UnusableSampleError, word):
        StockPipeline.check_sources(Config(**keys), sizes)


@pytest.mark.parametrize("name", tiny_stock.MAKERS)
def test_the_smallest_source_that_the_check_admits_is_drawn(name: str) -> None:
    loop, [job, *_] = make_loop(name), make_jobs()
    low, ratio = loop.config.call.min_side_px, min(8, loop.config.call.max_aspect_ratio)
    source = make_picture(0).resize((max(low, 8), int(max(low, 8) * ratio)))
    [(_, drawn)] = loop.render([replace(job, sample=replace(job.sample, sources=(source,)))])
    assert isinstance(drawn, Image)


def test_every_known_pipeline_is_in_diffusers_and_every_known_editor_is_tried() -> None:
    assert INTERFACES.keys() <= set(pipelines())
    assert {name for name, each in INTERFACES.items() if each.image} == tiny_stock.MAKERS.keys()


def test_weights_in_host_memory_are_on_the_gpu_part_by_part() -> None:
    on_device, on_host = (
        StockPipeline.cost(Config(residency=where, height_px=1024, width_px=1024, batch_size=2))
        for where in ("device", "host")
    )
    assert sum(on_device.weights.values()) == on_host.host_weights == pytest.approx(7.982e9)
    assert (on_device.largest_part, on_host.largest_part, on_host.weights) == (0, 4.022e9, {})
    # 4096 tokens of the picture, as many of its source, 512 of text; 2 x 22 tensors of 3072.
    assert on_host.activations["transformer"] == 2 * 22 * 3072 * (2 * 4096 + 512)


def test_a_folder_is_loaded_by_its_class(tmp_path: Path) -> None:
    made = make_loop(KLEIN)
    made.parts.save_pretrained(tmp_path)
    config = made.config.model_copy(update={"model_path": str(tmp_path)})
    renderer = StockPipeline(config, Resources(None, "cpu"))
    jobs = make_jobs()
    assert dict(renderer.render(jobs)) == dict(made.render(jobs))
    assert {"text_encoder", "transformer", "vae"} == set(StockPipeline.part_sizes(config))
    assert not [*model_problems(StockPipeline.models(config))]
    weights = tmp_path / "vae/diffusion_pytorch_model.safetensors"
    sizes = StockPipeline.part_sizes(config)
    shutil.copy(weights, weights.with_suffix(".fp16.safetensors"))
    assert StockPipeline.part_sizes(config) == sizes
    weights.unlink()
    shutil.rmtree(tmp_path / "tokenizer")
    found = model_problems(StockPipeline.models(config))
    lacking = "tokenizer/tokenizer_config.json, vae/diffusion_pytorch_model.safetensors or"
    assert [holds(each, f"model_path ... lacks {lacking}") for each in found] == [True]
    other, wrong = (
        config.model_copy(update={"pipeline": name})
        for name in ("FluxPipeline", "no.such.Pipeline")
    )
    [problem] = StockPipeline.problems(other, None)  # type: ignore[arg-type]
    assert holds(problem, "pipeline: ... text_encoder_2, tokenizer_2 ... Flux2KleinPipeline")
    with raising(ValueError, "renderer.pipeline ... no.such"):
        StockPipeline(wrong, Resources(None, "cpu"))


def test_the_sections_of_the_page_are_read() -> None:
    sections = [block for block in printed("docs/any-editor.md") if block.startswith("renderer:")]
    for block in sections:
        keys = json.loads(_jsonnet.evaluate_snippet("page", f"{{ {block} }}"))["renderer"]
        config = Config.model_validate(keys)
        assert not list(StockPipeline.problems(config, None))  # type: ignore[arg-type]
        assert config.call.together == "group"
