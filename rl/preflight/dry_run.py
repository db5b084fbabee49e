"""Tries an outsider's code once, on made-up inputs, before any model is loaded."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rl.api import find
from rl.api.loss import Denominators, LossInputs, LossTerms
from rl.api.plug import Resources, shown
from rl.api.reward import Reward
from rl.api.types import RenderFailure, RenderJob, RewardInput, RewardOutput, Sample
from rl.build import Plug, Resolved, build_data
from rl.config.schema import SHIPPED_LOSSES, AlgorithmConfig
from rl.rollout.grading import grade, score_group

if TYPE_CHECKING:
    from PIL.Image import Image

SIDE_PX = 64
SLOW_S = 10.0
READABLE = frozenset({"source", "image", "target", "text", "reference"})
"""What can be made up of what a reward needs: nobody knows what hidden keys hold."""


def dry_problems(resolved: Resolved) -> list[str]:
    """What raises, or gives something that cannot be used."""
    found = [problem for plug in resolved.rewards.values() for problem in _reward(resolved, plug)]
    return [*found, *_data(resolved), *_renderer(resolved), *_loss(resolved.config.algorithm)]


def _reward(resolved: Resolved, plug: Plug[Reward]) -> list[str]:
    if plug.cls.needs_judge or plug.cls.runs_model or plug.cls.needs - READABLE:
        return []
    with _said_if_slow(plug):
        given = made_up(resolved, _picture())
        _, problems = asyncio.run(graded(plug, Resources(None, "cpu"), given))
    return problems


async def graded(
    plug: Plug[Reward], resources: Resources, given: RewardInput
) -> tuple[RewardOutput | None, list[str]]:
    """What a reward says of one picture, made for it and closed again, and what is wrong with the
    reward. Raises `JudgeError`."""
    try:
        reward = await asyncio.to_thread(plug.cls, plug.config, resources)
    except find.STRANGE as error:
        return None, [f"{plug.key}: making {plug.name} raises {find.described(error)}"]
    if reward.scores_groups():
        output = (await score_group({plug.key: reward}, [given, given]))[0][plug.key]
    else:
        output = (await grade({plug.key: reward}, given))[plug.key]
    try:
        await asyncio.to_thread(reward.close)
    except find.STRANGE as error:
        return None, [f"{plug.key}: closing {plug.name} raises {find.described(error)}"]
    if not output.traceback:
        return output, []
    had = ", ".join(name for name in ("source", "target") if getattr(given.sample, name))
    sample = f"a made-up sample with {had or 'no pictures'}"
    if given.image is None:
        sample += " and nothing rendered"
    place = output.traceback.rstrip().split("\n")
    lines = [line.strip() for line in place if line.strip().startswith("File ")]
    return None, [f"{plug.key}: {plug.name} {output.failure} ({lines[-1]}) on {sample}"]


def _data(resolved: Resolved) -> list[str]:
    """A source that reads much is left out: it says itself what is wrong with its files."""
    tried = [p for p in (*resolved.train, *resolved.validation) if not p.cls.reads_much]
    found = []
    for plug in tried:
        try:
            with _said_if_slow(plug):
                [source] = build_data(resolved, [plug])
                source.close()
        except ValueError as error:
            found += str(error).split("\n")
    return found


@contextmanager
def _said_if_slow(plug: Plug[Any]) -> Iterator[None]:
    """A plug that takes its time is named while it does."""
    words = f"{plug.key}: still trying {plug.name} on made-up inputs"
    timer = threading.Timer(SLOW_S, lambda: print(words, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def made_up(resolved: Resolved, picture: Image) -> RewardInput:
    """With what every sample of this config has, each picture this one."""
    sources = [*resolved.train, *resolved.validation]
    carried = frozenset.intersection(*(frozenset(p.cls.provides(p.config)) for p in sources))
    sample = Sample(
        "made-up",
        "paint it red",
        sources=(picture,) if "source" in carried else (),
        target=picture if "target" in carried else None,
        reference="a red square" if "reference" in carried else None,
    )
    draws = resolved.renderer.cls.makes_images
    return RewardInput(sample, "a red square on a white floor", picture if draws else None)


def _picture() -> Image:
    from PIL import Image

    return Image.linear_gradient("L").resize((SIDE_PX, SIDE_PX)).convert("RGB")


def _renderer(resolved: Resolved) -> list[str]:
    """One that takes hidden states is left out: nobody knows how wide they are."""
    plug = resolved.renderer
    if plug.cls.runs_model or plug.cls.accepts == "hidden_states":
        return []
    sample = made_up(resolved, _picture()).sample
    payload: Any = "a red square"
    if plug.cls.accepts == "image_tokens":
        import numpy as np

        payload = np.zeros((4, 4), np.int32)
    jobs = [RenderJob(sample, payload, noise_seed) for noise_seed in range(2)]
    try:
        with _said_if_slow(plug):
            renderer = plug.cls(plug.config, Resources(None, "cpu"))
            drawn = list(renderer.render(jobs))
            renderer.close()
    except find.STRANGE as error:
        return [f"{plug.key}: {plug.name} raises {find.described(error)} on made-up jobs"]
    expected = "expected (number of the job, RGB picture) for each job, once"
    for outcome in drawn:
        is_pair = isinstance(outcome, tuple) and len(outcome) == 2
        if not (is_pair and isinstance(outcome[0], int) and outcome[0] in (0, 1)):
            return [f"{plug.key}: {plug.name} yields {shown(outcome)}; {expected}"]
        if not _is_picture(outcome[1], plug.cls.makes_images):
            return [f"{plug.key}: {plug.name} draws {shown(outcome[1])}; {expected}"]
    numbers = [number for number, _ in drawn]
    if sorted(numbers) != [0, 1]:
        return [f"{plug.key}: {plug.name} yields pictures for jobs {numbers} of 0, 1; {expected}"]
    return []


def _is_picture(outcome: Any, makes_images: bool) -> bool:
    from PIL.Image import Image

    if isinstance(outcome, RenderFailure):
        return True
    if isinstance(outcome, Image):
        return outcome.mode == "RGB"
    return outcome is None and not makes_images


def _loss(algorithm: AlgorithmConfig) -> list[str]:
    if algorithm.loss in SHIPPED_LOSSES:
        return []
    import torch

    loss, _ = find.import_plug(algorithm.loss)
    zeros = torch.zeros(2, 3)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    denominators = Denominators(4.0, 2.0, 2.0, 3)
    inputs = LossInputs(
        logprobs=zeros.clone().requires_grad_(),
        old_logprobs=zeros,
        sampler_logprobs=zeros,
        advantages=torch.tensor([[1.0], [-1.0]]).expand(2, 3),
        mask=mask,
        denominators=denominators,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
    )
    key = f"algorithm.loss: {algorithm.loss}"
    try:
        terms = loss(inputs)
    except find.STRANGE as error:
        return [f"{key} raises {find.described(error)} on a made-up micro-batch"]
    if not isinstance(terms, LossTerms):
        return [f"{key} returns {shown(terms)}; expected rl.api.loss.LossTerms"]
    wrong = [
        f"{key}: {name} has shape {tuple(value.shape)}; expected {tuple(zeros.shape)}, as logprobs"
        for name, value in vars(terms).items()
        if value.shape != zeros.shape
    ]
    if not wrong and not terms.terms.requires_grad:
        wrong.append(f"{key}: terms have no gradient; compute them from x.logprobs")
    if not wrong and not (terms.weights * terms.terms).isfinite().all():
        wrong.append(f"{key}: weights * terms are not finite on a made-up micro-batch")
    return wrong
