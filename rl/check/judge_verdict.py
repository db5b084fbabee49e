"""Whether a config's judge may be trusted: its audit's verdict, and what a start does about it.

`judge_audit.json` in the folder of the runs has the audits, one entry per judge (`judge.audit`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rl.build import Resolved
from rl.config.loading import read_bytes
from rl.config.schema import ConfigError, JudgeConfig, RunConfig
from rl.console import Console, warn
from rl.judge.client import JudgeClient, JudgeError
from rl.judge.http import BackgroundLoop, StoppedError
from rl.ranks import signals
from rl.ranks.dist import Dist

FILE = "judge_audit.json"
MIN_PAIRS = 8
"""A kind or category with fewer pairs decides nothing by itself."""
RULES = 2
"""The number of the rules that decide; an audit by others counts as none."""
PICTURES = frozenset({"source", "image", "target"})
AUDIT = (
    *(sys.executable, "-u", "-P", "-m", "rl.tools.commands.audit_judge"),
    *("audit", "stdin", "--at-start"),
)
"""The program that audits the judge of a starting run, which does not import it."""
REMEDY = (
    "`rl judge audit` with this config shows the errors (docs/judge.md); set judge.audit: 'warn' "
    "to train with this judge nevertheless"
)


@dataclass(frozen=True)
class Kind:
    """How well one kind of wrong results is told from the right ones."""

    name: str
    num_pairs: int
    accuracy: float
    """Share of pairs of one sample in which the right result scores higher."""
    ties: float
    auroc: float
    auroc_interval: tuple[float, float]
    """95 %; nan, like the other numbers, without pairs."""
    mean: float
    """Mean value of these results, 0 to 1."""


@dataclass(frozen=True)
class RewardAudit:
    """The audit of one reward. Values are 0 to 1."""

    reward: str
    num_graded: int
    num_ungraded: int
    num_unreadable: int
    """Those of the ungraded readings to which the judge did reply."""
    first_failure: str
    """Why the first of them was not graded."""
    silent: Mapping[str, tuple[float, float]]
    """Kind, the right results too -> (mean share of a result's readings that are ungraded; the
    lower end of its 95 % interval)."""
    mean_correct: float
    overall: Kind
    """All wrong results."""
    kinds: Sequence[Kind]
    """Also one without a graded result."""
    categories: Sequence[Kind]
    """The clearly wrong results by the sample's category."""
    noise_sd: float
    """Standard deviation of repeated readings of one result."""
    reliability: float
    """ICC of one reading within the results of one sample."""
    num_levels: int
    effective_levels: float
    lowest_share: float
    highest_share: float
    failures: Sequence[str] = ()
    """Why the judge fails."""
    doubts: Sequence[str] = ()
    """What the cases do not decide. The judge passes if there are neither failures nor doubts."""
    worst: Sequence[tuple[int, str, float, float]] = field(default=(), repr=False)
    """(case, kind, value of the right result, value of the wrong one), worst first."""


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
    if result.noise_sd > limits.audit_max_noise:
        failures.append(
            f"readings of one picture differ by {result.noise_sd:.3f} (standard deviation), above "
            f"judge.audit_max_noise={limits.audit_max_noise:g}: raise the reward's n_evals"
        )
    for kind, (share, at_least) in result.silent.items():
        if share > limits.audit_max_ungraded:
            (failures if at_least > limits.audit_max_ungraded else doubts).append(
                f"{kind}: no usable reply to {share:.0%}, above "
                f"judge.audit_max_ungraded={limits.audit_max_ungraded:g}"
            )
    if few := too_few_graded(result, limits):
        failures.append(few)
    return failures, [] if failures else doubts


def too_few_graded(result: RewardAudit, limits: JudgeConfig, num_excused: int = 0) -> str:
    """Why so many results are ungraded that an audit or attack shows nothing; '' if it does.
    `num_excused` ungraded ones do not count."""
    num_all = result.num_graded + result.num_ungraded
    num_lost = result.num_ungraded - num_excused
    if num_lost < num_all and num_lost <= limits.audit_max_ungraded * num_all:
        return ""
    return (
        f"{num_lost} of {num_all} results got no usable reply, above "
        f"judge.audit_max_ungraded={limits.audit_max_ungraded:g}; the first: {result.first_failure}"
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
    if not file.is_file():
        return {}
    try:
        found = json.loads(read_bytes(file))
        if not isinstance(found, dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}): delete it, and audit again") from None
    return found


@dataclass(frozen=True)
class Verdict:
    """What is known about the judge of a config."""

    passed: bool | None
    """None: it has not been audited. False: it failed, or its audit is undecided."""
    text: str


def verdict(resolved: Resolved) -> Verdict:
    """The statement of `judge_audit.json` about this config's judge, by the config's thresholds.
    Raises ValueError if the file is damaged."""
    file = file_of(resolved.config)
    entry = entries(file).get(key_of(identity(resolved)), {})
    limits = resolved.config.judge
    try:
        if "audits" not in entry:
            return Verdict(None, f"the judge has not been audited (no entry in {file})")
        audits = TypeAdapter(list[RewardAudit]).validate_python(entry["audits"])
        day = entry["date"][:10]
        found = [(each.reward, decided(each, limits)) for each in audits]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is damaged ({error}): delete it, and audit again") from None
    for i, what in enumerate(
        (
            f"the judge failed its audit of {day}",
            f"the judge's audit of {day} is undecided: add cases (`rl judge audit --cases N`)",
        )
    ):
        if texts := [f"{reward}: {text}" for reward, both in found for text in both[i]]:
            more = f"; {len(texts) - 3} more" if len(texts) > 3 else ""
            return Verdict(False, f"{what}: {'; '.join(texts[:3])}{more}")
    return Verdict(True, f"the judge passed its audit of {day}")


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
    known = Verdict(None, "")
    if dist.is_main:
        try:
            known = verdict(part)
            if known.passed is None and setting == "required":
                loop.run(
                    _audit(resolved.config, [key, str(log), *judge.dialects()], console),
                    signals.stop_received,
                )
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
