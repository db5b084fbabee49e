"""Nothing is done twice: every costly step, counted part by part and over whole iterations."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tiny_config
import tiny_emu3_vq
import tiny_loop
import tiny_sd3
import torch
from PIL import Image
from tiny_faulty_judge import Fault, FaultyJudge, quick_config
from tiny_rewards import make
from torch.utils.flop_counter import FlopCounterMode

from rl.api.types import Completion, RenderJob, RewardInput, RewardOutput, Sample
from rl.config.jsonnet import evaluate
from rl.config.schema import RunConfig
from rl.files.images import png_bytes
from rl.judge.client import JudgeClient
from rl.ranks.dist import Dist
from rl.renderers.emu3_vq.codec import Emu3Codec
from rl.renderers.emu3_vq.loop import Emu3VqLoop
from rl.rewards import edit_quality, ground_score, viescore, viescore_t2i
from rl.rewards.clip import plug as clip
from rl.rewards.clip.model import ClipModel
from rl.rollout.stream import Rollout
from rl.run.run import Run
from rl.run.set_up import open_run
from rl.train import learn_from, roll_out

pytestmark = pytest.mark.slow


def rows_of_calls(module: torch.nn.Module) -> list[int]:
    """Filled with the batch size of every call from now on."""
    rows: list[int] = []

    def note(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rows.append(len(args[0] if args else next(iter(kwargs.values()))))

    module.register_forward_pre_hook(note, with_kwargs=True)
    return rows


def grids_of_calls(tower: torch.nn.Module) -> list[int]:
    """The same of a vision tower, whose pictures lie behind each other."""
    rows: list[int] = []
    tower.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(len(kwargs["grid_thw"])), with_kwargs=True
    )
    return rows


def pictures_prepared(processor: Any) -> list[int]:
    """The same of an image processor."""
    pictures: list[int] = []
    prepare = processor.preprocess

    def counted(images: Sequence[Image.Image], *args: Any, **kwargs: Any) -> Any:
        pictures.append(len(images))
        return prepare(images, *args, **kwargs)

    processor.preprocess = counted
    return pictures


def negative_prompts(policy: Any) -> list[Any]:
    """Filled with every negative prompt that goes through the policy from now on."""
    prompts: list[Any] = []
    written = policy.prompts.other_words

    def noted(*arguments: Any) -> Any:
        prompts.append(written(*arguments))
        return prompts[-1]

    policy.prompts.other_words = noted
    return prompts


# --- the judge ---------------------------------------------------------------------------------

JUDGED: dict[ModuleType, int] = {viescore: 2, viescore_t2i: 2, edit_quality: 3, ground_score: 1}
"""Questions per picture."""
REPLY = Fault(reply='{"score": [5, 5], "alignment": 0.5, "quality": 0.5}')


def noise_picture(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (16, 16, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def ask_about_group(plug: ModuleType, judge: FaultyJudge, pictures: Sequence[Image.Image]) -> None:
    sample = Sample("a", "paint it red", sources=(noise_picture(98),), target=noise_picture(99))

    async def run() -> None:
        client = JudgeClient(quick_config(max_attempts=1), judge.api_base)
        reward = make(plug, plug.Config(), client)
        grades: list[RewardOutput] = await asyncio.gather(
            *(reward.grade(RewardInput(sample, f"words {i}", p)) for i, p in enumerate(pictures))
        )
        assert len(grades) == len(pictures)
        await client.aclose()

    asyncio.run(run())


@pytest.mark.parametrize("plug", JUDGED, ids=lambda plug: plug.__name__.rpartition(".")[2])
def test_a_groups_questions_differ_in_their_last_part_alone(
    plug: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What all of a group share comes first, byte for byte: the judge reads it once."""
    encoded: Counter[bytes] = Counter()
    save = Image.Image.save

    def counted(image: Image.Image, *arguments: Any, **options: Any) -> None:
        encoded[image.tobytes()] += 1
        save(image, *arguments, **options)

    png_bytes.cache.clear()
    monkeypatch.setattr(Image.Image, "save", counted)
    pictures = [noise_picture(seed) for seed in range(4)]
    with FaultyJudge(after=REPLY) as judge:
        ask_about_group(plug, judge, pictures)
    contents = [request["messages"][0]["content"] for request in judge.requests]
    assert len(contents) == JUDGED[plug] * len(pictures)
    before = Counter(str(content[:-1]) for content in contents)
    num_kinds = 2 if plug in (viescore, viescore_t2i) else 1
    assert set(before.values()) == {len(contents) // num_kinds}
    assert len(before) == num_kinds
    last = Counter(str(content[-1]) for content in contents)
    assert set(last.values()) == {JUDGED[plug]} and len(last) == len(pictures)
    with_other = 0 if plug is viescore_t2i else 1  # the source, or the reference
    assert len(encoded) == len(pictures) + with_other and set(encoded.values()) == {1}


# --- CLIP --------------------------------------------------------------------------------------


def test_clip_reads_each_picture_and_each_prompt_once() -> None:
    """Six pictures of two prompts, of which four are looked at together; and once more."""
    model = ClipModel(
        clip.Config(model_path=str(tiny_config.WEIGHTS / "clip"), batch_size=4), "cpu"
    )
    seen = rows_of_calls(model._model.vision_model)
    read = rows_of_calls(model._model.text_model)
    prepared = pictures_prepared(model._processor)
    pairs = [("a red circle" if i < 3 else "a blue square", noise_picture(i)) for i in range(6)]
    model.compare(pairs)
    assert prepared == [4, 2] and seen == [1] * 6 and read == [1, 1]
    model._one_by_one = False  # as on a GPU
    model.compare(pairs)
    assert seen[6:] == [4, 4]
    assert read == [1, 1], "the prompts are remembered"


# --- Stable Diffusion 3 ------------------------------------------------------------------------


@pytest.mark.parametrize(("guidance_scale", "rows_per_picture"), [(7.0, 2), (1.0, 1)])
def test_sd3_does_steps_forwards_per_batch_and_encodes_each_prompt_once(
    guidance_scale: float, rows_per_picture: int
) -> None:
    """Two groups of four: the first prompt of each is written twice, under two noises."""
    parts = tiny_sd3.make_parts()
    denoised = rows_of_calls(parts.transformer)
    decoded = rows_of_calls(parts.vae.decoder)
    encoders = [*parts.text.encoders, parts.text.encoder_3]
    encoded = [rows_of_calls(encoder) for encoder in encoders]
    renderer = tiny_sd3.make_renderer(
        parts, batch_size=3, num_steps=2, guidance_scale=guidance_scale
    )
    words = ["a cat", "a cat", "a dog", "a bird", "a fish", "a fish", "a tree", "a boat"]
    jobs = [tiny_sd3.make_job(prompt, seed) for seed, prompt in enumerate(words)]
    assert len(list(renderer.render(iter(jobs)))) == 8
    assert denoised == [rows_per_picture * rows for rows in (3, 3, 3, 3, 2, 2)]
    assert decoded == [3, 3, 2]
    num_encodes = 6 + (guidance_scale > 1)
    assert encoded == [[1] * num_encodes] * 3


# --- Emu3's pictures ---------------------------------------------------------------------------


def test_emu3_paints_one_frame_of_four_and_each_distinct_grid_once() -> None:
    vq = tiny_emu3_vq.make_vq()
    renderer = Emu3VqLoop(Emu3Codec(vq), batch_size=4)
    painted = rows_of_calls(vq.decoder.conv_in)
    source, *drawn = (tiny_emu3_vq.make_codes(seed) for seed in range(4))
    samples = [Sample(str(i), "", source_codes=codes) for i, codes in enumerate((source, drawn[0]))]
    for _ in range(2):
        renderer.decode_sources(samples)
    assert painted == [2], "the second time they are remembered"
    jobs = [RenderJob(samples[0], drawn[i], noise_seed=0) for i in (0, 0, 1, 2, 1, 0)]
    assert len(list(renderer.render(iter(jobs)))) == 6
    assert painted == [2, 3]


def test_emu3s_codec_does_a_quarter_of_the_stock_models_work() -> None:
    vq = tiny_emu3_vq.make_vq()
    codec = Emu3Codec(vq)
    codes = torch.from_numpy(tiny_emu3_vq.make_codes(0, 8, 8)).long()[None]
    pixels = torch.zeros(1, 3, 64, 64)

    def flops(work: Any) -> int:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            work()
        return counter.get_total_flops()

    decode = flops(lambda: codec.decode_tensor(codes)) / flops(lambda: vq.decode(codes))
    sizes = torch.tensor([[64, 64]])
    encode = flops(lambda: codec.encode_tensor(pixels)) / flops(lambda: vq.encode(pixels, sizes))
    assert decode < 0.26 and encode < 0.26, (decode, encode)


# --- whole iterations --------------------------------------------------------------------------


@contextmanager
def opened(
    system: str, base_exp_dir: Path, validation: Sequence[Any] = (), **renderer: Any
) -> Iterator[Run]:
    """A system's shipped run with two groups of four; the last of a group repeats its first."""
    values, problems = evaluate(tiny_loop.REPO / "configs" / f"{system}.jsonnet", (), {})
    assert values is not None and not problems
    values |= {
        "base_exp_dir": str(base_exp_dir),
        "num_iterations": 1,
        "prompts_per_iteration": 2,
        "generations_per_prompt": 4,
        "engine": {"type": "transformers"},
        "renderer": values["renderer"] | renderer,
        "data": values["data"] | {"validation": list(validation)},
    }
    with open_run(RunConfig.model_validate(values), Dist.from_env("cpu")) as run:
        generate = run.engine.generate

        def with_twins(*arguments: Any) -> list[list[Completion]]:
            return [[*group[:-1], group[0]] for group in generate(*arguments)]

        run.engine.generate = with_twins  # type: ignore[method-assign]
        yield run


def iterate(run: Run) -> Rollout:
    """One iteration, from the first sync to the record."""
    run.sync_engine()
    if run.judge is not None:
        run.judge.take_stats()  # drops the question whether anybody is there
    pending = roll_out(run, 0)
    learn_from(run, pending)
    return pending.rollout.finished()


def num_distinct(rollout: Rollout) -> int:
    """Pictures that were wanted, baseline arms' included, equal ones of a group counted once."""
    arms_PG = [
        [*episodes, *([] if baseline is None else [baseline])]
        for episodes, baseline in zip(rollout.episodes, rollout.bare_episodes, strict=True)
    ]
    assert all(len(arms_G) >= 4 for arms_G in arms_PG)
    return sum(
        len({arm.completion.token_ids for arm in arms_G if arm.image is not None})
        for arms_G in arms_PG
    )


def num_asked(run: Run) -> int:
    """Questions to the judge; its journal answers those that were asked before."""
    line = run.recording.last_metrics
    return int(line["judge/requests"] + line["judge/reused_replies"])


def test_an_iteration_of_the_editor(tmp_path: Path) -> None:
    """Two pictures are edited, with guidance: each is looked at, and encoded, once."""
    with opened("quickstart", tmp_path, num_steps=2, true_cfg_scale=2.0) as run:
        policy: Any = run.context.policy
        loop: Any = run.context.renderer.loop
        parts = loop.parts
        prepared = pictures_prepared(policy.prompts.image_processor)
        looked_at = grids_of_calls(policy.module.base_model.model.visual)
        steered_from = negative_prompts(policy)
        encoded = rows_of_calls(parts.vae.encoder)
        denoised = rows_of_calls(parts.transformer.transformer_blocks[0].attn.to_q)
        decoded = rows_of_calls(parts.vae.decoder)
        num_pictures = num_distinct(iterate(run))
        assert 2 < num_pictures < 2 * 5
        assert sum(prepared) == sum(looked_at) == sum(encoded) == len(steered_from) == 2
        assert sum(denoised) == 2 * 2 * num_pictures and sum(decoded) == num_pictures
        assert num_asked(run) == 2 * num_pictures


def test_a_held_out_run_of_the_editor(tmp_path: Path) -> None:
    """Five renderings of each picture, with guidance: the policy's words, the user's own, the right
    ones, and the stock arm's two; it is looked at, and encoded, once. What they steer away from is
    read once, and once more without token types, for the arm that does not give them."""
    held_out = [{"type": "tiny_world.data.shapes", "num_samples": 2, "seed": 2}]
    with opened("quickstart", tmp_path, held_out, num_steps=2, true_cfg_scale=2.0) as run:
        policy: Any = run.context.policy
        loop: Any = run.context.renderer.loop
        run.sync_engine()
        prepared = pictures_prepared(policy.prompts.image_processor)
        looked_at = grids_of_calls(policy.module.base_model.model.visual)
        steered_from = negative_prompts(policy)
        encoded = rows_of_calls(loop.parts.vae.encoder)
        decoded = rows_of_calls(loop.parts.vae.decoder)
        run.evaluate_if_due(0)
        assert sum(prepared) == sum(looked_at) == sum(encoded) == 2
        assert len(steered_from) == 2 * 2
        assert 2 * 2 < sum(decoded) <= 2 * 5


def test_an_iteration_of_earl(tmp_path: Path) -> None:
    """Two sources and two references exist as codes alone; each is painted once."""
    with opened("tiny_earl", tmp_path) as run:
        loop: Any = run.context.renderer.loop
        painted = rows_of_calls(loop.codec.model.decoder.conv_in)
        rollout = iterate(run)
        drawn = {e.image.tobytes() for group in rollout.episodes for e in group if e.image}
        assert sum(painted) == 2 + 2 + len(drawn)
        assert num_asked(run) == 3 * num_distinct(rollout)


def test_an_iteration_of_the_prompt_writer(tmp_path: Path) -> None:
    """With guidance: each distinct prompt is encoded once, and so is the negative one."""
    with opened("tiny_prompts", tmp_path, num_steps=2, guidance_scale=4.0) as run:
        loop: Any = run.context.renderer.loop
        encoded = rows_of_calls(loop.parts.text.encoders[0])
        denoised = rows_of_calls(loop.parts.transformer)
        decoded = rows_of_calls(loop.parts.vae.decoder)
        rollout = iterate(run)
        num_pictures = num_distinct(rollout)
        arms = [e for group in rollout.episodes for e in group] + list(rollout.bare_episodes)
        prompts = {arm.action.text for arm in arms if arm is not None}
        assert sum(encoded) == len(prompts) + 1
        assert sum(denoised) == 2 * 2 * num_pictures and sum(decoded) == num_pictures


def test_an_iteration_of_the_reasoner(tmp_path: Path) -> None:
    """Its pictures are looked at once: in the prompt, whatever is computed of it."""
    with opened("tiny_reasoning", tmp_path) as run:
        policy: Any = run.context.policy
        prepared = pictures_prepared(policy.prompts.image_processor)
        looked_at = grids_of_calls(policy.module.base_model.model.visual)
        iterate(run)
        assert sum(prepared) == sum(looked_at) == 2
