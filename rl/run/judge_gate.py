"""Decides at a run's start whether its judge may be trusted (`judge.audit`)."""

from __future__ import annotations

import time

from rl.audit import judge_audit
from rl.audit.audit_report import audit_lines
from rl.audit.audit_sets import configured_cases
from rl.build import Resolved
from rl.config.schema import ConfigError
from rl.console import Console, duration, warn
from rl.judge.client import JudgeClient, JudgeError
from rl.judge.http import BackgroundLoop
from rl.ranks import signals
from rl.ranks.dist import Dist

REMEDY = (
    "`rl judge audit` with this config shows the errors (docs/judge.md); set judge.audit: 'warn' "
    "to train with this judge nevertheless"
)


def judge_passed(
    resolved: Resolved, judge: JudgeClient, dist: Dist, loop: BackgroundLoop, console: Console
) -> bool | None:
    """Whether the judge has passed an audit; None if `judge.audit` is 'off' or no audited reward
    that trains asks the judge. Collective.

    'required' audits a judge that has not been audited, and raises JudgeError on every rank if
    the judge fails or its audit is undecided.
    """
    setting = resolved.config.judge.audit
    names = judge_audit.rewards_that_ask(resolved)
    if setting == "off" or not names:
        return None
    verdict = judge_audit.Verdict(None, "")
    if dist.is_main:
        try:
            verdict = judge_audit.verdict(resolved)
            if verdict.passed is None and setting == "required":
                _audit(resolved, judge, names, loop, console)
                verdict = judge_audit.verdict(resolved)
        except (ConfigError, JudgeError, ValueError) as error:  # broadcast to the other ranks below
            verdict = judge_audit.Verdict(False, f"the judge cannot be audited: {error}")
    verdict = dist.broadcast(verdict)
    if verdict.passed:
        console.say(verdict.text)
    elif setting == "required":
        raise JudgeError(f"judge.audit: {verdict.text}\n{REMEDY}")
    elif dist.is_main:
        warn(f"{verdict.text}: the rewards may be wrong; {REMEDY.partition(';')[0]}")
    return bool(verdict.passed)


def _audit(
    resolved: Resolved, judge: JudgeClient, names: list[str], loop: BackgroundLoop, console: Console
) -> None:
    """Audit the judge now, and save the result."""
    started = time.monotonic()
    cases = configured_cases(resolved, names, judge_audit.NUM_CASES, seed=0)
    console.say(f"auditing the judge on {len(cases)} samples of known quality")

    audits = judge_audit.audit_all(resolved, names, judge, "cpu", cases)
    results = loop.run(audits, signals.stop_received)
    judge_audit.save_results(resolved, audits=results)
    judge.take_stats()  # these requests belong to no iteration
    for result in results:
        if result.failures or result.doubts:
            for line in audit_lines(result):
                console.say(line)
        else:
            took = duration(time.monotonic() - started)
            console.say(f"{result.reward}: PASS in all {len(result.kinds)} kinds, {took}")
