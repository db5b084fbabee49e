"""Counts the costly steps of judge questions and whole iterations: none is done twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_loop
import torch
from PIL import Image
from tiny_calls import calls_of, noted_calls, pictures_read
from tiny_faulty_judge import Fault, FaultyJudge, quick_config
from tiny_rewards import make

from rl.api.reward import Reward
from rl.api.types import Completion, RewardInput, RewardOutput, Sample
from rl.config.loading import evaluate
from rl.config.schema import RunConfig
from rl.files import png_bytes
from rl.judge.client import JudgeClient
from rl.ranks.dist import Dist
from rl.rewards.judged import EditQuality, GroundScore, VieScore, VieScoreT2I
from rl.rollout.stream import Rollout
from rl.run.run import Run
from rl.run.set_up import open_run
from rl.train import learn_from, roll_out

pytestmark = pytest.mark.slow


def rows_of_calls(module: torch.nn.Module) -> list[int]:
    """A list that receives the batch size of every later call of `module`."""
    return calls_of(
        module, lambda args, kwargs, _: len(args[0] if args else next(iter(kwargs.values())))
    )


def counted(run: Run, patch: pytest.MonkeyPatch) -> tuple[list[int], list[int], list[Any]]:
    """Lists that receive the number of pictures of every later call of the policy's image processor
    and of its tower, and every negative prompt that it builds."""
    policy: Any = run.context.policy
    processor = policy.prompts.image_processor
    prepared = noted_calls(patch, processor, "preprocess", lambda args, *_: len(args[0]))
    negative = noted_calls(patch, policy.prompts, "with_instruction", lambda *call: call)
    return prepared, pictures_read(policy), negative


# --- the judge ---------------------------------------------------------------------------------

JUDGED: dict[type[Reward[Any]], int] = {VieScore: 2, VieScoreT2I: 2, EditQuality: 3, GroundScore: 1}
"""Questions per picture."""
REPLY = Fault(reply='{"score": [5, 5], "alignment": 0.5, "quality": 0.5}')


def noise_picture(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (16, 16, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def ask_about_group(
    plugin: type[Reward[Any]], judge: FaultyJudge, pictures: Sequence[Image.Image]
) -> None:
    sample = Sample("a", "paint it red", sources=(noise_picture(98),), target=noise_picture(99))

    async def run() -> None:
        client = JudgeClient(quick_config(max_attempts=1), judge.api_base)
        reward = make(plugin, plugin.Config(), client)
        grades: list[RewardOutput] = await asyncio.gather(
            *(reward.grade(RewardInput(sample, f"words {i}", p)) for i, p in enumerate(pictures))
        )
        assert len(grades) == len(pictures)
        await client.aclose()

    asyncio.run(run())


@pytest.mark.parametrize("plugin", JUDGED, ids=lambda plugin: plugin.__name__.rpartition(".")[2])
def test_a_groups_questions_differ_in_their_last_part_alone(
    plugin: type[Reward[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part that a group shares comes first, byte for byte, so that the judge can cache it."""
    png_bytes.cache.clear()
    encoded = noted_calls(monkeypatch, Image.Image, "save", lambda args, *_: args[0].tobytes())
    pictures = [noise_picture(seed) for seed in range(4)]
    with FaultyJudge(after=REPLY) as judge:
        ask_about_group(plugin, judge, pictures)
    contents = [request["messages"][0]["content"] for request in judge.requests]
    assert len(contents) == JUDGED[plugin] * len(pictures)
    shared_parts = Counter(str(content[:-1]) for content in contents)
    num_kinds = 2 if plugin in (VieScore, VieScoreT2I) else 1
    assert set(shared_parts.values()) == {len(contents) // num_kinds}
    assert len(shared_parts) == num_kinds
    last_parts = Counter(str(content[-1]) for content in contents)
    assert set(last_parts.values()) == {JUDGED[plugin]} and len(last_parts) == len(pictures)
    num_shared_pictures = 0 if plugin is VieScoreT2I else 1  # the source, or the reference
    assert len(set(encoded)) == len(encoded) == len(pictures) + num_shared_pictures


# --- whole iterations --------------------------------------------------------------------------


@contextmanager
def opened(
    system: str, base_exp_dir: Path, validation: Sequence[Any] = (), **renderer: Any
) -> Iterator[Run]:
    """A shipped config with two groups of four; a group's last completion equals its first."""
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
        "judge": values.get("judge", {}) | {"audit": "off"},  # two held-out samples are too few
    }
    with open_run(RunConfig.model_validate(values), Dist.from_env("cpu")) as run:
        generate = run.engine.generate

        def with_twins(*arguments: Any) -> list[list[Completion]]:
            return [[*group[:-1], group[0]] for group in generate(*arguments)]

        run.engine.generate = with_twins  # type: ignore[method-assign]
        yield run


def iterate(run: Run) -> Rollout:
    """Runs one iteration, from the weight sync to the record."""
    run.sync_engine()
    for judge in run.judges.values():
        judge.take_stats()  # drops the health check
    pending = roll_out(run, 0)
    learn_from(run, pending)
    return pending.rollout.finished()


def num_distinct(rollout: Rollout) -> int:
    """Distinct pictures of all groups, those of baseline arms included."""
    arms_PG = [
        [*episodes, *([] if baseline is None else [baseline])]
        for episodes, baseline in zip(rollout.episodes, rollout.bare_episodes, strict=True)
    ]
    assert all(len(arms_G) >= 4 for arms_G in arms_PG)
    drawn_PG = [{a.completion.token_ids for a in arms if a.image is not None} for arms in arms_PG]
    return sum(map(len, drawn_PG))


def num_asked(run: Run) -> int:
    """Questions to the judge, including those that its journal answers."""
    line = run.recording.last_metrics
    return int(line["judge/requests"] + line["judge/reused_replies"])


def test_an_iteration_of_the_editor_reads_and_encodes_each_source_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With guidance, each of the two sources is read by the policy once and encoded once."""
    with opened("quickstart", tmp_path, num_steps=2, true_cfg_scale=2.0) as run:
        loop: Any = run.context.renderer.loop
        parts = loop.parts
        prepared, read, negative = counted(run, monkeypatch)
        encoded = rows_of_calls(parts.vae.encoder)
        denoised = rows_of_calls(parts.transformer.transformer_blocks[0].attn.to_q)
        decoded = rows_of_calls(parts.vae.decoder)
        num_pictures = num_distinct(iterate(run))
        assert 2 < num_pictures < 2 * 5
        assert sum(prepared) == sum(read) == sum(encoded) == len(negative) == 2
        assert sum(denoised) == 2 * 2 * num_pictures and sum(decoded) == num_pictures
        assert num_asked(run) == 2 * num_pictures


def test_an_evaluation_of_the_editor_reads_and_encodes_each_source_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each source is read and encoded once, with guidance, for eight renderings: the policy's
    words, the user's, the reference ones, two of the stock arm, and three again: the policy's words
    alone, and both through the forward of training. The negative prompt is read twice:
    with token types, and without them for the arm that gives none."""
    held_out = [{"type": "tiny_world.data.shapes", "num_samples": 2, "seed": 2}]
    with opened("quickstart", tmp_path, held_out, num_steps=2, true_cfg_scale=2.0) as run:
        loop: Any = run.context.renderer.loop
        run.sync_engine()
        prepared, read, negative = counted(run, monkeypatch)
        encoded = rows_of_calls(loop.parts.vae.encoder)
        decoded = rows_of_calls(loop.parts.vae.decoder)
        run.evaluate_if_due(0)
        assert sum(prepared) == sum(read) == sum(encoded) == 2
        assert len(negative) == 2 * 2
        assert 2 * 2 < sum(decoded) <= 2 * 8


def test_an_iteration_of_earl_decodes_each_picture_once(tmp_path: Path) -> None:
    """Two sources and two references are stored as codes; each is decoded once."""
    with opened("tiny_earl", tmp_path) as run:
        loop: Any = run.context.renderer.loop
        decoded = rows_of_calls(loop.codec.model.decoder.conv_in)
        rollout = iterate(run)
        drawn_pictures = {e.image.tobytes() for group in rollout.episodes for e in group if e.image}
        assert sum(decoded) == 2 + 2 + len(drawn_pictures)
        assert num_asked(run) == 3 * num_distinct(rollout)
