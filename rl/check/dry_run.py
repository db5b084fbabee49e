"""Tries plugins on made-up words, and asks the judge one question."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from rl.api import find
from rl.api.judge import Answer, Question
from rl.api.loss import Denominators, LossInputs, terms_problem
from rl.api.plugin import Resources
from rl.api.renderer import drawn_problem
from rl.api.reward import Reward
from rl.api.types import RenderJob, RewardInput, RewardOutput, Sample
from rl.build import Plugin, Resolved
from rl.check.compatibility import READABLE
from rl.config.schema import SHIPPED_LOSSES, AlgorithmConfig
from rl.console import duration
from rl.judge.client import JudgeClient, JudgeError, JudgeUnreachableError
from rl.judge.http import TOO_MANY_REQUESTS, Dialect, remedy_for
from rl.printing import excerpt
from rl.rollout.episodes import scores

if TYPE_CHECKING:
    from PIL.Image import Image

# ---- dry run -------------------------------------------------------------------------------------
# Runs plugins once on made-up inputs, before any model is loaded.

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


# ---- ask judge -----------------------------------------------------------------------------------
# Asks the judge real questions before a model is loaded, as the rewards of training ask them.

T = TypeVar("T")

SHOWN_REPLY_CHARS = 300
START_PATIENCE_S = 60.0
"""Longest wait for a judge that has too many requests, or that fails between two questions."""


@dataclass
class JudgeCheck:
    """The result of asking the judge."""

    problems: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    """A line for each reward that was asked or skipped; endpoints that are down, if one answers."""
    dialects: dict[str, Dialect] = field(default_factory=dict)
    """API base -> dialect."""


async def ask_judge(
    resolved: Resolved,
    api_bases: Sequence[str],
    wait_s: float,
    sample: Sample | None = None,
    num_sources: int = 1,
) -> JudgeCheck:
    """Let each reward ask each endpoint about one picture. `wait_s`: time limit of a judge's start.
    `sample`: a row of the run's data, whose source is graded; fields that it lacks are made up.
    `num_sources`: source pictures of a sample that is made up.
    """
    reward_input = _reward_input(resolved, sample, num_sources)
    result, down = JudgeCheck(), []
    for base_result in await asyncio.gather(
        *(_ask_base(resolved, base, wait_s, sample is None, reward_input) for base in api_bases)
    ):
        if isinstance(base_result, JudgeUnreachableError):
            down.append(str(base_result))
            continue
        result.problems += base_result.problems
        result.lines += base_result.lines
        result.dialects |= base_result.dialects
    if result.dialects:
        result.lines += down
    else:
        result.problems += down
    return result


async def _ask_base(
    resolved: Resolved, base: str, wait_s: float, is_made_up: bool, reward_input: RewardInput
) -> JudgeCheck | JudgeUnreachableError:
    # A run waits, e.g. until a quota is renewed; before a run, such a wait is a problem to report.
    config = resolved.config.judge
    patience_s = min(config.max_outage_s, config.timeout_s, START_PATIENCE_S)
    try:
        client = JudgeClient(config.model_copy(update={"max_outage_s": patience_s}), base)
    except ValueError as error:  # a bad key, proxy or certificate in the environment
        return JudgeCheck([f"judge: {error}"])
    result = JudgeCheck(dialects=client.dialects())
    try:
        await client.check_health(wait_s)
        for plugin in resolved.rewards.values():
            if plugin.cls.needs_judge:
                await _ask_reward(plugin, client, base, is_made_up, reward_input, result)
    except JudgeUnreachableError as error:
        return error
    except JudgeError as error:
        result.problems.append(f"judge: {error}")
    finally:
        await client.aclose()
    return result


async def _ask_reward(
    plugin: Plugin[Reward],
    client: JudgeClient,
    base: str,
    is_made_up: bool,
    reward_input: RewardInput,
    result: JudgeCheck,
) -> None:
    needs = plugin.cls.needs_with(plugin.config)
    if plugin.cls.runs_model or (is_made_up and needs - READABLE):
        reason = "loads a model" if plugin.cls.runs_model else "reads hidden keys of the data"
        result.lines.append(f"{plugin.key}: not asked, since it {reason}")
        return
    judge = _RecordingJudge(client)
    limit_s = 2 * client.config.timeout_s
    started = time.monotonic()
    try:
        async with asyncio.timeout(limit_s):
            output, problems = await grade_once(plugin, Resources(judge, "cpu"), reward_input)
    except TimeoutError:
        reason = f"did not answer within {limit_s:g} s{_remedy('timeout', client)}"
        output, problems = None, [f"{plugin.key}: {base} {reason}"]
    failed = [answer for answer in judge.answers if answer.failure]
    if failed and not problems:
        problems = [f"{plugin.key}: {base} {_why_unusable(failed[0], client)}"]
    result.problems += problems
    if output is not None and not problems:
        took = duration(time.monotonic() - started)
        unreadable = sum(len(answer.replies) - 1 for answer in judge.answers)
        result.lines.append(
            f"{plugin.key}: {base} answered {len(judge.answers)} questions in {took}"
            + (f", {unreadable} replies unreadable" if unreadable > 0 else "")
            + (f", {output.failure}" if output.value is None else f", value {output.value:.3g}")
        )


def _why_unusable(answer: Answer[Any], client: JudgeClient) -> str:
    failure, config = str(answer.failure), client.config
    if not answer.replies:
        return f"gave no answer: {failure}{_remedy(failure, client)}"
    reply = excerpt(answer.replies[-1], SHOWN_REPLY_CHARS) or "(nothing)"
    remedy = (
        "set judge.guided_json='always' if the endpoint supports it; raise judge.max_tokens="
        f"{config.max_tokens} if the reply is cut or empty (a reasoning model also spends it on "
        f"reasoning); else choose another judge.model={config.model!r}."
    )
    if "min_legal_mass" in failure:
        remedy = "use a model that does not think first, other labels, or a prompt of your own."
    return f"gives unusable answers: {failure}; its reply: {reply}\nRemedy: {remedy}"


def _remedy(failure: str, client: JudgeClient) -> str:
    if failure.startswith("http_"):
        status = 429 if failure.startswith(TOO_MANY_REQUESTS) else 500
        return f"\n{remedy_for(status, None, client.config)}"
    return (
        "\nRemedy: look into the endpoint's own log; raise judge.timeout_s="
        f"{client.config.timeout_s:g} if it is slow."
    )


class _RecordingJudge:
    """Passes questions to the judge and keeps its answers."""

    def __init__(self, client: JudgeClient) -> None:
        self.config = client.config
        self.answers: list[Answer[Any]] = []
        self._client = client

    async def ask(
        self, question: Question, parse: Callable[[str], T], repeat: int = 0
    ) -> Answer[T]:
        answer = await self._client.ask(question, parse, repeat)
        self.answers.append(answer)
        return answer


def _reward_input(resolved: Resolved, sample: Sample | None, num_sources: int) -> RewardInput:
    """The input to grade. Without a `sample`, it has `num_sources` sources of noise in the largest
    size that the judge gets: noise takes about as many PNG bytes as a photo."""
    from PIL import Image

    side_px = resolved.config.judge.image_side_px
    pixels = random.Random(0).randbytes(side_px * side_px)
    fake = made_up_input(resolved, Image.frombytes("L", (side_px, side_px), pixels).convert("RGB"))
    if sample is None:
        return replace(fake, sample=replace(fake.sample, sources=fake.sample.sources * num_sources))
    sources = sample.sources or fake.sample.sources
    filled = replace(sample, sources=sources, target=sample.target or fake.sample.target)
    return replace(fake, sample=filled, image=fake.image and (filled.source or fake.image))
