"""Audits a judge of a starting run, which runs this: `judge.audit: 'required'`.

    python -m rl.audit.audit_at_start <judge's key> <judge's log>

stdin: JSON with the run's config, and URL of the judge -> parameters that it does not accept.
stdout: what the run shows; stderr: why there is no audit.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path

from rl import build
from rl.audit import judge_audit
from rl.audit.audit_report import audit_lines
from rl.audit.audit_sets import configured_cases
from rl.check.judge_verdict import rewards_that_ask
from rl.config.schema import ConfigError, RunConfig
from rl.console.console import duration
from rl.judge.client import JudgeClient, JudgeError
from rl.judge.dialect import Dialect
from rl.judge.server import raise_if_ended
from rl.ranks.error_messages import remedy
from rl.ranks.signals import die_with_parent
from rl.text import terminal


def main() -> int:
    """Exit code: 0 the audit is kept, whatever it says; 1 there is none."""
    terminal.guard()
    die_with_parent()
    key, log = sys.argv[1:]
    try:
        with redirect_stderr(sys.stdout):
            asked = json.load(sys.stdin)
            resolved = build.resolve(RunConfig.model_validate(asked["config"]))
            asyncio.run(_audit(resolved.by_judge[key], Path(log), asked["left_out"]))
    except (ConfigError, JudgeError, ValueError, OSError) as error:
        print(remedy(error) if isinstance(error, OSError) else error, file=sys.stderr)
        return 1
    return 0


async def _audit(
    resolved: build.Resolved, log: Path, left_out: Mapping[str, Sequence[str]]
) -> None:
    started = time.monotonic()
    config, rewards = resolved.config.judge, rewards_that_ask(resolved)
    cases = configured_cases(resolved, rewards, judge_audit.NUM_CASES, seed=0)
    print(f"auditing the judge on {len(cases)} samples of known quality")
    judge = JudgeClient(config, list(left_out), check=partial(raise_if_ended, config, log))
    judge.adopt({base: Dialect(names=set(names)) for base, names in left_out.items()})
    try:
        await judge.check_health(0.0)
        results = await judge_audit.audit_all(resolved, rewards, judge, "cpu", cases)
    finally:
        await judge.aclose()
    judge_audit.save_results(resolved, audits=results)
    for result in results:
        if result.failures or result.doubts:
            print("\n".join(audit_lines(result)))
        else:
            took = duration(time.monotonic() - started)
            print(f"{result.reward}: PASS in all {len(result.kinds)} kinds, {took}")


if __name__ == "__main__":
    sys.exit(main())
