"""Audit a config's judge on results of known quality, or attack it.

    rl judge audit configs/qwen_image_edit.jsonnet
    rl judge audit config.jsonnet --pairs pairs.parquet \\
        --columns instruction=prompt,source=image,better=chosen,worse=rejected
    rl judge attack config.jsonnet judge.model=my-judge

The config's own rewards ask its own judge, about pictures whose truth is known:
drawn scenes, the config's data (judge.audit_set: 'data'), or your labelled pairs. The
result is kept in judge_audit.json beside the runs, where a run looks for it
(judge.audit). The exit code is 1 if the judge fails, 2 if it cannot be asked, 3 if
the cases are too few to decide: add some by --cases N.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, redirect_stderr
from functools import partial
from pathlib import Path

from rl import build, printing
from rl.check.this_machine import has_gpus
from rl.check.trials import audited_rewards, file_of, rewards_that_ask
from rl.config.schema import ConfigError, RunConfig, load_config
from rl.console import duration
from rl.judge.client import JudgeClient, JudgeError, JudgeStats
from rl.judge.http import resolve_api_bases
from rl.judge.server import StartedJudge, raise_if_ended
from rl.ranks.signals import remedy
from rl.tools import judge_audit
from rl.tools.audit_cases import configured_cases, pair_cases
from rl.tools.commands.edit import at_least_one
from rl.tools.judge_audit import attack_lines, audit_lines, write_audit_page


@printing.program
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 the judge passed, 1 it failed, 2 it could not be asked, 3 undecided."""
    printing.guard()
    parser = printing.Parser("rl judge", f"{__doc__}{printing.KEY_VALUE}")
    actions = ("audit", "attack")
    parser.add_argument("action", choices=actions, metavar="action", help="audit or attack")
    parser.add_config()
    parser.add_argument(
        "--cases", type=at_least_one, default=judge_audit.NUM_CASES, metavar="N", help="samples: 64"
    )
    parser.add_argument("--seed", type=int, default=0, help="other drawn scenes")
    parser.add_argument("--pairs", metavar="FILE", help="labelled pairs, or a data set on the hub")
    parser.add_argument("--columns", default="", help="instruction=..,source=..,better=..,worse=..")
    parser.add_argument("--at-start", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args(argv)
    if args.columns and not args.pairs:
        parser.error("--columns names the columns of --pairs FILE")
    try:
        if args.at_start:
            with redirect_stderr(sys.stdout):  # stderr has nothing but the reason of a failure
                return asyncio.run(_at_start(*args.at_start))
        resolved = build.resolve(load_config(args.config, args.overrides))
        parts = resolved.by_judge
        asked = [key for key, part in parts.items() if audited_rewards(part)[0]]
        codes = {asyncio.run(_run(args, key, parts[key])) for key in asked or ["judge"]}
        return next((code for code in (2, 1, 3) if code in codes), 0)
    except BrokenPipeError:
        raise
    except (ConfigError, JudgeError, ValueError, OSError) as error:
        print(remedy(error) if isinstance(error, OSError) else error, file=sys.stderr)
        return 2


async def _run(args: argparse.Namespace, key: str, resolved: build.Resolved) -> int:
    """Ask one judge; `key`: as in `Resolved.by_judge`. Returns the exit code."""
    names, reasons = audited_rewards(resolved)
    for reason in reasons:
        print(reason)
    if not names:
        print("no reward of this config judges pictures by a model: there is nothing to audit")
        return 2
    config = resolved.config
    device = "cuda:0" if has_gpus() else "cpu"
    async with AsyncExitStack() as stack:
        client = await _client(resolved, stack, file_of(config).with_suffix(".log"))
        if args.pairs:
            columns = dict(part.split("=", 1) for part in args.columns.split(",") if "=" in part)
            cases = pair_cases(resolved, args.pairs, columns)[: args.cases]
            if not cases:
                raise ValueError(f"--pairs: {args.pairs} has no usable row")
        else:
            cases = configured_cases(resolved, names, args.cases, args.seed)
        file = file_of(config)
        judge_audit.save_results(resolved)  # finds an unwritable file before questions cost
        started = time.monotonic()
        if args.action == "attack":
            attacks, code = {}, 0
            for name in names:
                plugin = resolved.rewards[name]
                results, right, floor = await judge_audit.attack(
                    plugin, client, device, cases, config.judge
                )
                print("\n".join(attack_lines(plugin.key, results, right, floor)))
                code |= not all(result.passed for result in results)
                attacks[name] = results
            judge_audit.save_results(resolved, attacks=attacks)
        else:
            audits = await judge_audit.audit_all(resolved, names, client, device, cases)
            for audit in audits:
                print("\n".join(audit_lines(audit)))
            undecided = 3 * any(audit.doubts for audit in audits)
            code = 1 if any(audit.failures for audit in audits) else undecided
            page = file.with_name(f"{key.removesuffix('judge')}{file.stem}.html")
            write_audit_page(page, f"Audit of {config.judge.model}", audits, cases)
            print(f"page: {page}")
            judge_audit.save_results(resolved, **{"pairs" if args.pairs else "audits": audits})
        stats = client.take_stats() if client else JudgeStats()
        tokens = f"{stats.prompt_tokens} + {stats.completion_tokens} tokens"
        print(f"{stats.requests} requests, {tokens}, {time.monotonic() - started:.1f} s")
        print(f"kept in: {file}")
    return code


async def _at_start(key: str, log: str, *api_bases: str) -> int:
    """Audit the judge of a run that starts, whose config is on stdin. `key`: as in
    `Resolved.by_judge`; `log`, `api_bases`: as in `_client`."""
    started = time.monotonic()
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)  # as the run, from its folder, too
    resolved = build.resolve(RunConfig.model_validate_json(sys.stdin.read())).by_judge[key]
    names = rewards_that_ask(resolved)
    cases = configured_cases(resolved, names, judge_audit.NUM_CASES, seed=0)
    print(f"auditing the judge on {len(cases)} samples of known quality")
    async with AsyncExitStack() as stack:
        client = await _client(resolved, stack, Path(log), api_bases)
        audits = await judge_audit.audit_all(resolved, names, client, "cpu", cases)
    judge_audit.save_results(resolved, audits=audits)
    took = duration(time.monotonic() - started)
    for audit in audits:
        passed = [f"{audit.reward}: PASS in all {len(audit.kinds)} kinds, {took}"]
        print("\n".join(audit_lines(audit) if audit.failures or audit.doubts else passed))
    return 0


async def _client(
    resolved: build.Resolved, stack: AsyncExitStack, log: Path, api_bases: Sequence[str] = ()
) -> JudgeClient | None:
    """A client of the config's judge, which is started if the config says so. `log`: the output of
    a started judge; `api_bases`: where it runs already."""
    if not resolved.needs_judge:
        return None
    config = resolved.config.judge
    if config.start_command and not api_bases:
        api_bases = [await stack.enter_context(StartedJudge(config, log)).wait_until_ready()]
    bases = api_bases or resolve_api_bases(config.api_base)
    client = JudgeClient(config, bases, check=partial(raise_if_ended, config, log))
    stack.push_async_callback(client.aclose)
    await client.check_health(0.0)
    return client


if __name__ == "__main__":
    sys.exit(main())
