"""Every metric that may be logged: its unit and meaning. The README's table is made from this.

What: `METRICS`, `check_known` (held against every line that a run logs) and `markdown_table`. What
not: computing any of them. `<...>` in a name stands for words that the config or the data choose,
e.g. a reward's name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache


@dataclass(frozen=True)
class MetricDoc:
    """One row of the table."""

    unit: str
    """'1' for pure numbers, '0..1' for shares and rewards."""
    meaning: str
    """One sentence, with the denominator of a mean."""


METRICS: dict[str, MetricDoc] = {
    # Rewards: over the episodes of all ranks
    "reward/mean": MetricDoc("0..1", "mean composed reward of graded and policy-failed episodes"),
    "reward/std": MetricDoc("0..1", "standard deviation of the same rewards over the whole batch"),
    "reward/max": MetricDoc("0..1", "largest of them"),
    "reward/group_std": MetricDoc("0..1", "mean over groups of the standard deviation in a group"),
    "reward/noise_variance_share": MetricDoc(
        "0..1",
        "with several pictures per completion: share of the reward's variance that the rendering "
        "noise makes, not the words",
    ),
    "reward/part/<name>": MetricDoc(
        "as the reward states", "mean of a reward's value or `<reward>/<part>` over graded episodes"
    ),
    "bare_reward": MetricDoc(
        "0..1",
        "mean reward of the bare arm: the user's own words handed on as they are, same noise",
    ),
    "reward_gain": MetricDoc("-1..1", "mean over episodes of reward - bare reward of its prompt"),
    "renderer/clip_cut_share": MetricDoc(
        "0..1", "sd3: share of prompts longer than CLIP's 77 tokens, whose end it does not read"
    ),
    "renderer/clip_cut_tokens": MetricDoc("tokens", "sd3: mean tokens cut so per picture"),
    "renderer/t5_cut_share": MetricDoc("0..1", "sd3: share longer than renderer.max_t5_tokens"),
    "status/scored": MetricDoc("0..1", "share of episodes rendered and graded"),
    "status/policy_failed": MetricDoc("0..1", "share whose completion could not be used"),
    "status/ungraded": MetricDoc("0..1", "share lost to the renderer or the judge"),
    "groups/zero_spread": MetricDoc("0..1", "share of groups whose rewards are all equal"),
    "groups/distinct_completions": MetricDoc(
        "0..1", "mean over groups of distinct completions / completions"
    ),
    # Judge
    "judge/verdict_mean_s": MetricDoc("s", "mean time from picture to verdict, queueing included"),
    "judge/latency_p50_s": MetricDoc("s", "median time of one request, of the slowest rank"),
    "judge/latency_p95_s": MetricDoc("s", "95th percentile of the same"),
    "judge/latency_max_s": MetricDoc("s", "longest request"),
    "judge/requests": MetricDoc("requests", "requests sent in this iteration"),
    "judge/reused_replies": MetricDoc(
        "replies", "taken from the journal: asked before in this iteration, or before a crash"
    ),
    "judge/retries": MetricDoc("requests", "requests repeated after a failure or unreadable reply"),
    "judge/breaker_openings": MetricDoc("1", "times the circuit breaker opened"),
    # Tokens
    "tokens/completion_mean": MetricDoc("tokens", "mean completion length, stop token included"),
    "tokens/completion_max": MetricDoc("tokens", "longest completion"),
    "tokens/completion_total": MetricDoc("tokens", "sum of completion lengths over all ranks"),
    "tokens/prompt_mean": MetricDoc("tokens", "mean prompt length, image tokens included"),
    "tokens/truncated": MetricDoc("0..1", "share of completions that hit max_completion_tokens"),
    "tokens/trained": MetricDoc("tokens", "tokens that carry loss: the global denominator"),
    # Data
    "data/skipped_rows": MetricDoc("rows", "bad rows left out at the start"),
    "data/replaced_rows": MetricDoc(
        "rows", "rows that could not be read when taken and were replaced, since the process began"
    ),
    # Held-out run
    "eval/reward": MetricDoc("0..1", "mean reward of greedy completions on the validation samples"),
    "eval/reward/<category>": MetricDoc("0..1", "the same over one category"),
    "eval/part/<name>": MetricDoc("as the reward states", "mean of a reward's value or part there"),
    "eval/bare_reward": MetricDoc("0..1", "mean reward of the bare arm there"),
    "eval/reward_gain": MetricDoc("-1..1", "mean of reward - bare reward there"),
    "eval/ungraded": MetricDoc("0..1", "share of validation episodes lost to renderer or judge"),
    "eval/reference_match": MetricDoc("0..1", "share of completions equal to the reference"),
    "eval_reference/reward": MetricDoc(
        "0..1",
        "mean reward of the RIGHT completions under the current weights: when it falls, the "
        "renderer's conditioning has drifted",
    ),
    "eval_reference/reward/<category>": MetricDoc("0..1", "the same over one category"),
    "eval_reference/part/<name>": MetricDoc("as the reward states", "mean of a part there"),
    "eval_reference/ungraded": MetricDoc("0..1", "share of those lost to renderer or judge"),
    # Learner: per trained token unless said otherwise
    "loss/total": MetricDoc("1", "what was minimised: loss/policy + loss/kl, per optimiser step"),
    "loss/policy": MetricDoc("1", "policy-gradient part"),
    "loss/kl": MetricDoc("1", "kl_coeff x KL part, under kl_placement 'loss'"),
    "kl/reference_k1": MetricDoc("nats", "mean log pi - log pi_ref of the sampled tokens"),
    "kl/reference_k3": MetricDoc("nats", "the same by the low-variance, non-negative k3 estimator"),
    "policy/entropy": MetricDoc("nats", "mean entropy of the next-token distribution"),
    "policy/clip_fraction": MetricDoc("0..1", "share of tokens whose ratio is clipped"),
    "policy/ratio_mean": MetricDoc(
        "1", "mean pi / pi_old; 1 with one update per iteration, on-policy"
    ),
    "policy/ratio_max": MetricDoc("1", "largest of them"),
    "mismatch/k1": MetricDoc("nats", "mean log pi_sampler - log pi_trainer of the sampled tokens"),
    "mismatch/k3": MetricDoc("nats", "KL(sampler || trainer) by the k3 estimator"),
    "mismatch/max_abs_dlogp": MetricDoc("nats", "largest |log pi_sampler - log pi_trainer|"),
    "mismatch/ess": MetricDoc("0..1", "effective sample size of the importance weights, share"),
    "mismatch/weight_mean": MetricDoc("1", "mean truncated importance weight as used"),
    "mismatch/weight_capped": MetricDoc("0..1", "share of tokens whose weight hit importance_cap"),
    "optimizer/learning_rate": MetricDoc("1", "AdamW learning rate of this iteration"),
    "optimizer/grad_norm": MetricDoc("1", "global gradient norm before clipping, mean over steps"),
    "optimizer/steps": MetricDoc("steps", "optimiser steps taken in this iteration"),
    "optimizer/skipped_steps": MetricDoc("steps", "steps skipped for a non-finite gradient"),
    "seconds/<learn_phase>": MetricDoc("s", "learn phase split into forward, backward and step"),
    # Sync
    "sync/mean_abs_dlogp": MetricDoc(
        "nats", "mean |log pi_sampler - log pi_trainer| on the probe prompt after the weight sync"
    ),
    # Time: wall time on rank 0
    "time/<phase>_s": MetricDoc(
        "s", "wall time of one phase of the iteration, without phases inside it, rank 0"
    ),
    "time/iteration_s": MetricDoc("s", "wall time of the whole iteration, rank 0"),
    # Work: what rank 0 computed in that time
    "work/<phase>_tflop": MetricDoc(
        "1e12 operations", "matrix products and convolutions of one phase, rank 0"
    ),
    "work/<phase>_floor_share": MetricDoc(
        "0..1", "least time that work takes at this device's measured rates / the phase's time"
    ),
    "work/iteration_tflop": MetricDoc("1e12 operations", "the same of the whole iteration"),
    "work/iteration_floor_share": MetricDoc(
        "0..1", "sum of the phases' floors / time/iteration_s: how busy the device was kept"
    ),
    "memory/peak_gb": MetricDoc(
        "GB",
        "most memory of any rank's process: on a GPU what torch held in this iteration, on a CPU "
        "what was resident since the process began",
    ),
}


def doc_of(name: str) -> MetricDoc | None:
    """The row that a logged name belongs to; an exact row wins over a pattern."""
    if name in METRICS:
        return METRICS[name]
    return next((METRICS[key] for key in METRICS if "<" in key and _regex(key).match(name)), None)


def check_known(names: Iterable[str]) -> None:
    """Raise ValueError naming every metric that has no row, and the nearest row that exists."""
    unknown = [name for name in names if doc_of(name) is None]
    if not unknown:
        return
    lines = []
    for name in unknown:
        near = get_close_matches(name, METRICS, n=1)
        lines.append(name + (f" (did you mean {near[0]}?)" if near else ""))
    raise ValueError(
        "metrics without a row in rl/run/metric_table.py: " + ", ".join(lines) + ". "
        "Add one with its unit and meaning."
    )


def markdown_table() -> str:
    """The README's table of metrics."""
    rows = [f"| `{name}` | {doc.unit} | {doc.meaning} |" for name, doc in METRICS.items()]
    return "\n".join(["| metric | unit | meaning |", "|---|---|---|", *rows]) + "\n"


@cache
def _regex(pattern: str) -> re.Pattern[str]:
    literal_parts = re.split(r"<[a-z_]+>", pattern)
    return re.compile(".+".join(re.escape(part) for part in literal_parts) + r"\Z")
