"""Runs plugins once on made-up inputs, before any model is loaded."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from rl.api import find
from rl.api.loss import Denominators, LossInputs, terms_problem
from rl.api.plugin import Resources
from rl.api.renderer import drawn_problem
from rl.api.reward import Reward
from rl.api.types import RenderJob, RewardInput, RewardOutput, Sample
from rl.build import Plugin, Resolved
from rl.check.compatibility import READABLE
from rl.config.schema import SHIPPED_LOSSES, AlgorithmConfig
from rl.rollout.episodes import scores

if TYPE_CHECKING:
    from PIL.Image import Image

SIDE_PX = 64
ROWS = ((3, 1.0), (1, -0.5))
"""(tokens, advantage) of two made-up completions."""


def plugins_to_try(resolved: Resolved) -> list[Plugin[Any]]:
    """The plugins that a dry run calls: rewards and renderers that ask no judge and load no model.
    Rewards that read hidden keys and renderers that read hidden
    states are left out: the keys and the width of the states are unknown."""
    renderer = resolved.renderer.cls
    skips_renderer = renderer.runs_model or renderer.accepts == "hidden_states"
    return [
        *(
            plugin
            for plugin in resolved.rewards.values()
            if not (plugin.cls.needs_judge or plugin.cls.runs_model)
            and not plugin.cls.needs_with(plugin.config) - READABLE
        ),
        *([] if skips_renderer else [resolved.renderer]),
    ]


def dry_problems(resolved: Resolved) -> list[str]:
    """A message for each plugin that raises an error or returns something unusable."""
    problems = []
    for plugin in plugins_to_try(resolved):
        if issubclass(plugin.cls, Reward):
            inputs = made_up_input(resolved)
            problems += asyncio.run(grade_once(plugin, Resources(None, "cpu"), inputs))[1]
        else:
            problems += _renderer_problems(plugin, made_up_input(resolved).sample)
    return [*problems, *_loss_problems(resolved.config.algorithm)]


async def grade_once(
    plugin: Plugin[Reward], resources: Resources, inputs: RewardInput
) -> tuple[RewardOutput | None, list[str]]:
    """Create a reward, grade one picture with it and close it. Returns (its output, or None if it
    failed; problems). Raises `JudgeError`."""
    label = f"{plugin.key}: making {plugin.name}"
    create = partial(plugin.cls, plugin.config, resources)
    reward, wrong = await asyncio.to_thread(find.attempt, label, plugin.cls.__init__, create)
    if reward is None:
        return None, wrong
    inputs_G = [inputs, inputs] if reward.scores_groups() else [inputs]
    output, *_ = await scores(plugin.key, reward, inputs_G)
    label = f"{plugin.key}: closing {plugin.name}"
    _, wrong = await asyncio.to_thread(find.attempt, label, plugin.cls.close, reward.close)
    if wrong:
        return None, wrong
    if not output.traceback:
        return output, []
    pictures = ", ".join(name for name in ("source", "target") if getattr(inputs.sample, name))
    sample = f"a made-up sample with {pictures or 'no pictures'}"
    if inputs.image is None:
        sample += " and nothing rendered"
    return None, [f"{plugin.key}: on {sample}, {plugin.name} {output.failure}"]


def made_up_input(resolved: Resolved, picture: Image | None = None) -> RewardInput:
    """A reward's input with the fields that every data source provides; its pictures are `picture`
    (None: a gradient)."""
    from PIL.Image import linear_gradient

    picture = picture or linear_gradient("L").resize((SIDE_PX, SIDE_PX)).convert("RGB")
    sources = [*resolved.train, *resolved.validation]
    columns = frozenset.intersection(*(frozenset(p.cls.provides(p.config)) for p in sources))
    sample = Sample(
        "made-up",
        "paint it red",
        sources=(picture,) if "source" in columns else (),
        target=picture if "target" in columns else None,
        reference="a red square" if "reference" in columns else None,
    )
    makes_images = resolved.renderer.cls.makes_images
    return RewardInput(sample, "a red square on a white floor", picture if makes_images else None)


def _renderer_problems(plugin: Plugin[Any], sample: Sample) -> list[str]:
    payload: Any = "a red square"
    if plugin.cls.accepts == "image_tokens":
        import numpy as np

        payload = np.zeros((4, 4), np.int32)
    jobs = [RenderJob(sample, payload, noise_seed) for noise_seed in range(2)]

    def draw() -> list[Any]:
        renderer = plugin.cls(plugin.config, Resources(None, "cpu"))
        outcomes = list(renderer.render(jobs))
        renderer.close()
        return outcomes

    label = f"{plugin.key}: on made-up jobs, {plugin.name}"
    outcomes, wrong = find.attempt(label, plugin.cls.render, draw)
    if outcomes is None:
        return wrong
    waiting = {0, 1}
    for outcome in outcomes:
        if problem := drawn_problem(outcome, waiting, plugin.cls.makes_images):
            return [f"{plugin.key}: {plugin.name} {problem}"]
        waiting.remove(outcome[0])
    lost = f"{plugin.key}: {plugin.name} yields no picture for jobs {sorted(waiting)} of 0, 1"
    return [lost] if waiting else []


def _loss_problems(algorithm: AlgorithmConfig) -> list[str]:
    if algorithm.loss in SHIPPED_LOSSES:
        return []
    import torch

    loss, _ = find.import_plugin(algorithm.loss)
    key = f"algorithm.loss: {algorithm.loss}"

    def gradient(inputs: LossInputs) -> torch.Tensor:
        """Gradient of the loss with respect to each trained token's log-prob, as in a run."""
        terms = loss(inputs)
        [grad] = torch.autograd.grad((terms.weights * terms.terms).sum(), inputs.logprobs)
        return grad[inputs.mask]

    def problems() -> list[str]:
        batches = (_micro_batch(algorithm, *rows) for rows in (ROWS, ROWS[:1], ROWS[1:]))
        both, first, second = batches
        terms = loss(both)
        if problem := terms_problem(terms, (2, 3)):
            return [problem]
        if not terms.terms.requires_grad:
            return ["terms have no gradient; compute them from x.logprobs"]
        if not (terms.weights * terms.terms).isfinite().all():
            return ["weights * terms are not finite on a made-up micro-batch"]
        together, apart = gradient(both), torch.cat([gradient(first), gradient(second)])
        if torch.allclose(together, apart, atol=1e-5, rtol=0):
            return []
        return [
            "a batch that is split into two micro-batches gives another gradient; divide by "
            "x.denominators, which count the whole step, never by this micro-batch's own tokens, "
            "rows or statistics"
        ]

    unusable, raised = find.attempt(f"{key} on a made-up micro-batch", loss, problems)
    return raised or [f"{key}: {problem}" for problem in unusable or ()]


def _micro_batch(algorithm: AlgorithmConfig, *rows: tuple[int, float]) -> LossInputs:
    import torch

    lengths, advantages = torch.tensor([n for n, _ in rows]), torch.tensor([a for _, a in rows])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    zeros = torch.zeros(mask.shape)
    return LossInputs(
        logprobs=zeros.clone().requires_grad_(),
        old_logprobs=zeros,
        sampler_logprobs=zeros,
        advantages=advantages[:, None].expand(mask.shape),
        mask=mask,
        denominators=Denominators(8.0, 4.0, 4.0, 16),
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
    )
