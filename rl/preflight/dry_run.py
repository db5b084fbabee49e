"""Tries an outsider's plugs once, on made-up inputs, before any model is loaded."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rl.api import find
from rl.api.loss import Denominators, Loss, LossInputs, LossTerms
from rl.api.plug import Resources, shown
from rl.api.reward import Reward
from rl.api.types import RenderFailure, RenderJob, RewardInput, RewardOutput, Sample
from rl.build import Plug, Resolved, build_data
from rl.config.schema import SHIPPED_LOSSES, AlgorithmConfig
from rl.rollout.grading import grade, score_group

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

SIDE_PX = 64
SLOW_S = 10.0
READABLE = frozenset({"source", "image", "target", "text", "reference"})
"""What can be made up of what a reward needs: nobody knows what hidden keys hold."""


def tried(resolved: Resolved) -> list[Plug[Any]]:
    """The plugs whose code a dry run runs: rewards and renderers that ask no judge and load no
    model, and data sources that read little."""
    renderer = resolved.renderer.cls
    return [
        *(
            plug
            for plug in resolved.rewards.values()
            if not (plug.cls.needs_judge or plug.cls.runs_model or plug.cls.needs - READABLE)
        ),
        *(p for p in (*resolved.train, *resolved.validation) if not p.cls.reads_much),
        # Nobody knows how wide hidden states are.
        *[resolved.renderer][: not (renderer.runs_model or renderer.accepts == "hidden_states")],
    ]


def dry_problems(resolved: Resolved) -> list[str]:
    """What raises, or gives something that cannot be used."""
    found = []
    for plug in tried(resolved):
        with _said_if_slow(plug):
            if issubclass(plug.cls, Reward):
                given = made_up(resolved, _picture())
                found += asyncio.run(graded(plug, Resources(None, "cpu"), given))[1]
            elif plug is resolved.renderer:
                found += _renderer(plug, made_up(resolved, _picture()).sample)
            else:
                found += _data(resolved, plug)
    return [*found, *_loss(resolved.config.algorithm)]


async def graded(
    plug: Plug[Reward], resources: Resources, given: RewardInput
) -> tuple[RewardOutput | None, list[str]]:
    """What a reward says of one picture, made for it and closed again, and what is wrong with the
    reward. Raises `JudgeError`."""
    cls = plug.cls
    try:
        reward = await asyncio.to_thread(cls, plug.config, resources)
    except find.STRANGE as error:
        why = find.described(error, cls.__init__)
        return None, [f"{plug.key}: making {plug.name} raises {why}"]
    if reward.scores_groups():
        output = (await score_group({plug.key: reward}, [given, given]))[0][plug.key]
    else:
        output = (await grade({plug.key: reward}, given))[plug.key]
    try:
        await asyncio.to_thread(reward.close)
    except find.STRANGE as error:
        why = find.described(error, cls.close)
        return None, [f"{plug.key}: closing {plug.name} raises {why}"]
    if not output.traceback:
        return output, []
    had = ", ".join(name for name in ("source", "target") if getattr(given.sample, name))
    sample = f"a made-up sample with {had or 'no pictures'}"
    if given.image is None:
        sample += " and nothing rendered"
    return None, [f"{plug.key}: on {sample}, {plug.name} {output.failure}"]


def _data(resolved: Resolved, plug: Plug[Any]) -> list[str]:
    try:
        [source] = build_data(resolved, [plug])
    except ValueError as error:
        return str(error).split("\n")
    try:
        source.close()
    except find.STRANGE as error:
        return [f"{plug.key}: closing {plug.name} raises {find.described(error, plug.cls.close)}"]
    return []


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


def _renderer(plug: Plug[Any], sample: Sample) -> list[str]:
    payload: Any = "a red square"
    if plug.cls.accepts == "image_tokens":
        import numpy as np

        payload = np.zeros((4, 4), np.int32)
    jobs = [RenderJob(sample, payload, noise_seed) for noise_seed in range(2)]
    try:
        renderer = plug.cls(plug.config, Resources(None, "cpu"))
        drawn = list(renderer.render(jobs))
        renderer.close()
    except find.STRANGE as error:
        why = find.described(error, plug.cls.render)
        return [f"{plug.key}: on made-up jobs, {plug.name} raises {why}"]
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
    loss, _ = find.import_plug(algorithm.loss)
    key = f"algorithm.loss: {algorithm.loss}"
    try:
        if wrong := _unusable(loss(_micro_batch(algorithm, [3, 1]))):
            return [f"{key}: {problem}" for problem in wrong]
        together = _gradient(loss, algorithm, [3, 1])
        apart = [*_gradient(loss, algorithm, [3]), *_gradient(loss, algorithm, [1], first=1)]
    except find.STRANGE as error:
        return [f"{key} on a made-up micro-batch raises {find.described(error, loss)}"]
    if all(abs(a - b) < 1e-5 for a, b in zip(together, apart, strict=True)):
        return []
    return [
        f"{key}: a batch that is split into two micro-batches gives another gradient; divide by "
        "x.denominators, which count the whole step, never by this micro-batch's own tokens, rows "
        "or statistics"
    ]


def _micro_batch(algorithm: AlgorithmConfig, lengths: Sequence[int], first: int = 0) -> LossInputs:
    """Completions of so many tokens, the advantages by number, `first` for the first."""
    import torch

    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    advantages = torch.tensor([1.0, -0.5])[first : first + len(lengths), None].expand(mask.shape)
    zeros = torch.zeros(mask.shape)
    return LossInputs(
        logprobs=zeros.clone().requires_grad_(),
        old_logprobs=zeros,
        sampler_logprobs=zeros,
        advantages=advantages,
        mask=mask,
        denominators=Denominators(8.0, 4.0, 4.0, 16),
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
    )


def _unusable(terms: Any) -> list[str]:
    import torch

    if not isinstance(terms, LossTerms):
        return [f"returns {shown(terms)}; expected rl.api.loss.LossTerms"]
    wrong = []
    for name, value in vars(terms).items():
        if not isinstance(value, torch.Tensor):
            wrong.append(f"{name} is {shown(value)}; expected a tensor of the shape of x.logprobs")
        elif value.shape != (2, 3):
            shape = tuple(value.shape)
            wrong.append(f"{name} has shape {shape}; expected (2, 3), as x.logprobs")
    if not wrong and not terms.terms.requires_grad:
        wrong.append("terms have no gradient; compute them from x.logprobs")
    if not wrong and not (terms.weights * terms.terms).isfinite().all():
        wrong.append("weights * terms are not finite on a made-up micro-batch")
    return wrong


def _gradient(
    loss: Loss, algorithm: AlgorithmConfig, lengths: Sequence[int], first: int = 0
) -> list[float]:
    """Of each token's log-prob, as the step computes it."""
    import torch

    inputs = _micro_batch(algorithm, lengths, first)
    terms = loss(inputs)
    [gradient] = torch.autograd.grad((terms.weights * terms.terms).sum(), inputs.logprobs)
    found: torch.Tensor = gradient[inputs.mask]
    return [float(value) for value in found]
