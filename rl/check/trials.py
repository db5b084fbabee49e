"""Tries plugins on made-up words, asks the judge one question, and knows what its audit said."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from rl.api import find
from rl.api.loss import Denominators, LossInputs, terms_problem
from rl.api.plugin import Resources
from rl.api.reward import NO_VALUE, Reward
from rl.api.types import RewardInput, RewardOutput, Sample
from rl.build import Plugin, Resolved
from rl.check.compatibility import READABLE
from rl.config.loading import read_bytes
from rl.config.schema import SHIPPED_LOSSES, AlgorithmConfig, ConfigError, JudgeConfig, RunConfig
from rl.judge.client import JudgeClient, JudgeError, JudgeUnreachableError
from rl.judge.http import TOO_MANY_REQUESTS, BackgroundLoop, StoppedError, remedy_for
from rl.printing import excerpt
from rl.progress import Console, duration, warn
from rl.ranks import signals
from rl.ranks.dist import Dist
from rl.rollout.episodes import scores

# ---- dry run -------------------------------------------------------------------------------------
# Runs plugins once on made-up inputs, before any model is loaded.

SIDE_PX = 64
ROWS = ((3, 1.0), (1, -0.5))
"""(tokens, advantage) of two made-up completions."""


def dry_problems(resolved: Resolved) -> list[str]:
    """A message for each plugin that raises an error or returns something unusable.

    Called are rewards that ask no judge and load no model, and losses. Rewards that read hidden
    keys are left out: the keys are unknown.
    """
    problems, inputs = [], made_up_input(resolved)
    for plugin in resolved.rewards.values():
        is_light = not (plugin.cls.needs_judge or plugin.cls.runs_model)
        if is_light and not plugin.cls.needs_with(plugin.config) - READABLE:
            problems += asyncio.run(grade_once(plugin, Resources(None, "cpu"), inputs))[1]
    return [*problems, *_loss_problems(resolved.config.algorithm)]


async def grade_once(
    plugin: Plugin[Reward], resources: Resources, inputs: RewardInput
) -> tuple[RewardOutput | None, list[str]]:
    """Create a reward, grade one picture with it and close it. Returns (its output, or None if it
    failed; problems). Raises `JudgeError`."""
    label = f"{plugin.key}: making {plugin.name}"
    create = partial(plugin.cls, plugin.config, resources)
    reward, wrong = await asyncio.to_thread(find.attempt, label, create)
    if reward is None:
        return None, wrong
    inputs_G = [inputs, inputs] if reward.scores_groups() else [inputs]
    output, *_ = await scores(reward, inputs_G)
    label = f"{plugin.key}: closing {plugin.name}"
    _, wrong = await asyncio.to_thread(find.attempt, label, reward.close)
    if wrong:
        return None, wrong
    if not output.traceback:
        return output, []
    return None, [f"{plugin.key}: on a made-up sample, {plugin.name} {output.failure}"]


def made_up_input(resolved: Resolved, side_px: int = SIDE_PX) -> RewardInput:
    """A reward's input with the fields that every data source provides; its pictures are a gradient
    with sides of `side_px`."""
    from PIL.Image import linear_gradient

    picture = linear_gradient("L").resize((side_px, side_px)).convert("RGB")
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

    unusable, raised = find.attempt(f"{key} on a made-up micro-batch", problems)
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

SHOWN_REPLY_CHARS = 300
START_PATIENCE_S = 60.0
"""Longest wait for a judge that has too many requests, or that fails between two questions."""


@dataclass
class JudgeCheck:
    """The result of asking the judge."""

    problems: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    """A line for each reward that was asked or skipped; endpoints that are down, if one answers."""
    down: list[str] = field(default_factory=list)
    """Why endpoints cannot be reached."""


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
    reward_input, result = _reward_input(resolved, sample, num_sources), JudgeCheck()
    await asyncio.gather(
        *(
            _ask_base(resolved, base, wait_s, sample is None, reward_input, result)
            for base in api_bases
        )
    )
    (result.lines if len(result.down) < len(api_bases) else result.problems).extend(result.down)
    return result


async def _ask_base(
    resolved: Resolved,
    base: str,
    wait_s: float,
    is_made_up: bool,
    reward_input: RewardInput,
    result: JudgeCheck,
) -> None:
    # A run waits, e.g. until a quota is renewed; before a run, such a wait is a problem to report.
    config = resolved.config.judge
    patience_s = min(config.max_outage_s, config.timeout_s, START_PATIENCE_S)
    try:
        client = JudgeClient(config.model_copy(update={"max_outage_s": patience_s}), base)
    except ValueError as error:  # a bad key, proxy or certificate in the environment
        result.problems.append(f"judge: {error}")
        return
    try:
        await client.check_health(wait_s)
        for plugin in resolved.rewards.values():
            if plugin.cls.needs_judge:
                await _ask_reward(plugin, client, base, is_made_up, reward_input, result)
    except JudgeUnreachableError as error:
        result.down.append(str(error))
    except JudgeError as error:
        result.problems.append(f"judge: {error}")
    finally:
        await client.aclose()


async def _ask_reward(
    plugin: Plugin[Reward],
    client: JudgeClient,
    base: str,
    is_made_up: bool,
    reward_input: RewardInput,
    result: JudgeCheck,
) -> None:
    if plugin.cls.runs_model or (is_made_up and plugin.cls.needs_with(plugin.config) - READABLE):
        reason = "loads a model" if plugin.cls.runs_model else "reads hidden keys of the data"
        result.lines.append(f"{plugin.key}: not asked, since it {reason}")
        return
    limit_s = 2 * client.config.timeout_s
    started = time.monotonic()
    try:
        async with asyncio.timeout(limit_s):
            output, problems = await grade_once(plugin, Resources(client, "cpu"), reward_input)
    except TimeoutError:
        reason = f"did not answer within {limit_s:g} s\n{_remedy('timeout', client.config)}"
        output, problems = None, [f"{plugin.key}: {base} {reason}"]
    if output is not None and output.failure not in (None, NO_VALUE):
        problems = [f"{plugin.key}: {base} {_why_unusable(output, client.config)}"]
    result.problems += problems
    if output is not None and not problems:
        num, took = plugin.cls.num_questions(plugin.config), duration(time.monotonic() - started)
        value = output.failure if output.value is None else f"value {output.value:.3g}"
        result.lines.append(f"{plugin.key}: {base} answered {num} questions in {took}, {value}")


def _why_unusable(output: RewardOutput, config: JudgeConfig) -> str:
    failure = str(output.failure)
    if not output.replies:
        return f"gave no answer: {failure}\n{_remedy(failure, config)}"
    reply = excerpt(output.replies[-1], SHOWN_REPLY_CHARS) or "(nothing)"
    remedy = (
        "set judge.guided_json='always' if the endpoint supports it; raise judge.max_tokens="
        f"{config.max_tokens} if the reply is cut or empty (a reasoning model also spends it on "
        f"reasoning); else choose another judge.model={config.model!r}. For min_legal_mass: a "
        "model that does not think first, other labels, or a prompt of your own."
    )
    return f"gives unusable answers: {failure}; its reply: {reply}\nRemedy: {remedy}"


def _remedy(failure: str, config: JudgeConfig) -> str:
    if failure.startswith("http_"):
        return remedy_for(429 if failure.startswith(TOO_MANY_REQUESTS) else 500, None, config)
    return (
        "Remedy: look into the endpoint's own log; raise judge.timeout_s="
        f"{config.timeout_s:g} if it is slow."
    )


def _reward_input(resolved: Resolved, sample: Sample | None, num_sources: int) -> RewardInput:
    """The input to grade. Without a `sample`, it has `num_sources` sources in the largest size that
    the judge gets."""
    fake = made_up_input(resolved, resolved.config.judge.image_side_px)
    if sample is None:
        return replace(fake, sample=replace(fake.sample, sources=fake.sample.sources * num_sources))
    sources = sample.sources or fake.sample.sources
    filled = replace(sample, sources=sources, target=sample.target or fake.sample.target)
    return replace(fake, sample=filled, image=fake.image and (filled.source or fake.image))


# ---- judge verdict -------------------------------------------------------------------------------
# Whether a config's judge may be trusted: its audit's verdict, and what a start does about it.
#
# `judge_audit.json` in the folder of the runs has the audits, one entry per judge (`judge.audit`).

FILE = "judge_audit.json"
MAX_NOISE = 0.1
"""Largest standard deviation of repeated readings of one picture; rewards are 0 to 1."""
MAX_UNGRADED = 0.05
"""Largest share of results that get no usable reply: over all, and in each kind."""
MIN_PAIRS = 8
"""A kind or category with fewer pairs decides nothing by itself."""
RULES = 3
"""The number of the cases and rules that decide; an audit by others counts as none."""
PICTURES = frozenset({"source", "image", "target"})
AUDIT = (
    *(sys.executable, "-u", "-P", "-m", "rl.tools.commands.audit_judge"),
    *("audit", "stdin", "--at-start"),
)
"""The program that audits the judge of a starting run, which does not import it."""
DAMAGED = "{} is damaged ({}): delete it, and audit again"
REMEDY = (
    "`rl judge audit` with this config shows the errors (docs/judge.md); set judge.audit: 'warn' "
    "to train with this judge nevertheless"
)


@dataclass(frozen=True)
class Kind:
    """How well one kind of wrong results is told from the right ones."""

    name: str
    """'no_edit', 'partial', ...; 'all kinds' for all of them."""
    num_pairs: int
    """Pairs of a right and a wrong result of one sample."""
    accuracy: float
    """Share of pairs of one sample in which the right result scores higher."""
    ties: float
    """Share of pairs with equal scores."""
    auroc: float
    """Probability that a right result scores above one of these; ties count half."""
    auroc_interval: tuple[float, float]
    """95 %; nan, like the other numbers, without pairs."""
    mean: float
    """Mean value of these results, 0 to 1."""


class Pair(NamedTuple):
    """The case and kind of a wrong result, the value of the case's right result, and its own."""

    case: int
    kind: str
    right: float
    wrong: float


@dataclass(frozen=True)
class RewardAudit:
    """The audit of one reward. Values are 0 to 1."""

    reward: str
    """Its name in the config."""
    num_graded: int
    """Readings that gave a value."""
    num_ungraded: int
    """Readings that gave none."""
    num_unreadable: int
    """Those of the ungraded readings to which the judge did reply."""
    first_failure: str
    """Why the first of them was not graded."""
    silent: Mapping[str, tuple[float, float]]
    """Kind, the right results too -> (mean share of a result's readings that are ungraded; the
    lower end of its 95 % interval)."""
    mean_correct: float
    """Mean value of the right results."""
    overall: Kind
    """All wrong results."""
    kinds: Sequence[Kind]
    """Each kind of wrong results, also one without a graded result."""
    categories: Sequence[Kind]
    """The clearly wrong results by the sample's category."""
    noise_sd: float
    """Standard deviation of repeated readings of one result."""
    num_levels: int
    """Different values among the readings."""
    lowest_share: float
    """Share of readings that are 0."""
    highest_share: float
    """Share of readings that are 1."""
    failures: Sequence[str] = ()
    """Why the judge fails."""
    doubts: Sequence[str] = ()
    """What the cases do not decide. The judge passes if there are neither failures nor doubts."""
    worst: Sequence[Pair] = field(default=(), repr=False)
    """All pairs, worst first; not in the file."""


def audited_rewards(resolved: Resolved) -> tuple[list[str], list[str]]:
    """(the names of the rewards that judge pictures; why the others are not audited)."""
    names, reasons = [], []
    for name, plugin in resolved.rewards.items():
        cls, needs = plugin.cls, plugin.cls.needs_with(plugin.config)
        if "image" not in needs or not (cls.needs_judge or cls.runs_model):
            reasons.append(f"{name}: not audited, because it judges no picture by a model")
        elif cls.scores_groups() or needs - PICTURES:
            reasons.append(f"{name}: not audited, because it reads more than one sample's pictures")
        else:
            names.append(name)
    return names, reasons


def rewards_that_ask(resolved: Resolved) -> list[str]:
    """Of the audited rewards, those that a start audits: they train, and need no model but the
    judge."""
    return [
        name
        for name in audited_rewards(resolved)[0]
        for plugin in [resolved.rewards[name]]
        if plugin.cls.needs_judge and not (plugin.cls.runs_model or plugin.keys.held_out_only)
    ]


def decided(result: RewardAudit, limits: JudgeConfig) -> tuple[list[str], list[str]]:
    """(failures, without any: doubts) by the thresholds `judge.audit_*`; without both it passes.

    Over all kinds, the 95 % interval of the AUROC has to lie above the line `audit_min_auroc`. It
    fails if it neither does so nor reaches a quarter of the errors that the line allows: more cases
    would hardly help. A kind or category fails if its interval lies below the line; a kind passes
    if it lies above twice those errors, so that the judge is not blind to it.
    """
    line, errors = limits.audit_min_auroc, 1 - limits.audit_min_auroc
    rows = [row for row in (*result.kinds, *result.categories) if row.num_pairs >= MIN_PAIRS]
    weak = [row for row in rows if row.auroc_interval[1] < line]
    unclear = [
        kind
        for kind in result.kinds
        if kind.num_pairs >= MIN_PAIRS
        and kind.auroc_interval[0] < 1 - 2 * errors
        and kind.auroc_interval[1] >= line
    ]
    if result.overall.auroc_interval[0] < line:  # not without pairs
        may_be_good = result.overall.auroc_interval[1] >= 1 - errors / 4
        (unclear if may_be_good else weak).insert(0, result.overall)
    limit = f"judge.audit_min_auroc={line:g}"
    failures = [f"{row.name}: AUROC {row.auroc:.2f}, not above {limit}" for row in weak]
    doubts = [
        f"{row.name}: AUROC {row.auroc:.2f} ({low:.2f}-{high:.2f}), to be above {limit}"
        for row in unclear
        for low, high in [row.auroc_interval]
    ]
    if result.noise_sd > MAX_NOISE:
        failures.append(
            f"readings of one picture differ by {result.noise_sd:.3f} (standard deviation), above "
            f"{MAX_NOISE:g}: raise the reward's n_evals"
        )
    for kind, (share, at_least) in result.silent.items():
        if share > MAX_UNGRADED:
            (failures if at_least > MAX_UNGRADED else doubts).append(
                f"{kind}: no usable reply to {share:.0%}, above {MAX_UNGRADED:.0%}"
            )
    if few := too_few_graded(result):
        failures.append(few)
    return failures, [] if failures else doubts


def too_few_graded(result: RewardAudit, num_excused: int = 0) -> str:
    """Why so many results are ungraded that an audit or attack shows nothing; '' if it does.
    `num_excused` ungraded ones do not count."""
    num_all = result.num_graded + result.num_ungraded
    num_lost = result.num_ungraded - num_excused
    if num_lost < num_all and num_lost <= MAX_UNGRADED * num_all:
        return ""
    return (
        f"{num_lost} of {num_all} results got no usable reply, above {MAX_UNGRADED:.0%}; the "
        f"first: {result.first_failure}"
    )


def identity(resolved: Resolved) -> dict[str, Any]:
    """What a verdict depends on: the rules, the model, the parameters of its requests, and each
    audited reward's config with a digest of its prompts."""
    judge = resolved.config.judge
    parameters = ("model", "revision", "temperature", "max_tokens", "image_side_px", "guided_json")
    rewards = {}
    for name in audited_rewards(resolved)[0]:
        config = resolved.rewards[name].config
        read = getattr(config, "read_prompts", None)
        text = "\0".join([*read(), *read(of_several=True)]) if read else ""
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        rewards[name] = {**config.model_dump(mode="json"), "prompts": digest}
    return {"rules": RULES, **{key: getattr(judge, key) for key in parameters}, "rewards": rewards}


def key_of(judge_identity: Mapping[str, Any]) -> str:
    """A digest of an identity: the entry's name in `judge_audit.json`."""
    return hashlib.sha256(json.dumps(judge_identity, sort_keys=True).encode()).hexdigest()[:16]


def file_of(config: RunConfig) -> Path:
    """Runs in one folder share their audits."""
    return config.run_dir.parent / FILE


def entries(file: Path) -> dict[str, Any]:
    """All entries of the file by key; {} if there is none. Raises ValueError if it is damaged."""
    try:
        return dict(json.loads(read_bytes(file))) if file.is_file() else {}
    except (TypeError, ValueError) as error:
        raise ValueError(DAMAGED.format(file, error)) from None


@dataclass(frozen=True)
class Verdict:
    """What is known about the judge of a config."""

    passed: bool | None
    """None: it has not been audited. False: it failed, or its audit is undecided."""
    text: str


def verdict(resolved: Resolved) -> Verdict:
    """The statement of `judge_audit.json` about this config's judge, by the config's thresholds."""
    file, limits = file_of(resolved.config), resolved.config.judge
    try:
        entry = entries(file).get(key_of(identity(resolved)), {})
        if "audits" not in entry:
            return Verdict(None, f"the judge has not been audited (no entry in {file})")
        audits = TypeAdapter(list[RewardAudit]).validate_python(entry["audits"])
        day = entry["date"][:10]
    except (LookupError, TypeError, ValueError) as error:
        return Verdict(False, DAMAGED.format(file, error))
    decisions = [(audit.reward, *decided(audit, limits)) for audit in audits]
    failures = [f"{reward}: {text}" for reward, texts, _ in decisions for text in texts]
    doubts = [f"{reward}: {text}" for reward, _, texts in decisions for text in texts]
    if not failures and not doubts:
        return Verdict(True, f"the judge passed its audit of {day}")
    what = f"the judge failed its audit of {day}"
    if not failures:
        what = f"the judge's audit of {day} is undecided: add cases (`rl judge audit --cases N`)"
    return Verdict(False, f"{what}: {'; '.join(failures or doubts)}")


def judge_passed(
    resolved: Resolved,
    key: str,
    judge: JudgeClient,
    log: Path,
    dist: Dist,
    loop: BackgroundLoop,
    console: Console,
) -> bool | None:
    """Whether the judge of `resolved.by_judge[key]` has passed an audit; None if `judge.audit` is
    'off' or no audited reward that trains asks the judge. `log`: of the judge, if the run starts
    it. Collective.

    'required' audits a judge that has not been audited, and raises JudgeError on every rank if
    the judge fails or its audit is undecided.
    """
    part = resolved.by_judge[key]
    setting = part.config.judge.audit
    if setting == "off" or not rewards_that_ask(part):
        return None
    known = verdict(part) if dist.is_main else Verdict(None, "")
    if dist.is_main and known.passed is None and setting == "required":
        words = [key, str(log), *(each.url for each in judge.addresses)]
        try:
            loop.run(_audit(resolved.config, words, console), signals.stop_received)
            known = verdict(part)
        except (ConfigError, JudgeError, ValueError) as error:  # broadcast to the other ranks below
            known = Verdict(False, f"the judge cannot be audited: {error}")
    known = dist.broadcast(known)
    if known.passed:
        console.say(known.text)
    elif setting == "required":
        raise JudgeError(f"judge.audit: {known.text}\n{REMEDY}")
    elif dist.is_main:
        warn(f"{known.text}: the rewards may be wrong; {REMEDY.partition(';')[0]}")
    return bool(known.passed)


async def _audit(config: RunConfig, words: Sequence[str], console: Console) -> None:
    """Audit a judge now, in a child process that does not outlive this coroutine; it shows what the
    child prints. Raises JudgeError with the reason that the child writes to stderr."""
    child = await asyncio.create_subprocess_exec(
        *AUDIT,
        *words,
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        limit=2**20,  # of a line
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),  # has its plugins
            "PYTHONIOENCODING": "utf-8:backslashreplace",
        },
    )
    assert child.stdin and child.stdout and child.stderr
    try:
        child.stdin.write(json.dumps(config.model_dump(mode="json")).encode())
        child.stdin.write_eof()
        reason = asyncio.create_task(child.stderr.read())
        async for line in child.stdout:
            console.say(line.decode(errors="replace").rstrip("\n"))
        text, code = (await reason).decode(errors="replace").strip(), await child.wait()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if code:  # perhaps by a batch system's signal, which the run got, too
        error = JudgeError(text or f"the audit ended with exit code {code}")
        raise StoppedError if signals.stop_received() else error
