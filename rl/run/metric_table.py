"""Every metric that a run may log: its unit and meaning. `docs/metrics.md` is made from this.

`python -m rl.run.metric_table > docs/metrics.md`; with a config behind it the page has what its
plugs report. `<...>` in a name stands for words that the config or the data choose.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache

from rl import build
from rl.api import find
from rl.api.metric import Metric
from rl.api.plug import PlugBase
from rl.config.schema import ConfigError, listed, load_config
from rl.record import terminal
from rl.run.plug_metrics import prefix_of, rows_of

METRICS: dict[str, Metric] = {
    # Rewards: over the episodes of all ranks
    "reward/mean": Metric("0..1", "mean composed reward of graded and policy-failed episodes"),
    "reward/std": Metric("0..1", "standard deviation of the same rewards over the whole batch"),
    "reward/max": Metric("0..1", "largest of them"),
    "reward/group_std": Metric("0..1", "mean over groups of the standard deviation in a group"),
    "reward/noise_variance_share": Metric(
        "0..1",
        "with several pictures per completion: share of the variance of one picture's reward that "
        "the rendering noise makes, not the words; unbiased variances within and between the "
        "completions of a group. Noise that moves a whole group alike counts, though the group's "
        "mean removes it from the advantages",
    ),
    "reward/part/<name>": Metric(
        "as the reward states", "mean of a reward's value or `<reward>/<part>` over graded episodes"
    ),
    "reward/range/<name>": Metric(
        "as the reward states",
        "largest - smallest value of a reward, or part, that counts, the bare arm's among them; 0 "
        "for several iterations is said aloud: it teaches nothing",
    ),
    "bare_reward": Metric(
        "0..1",
        "mean reward of the bare arm: the user's own words handed on as they are, same noise",
    ),
    "reward_gain": Metric(
        "-1..1",
        "mean over episodes of reward - bare reward of its prompt, both under today's weights: "
        "where these spoil what the renderer reads, the bare reward falls and the gain rises by as "
        "much (`eval/gain_over_stock` does not)",
    ),
    "status/scored": Metric("0..1", "share of episodes rendered and graded"),
    "status/policy_failed": Metric("0..1", "share whose completion could not be used"),
    "status/ungraded": Metric("0..1", "share lost to the renderer or the judge"),
    "groups/zero_spread": Metric("0..1", "share of groups whose rewards are all equal (to 1e-6)"),
    "groups/dead": Metric("0..1", "share of groups whose rewards are all equal and below 0.5"),
    "groups/distinct_completions": Metric(
        "0..1", "mean over groups of distinct completions / completions"
    ),
    # Pictures
    "pictures/not_drawn": Metric(
        "0..1", "share that the renderer could not draw, whose limit is max_render_failure_rate"
    ),
    "pictures/failing_sizes": Metric(
        "sizes",
        "sizes of picture of which every one fails, in the renderer or at the judge, while others "
        "get through, since the process began",
    ),
    # Judge
    "judge/verdict_mean_s": Metric("s", "mean time from picture to verdict, queueing included"),
    "judge/latency_p50_s": Metric("s", "median time of one request, of the slowest rank"),
    "judge/latency_p95_s": Metric("s", "95th percentile of the same"),
    "judge/latency_max_s": Metric("s", "longest request"),
    "judge/requests": Metric("requests", "requests sent in this iteration"),
    "judge/reused_replies": Metric(
        "replies", "taken from the journal: asked before in this iteration, or before a crash"
    ),
    "judge/retries": Metric(
        "requests", "requests repeated after a failure, an unreadable reply or a refused parameter"
    ),
    "judge/breaker_openings": Metric("1", "times the circuit breaker opened"),
    "judge/throttled_requests": Metric(
        "requests", "answered with HTTP 429 or a Retry-After; each question waits and asks again"
    ),
    "judge/other_model_replies": Metric(
        "replies", "that name another model than judge.model: an alias's full name, or another's"
    ),
    # Tokens
    "tokens/completion_mean": Metric("tokens", "mean completion length, stop token included"),
    "tokens/completion_max": Metric("tokens", "longest completion"),
    "tokens/completion_total": Metric("tokens", "sum of completion lengths over all ranks"),
    "tokens/prompt_mean": Metric("tokens", "mean prompt length, image tokens included"),
    "tokens/truncated": Metric("0..1", "share of completions that hit max_completion_tokens"),
    "tokens/trained": Metric("tokens", "tokens that carry loss, those of KL alone among them"),
    # Thoughts: where the policy thinks before it writes
    "thought/tokens_mean": Metric("tokens", "mean length of a thought, marker included"),
    "thought/tokens_max": Metric("tokens", "longest thought"),
    "thought/unfinished": Metric(
        "0..1", "share of completions whose thought was cut off or grew too long (policy_failed)"
    ),
    "thought/no_marker": Metric(
        "0..1", "share of completions that end without the marker (policy_failed)"
    ),
    # Data
    "data/held_out_prompts": Metric(
        "prompts",
        "training prompts that show a picture of a held-out one, or a copy of it in another size "
        "or file format; without pictures, its words in any letter case",
    ),
    "data/skipped_rows": Metric("rows", "bad rows left out at the start"),
    "data/replaced_rows": Metric(
        "rows", "rows that could not be read when taken and were replaced, since the process began"
    ),
    # Held-out run
    "eval/reward": Metric("0..1", "mean reward of greedy completions on the validation samples"),
    "eval/reward/<category>": Metric("0..1", "the same over one category"),
    "eval/part/<name>": Metric("as the reward states", "mean of a reward's value or part there"),
    "eval/bare_reward": Metric("0..1", "mean reward of the bare arm there"),
    "eval/reward_gain": Metric("-1..1", "mean of reward - bare reward there"),
    "eval/stock_reward": Metric(
        "0..1",
        "mean reward of the stock arm: the untrained system on the user's words, same noise, drawn "
        "once; for policies that write pictures their own before training",
    ),
    "eval/stock_<variant>_reward": Metric(
        "0..1",
        "of a variant of it; `upstream`: the text encoder without token types, as diffusers' own "
        "Qwen-Image-Edit pipelines call it",
    ),
    "eval/stock_ungraded": Metric(
        "0..1", "share of its samples not graded yet: asked again at the next held-out run"
    ),
    "eval/gain_over_stock": Metric(
        "-1..1", "mean over samples of reward - stock reward: a baseline that no training moves"
    ),
    "eval/gain_over_stock_error": Metric(
        "0..1",
        "its standard error over the samples; those that share a source picture count as one",
    ),
    "eval/thought/<name>": Metric("as there", "thought/<name> of the held-out completions"),
    "eval/cut_thought_reward": Metric(
        "0..1", "mean reward there of words written with the thought cut before it began"
    ),
    "eval/gain_of_thought": Metric(
        "-1..1",
        "mean over samples of reward - that reward, both under today's weights (evaluation."
        "thought_gain): words that were trained behind a thought may miss it more than others",
    ),
    "eval/gain_of_thought_error": Metric("0..1", "its standard error, reckoned alike"),
    "eval/ungraded": Metric("0..1", "share of validation episodes lost to renderer or judge"),
    "eval/reference_match": Metric("0..1", "share of completions equal to the reference"),
    "eval_reference/reward": Metric(
        "0..1",
        "mean reward of the RIGHT completions under the current weights: when it falls, the "
        "renderer's conditioning has drifted",
    ),
    "eval_reference/reward/<category>": Metric("0..1", "the same over one category"),
    "eval_reference/part/<name>": Metric("as the reward states", "mean of a part there"),
    "eval_reference/ungraded": Metric("0..1", "share of those lost to renderer or judge"),
    # Drift: only where states of the trained weights condition the renderer
    "drift/bare_fall": Metric(
        "-1..1",
        "mean over held-out samples of the bare words' reward before training minus today's: same "
        "words, same noise",
    ),
    "drift/bare_fall_error": Metric(
        "0..1",
        "its standard error over the samples; those that share a source picture count as one",
    ),
    "drift/reference_fall": Metric("-1..1", "the same of the right words, where they are known"),
    "drift/reference_fall_error": Metric("0..1", "its standard error"),
    "drift/alarm": Metric(
        "0 or 1",
        "1: one of these falls is more than 0.02 and 3 standard errors (more where samples are of "
        "few source pictures: Student's t); said aloud",
    ),
    "drift/state_l2": Metric(
        "1",
        "distance |h - h0| / |h0| of the bare words' states from the untrained weights', mean over "
        "the tokens of the first 8 held-out samples: how far, not whether it hurts (two seeds of "
        "the quickstart reach 0.5, and one of them has lost a shape)",
    ),
    "drift/state_cosine": Metric("-1..1", "cosine of the same"),
    # Learner: per trained token unless said otherwise
    "loss/total": Metric("1", "what was minimised: loss/policy + loss/kl, per optimiser step"),
    "loss/policy": Metric("1", "policy-gradient term"),
    "loss/kl": Metric("1", "kl_coeff x KL term, under kl_placement 'loss'"),
    "kl/reference_k1": Metric("nats", "mean log pi - log pi_ref of the sampled tokens"),
    "kl/reference_k3": Metric("nats", "the same by the low-variance, non-negative k3 estimator"),
    "policy/entropy": Metric("nats", "mean entropy of the next-token distribution"),
    "policy/clip_fraction": Metric("0..1", "share of tokens whose ratio is clipped"),
    "policy/ratio_mean": Metric(
        "1",
        "mean pi / pi_old; 1 by construction with one update per iteration, on-policy: mismatch/* "
        "compares the engine",
    ),
    "policy/ratio_max": Metric("1", "largest of them"),
    "mismatch/k1": Metric("nats", "mean log pi_sampler - log pi_trainer of the sampled tokens"),
    "mismatch/k3": Metric(
        "nats",
        "KL(sampler || trainer) by the k3 estimator; the run warns where it stays for 3 iterations "
        "above what the engine's dtype explains (1e-5 in float32, 1e-4 in float16, 1e-3 in "
        "bfloat16), or above a tenth of that and 10 times the run's first",
    ),
    "mismatch/max_abs_dlogp": Metric("nats", "largest |log pi_sampler - log pi_trainer|"),
    "mismatch/ess": Metric(
        "0..1",
        "effective sample size of the importance weights, share; below 0.999, 0.99, 0.95 in these "
        "dtypes for 3 iterations the run warns",
    ),
    "mismatch/weight_mean": Metric("1", "mean truncated importance weight as used"),
    "mismatch/weight_capped": Metric("0..1", "share of tokens whose weight hit importance_cap"),
    "optimizer/learning_rate": Metric("1", "AdamW learning rate of this iteration"),
    "optimizer/grad_norm": Metric("1", "global gradient norm before clipping, mean over steps"),
    "optimizer/steps": Metric("steps", "optimiser steps taken in this iteration"),
    "optimizer/skipped_steps": Metric("steps", "steps skipped for a non-finite gradient"),
    "seconds/<learn_phase>": Metric("s", "learn phase split into forward, backward and step"),
    # Sync
    "sync/mean_abs_dlogp": Metric(
        "nats",
        "mean |log pi_sampler - log pi_trainer| of the 16 least certain tokens written to the "
        "probe prompt after the weight sync",
    ),
    # Time: wall time on rank 0
    "time/<phase>_s": Metric(
        "s", "wall time of one phase of the iteration, without phases inside it, rank 0"
    ),
    "time/iteration_s": Metric("s", "wall time of the whole iteration, rank 0"),
    # With several ranks: without the time that a rank waits for others in a collective
    "time/<phase>_max_over_median": Metric(
        "1",
        "seconds of the slowest rank in one phase / the ranks' median; 1 where all are equally "
        "fast. Waits in collectives are left out (but those for one on the GPU, which are found in "
        "whatever comes next)",
    ),
    "time/iteration_max_over_median": Metric("1", "the same of all phases together"),
    "time/slowest_rank": Metric("rank", "the rank whose phases together took longest"),
    "work/mfu": Metric(
        "0..1",
        "model FLOPs utilisation: operations of the policy's forward and backward on rank 0's "
        "groups (closed formulas, nothing recomputed; sampling, rendering and vision tower left "
        "out) / (time/iteration_s x this device's measured rate of matrix products)",
    ),
    "memory/peak_gb": Metric(
        "GB",
        "most memory of any rank's process: on a GPU what torch held in this iteration, on a CPU "
        "what was resident since the process began",
    ),
}


def doc_of(name: str, of_plugs: Mapping[str, Metric]) -> Metric | None:
    """The row that a logged name belongs to; an exact row wins over a pattern."""
    rows = {**METRICS, **of_plugs}
    if name in rows:
        return rows[name]
    return next((METRICS[key] for key in METRICS if "<" in key and _regex(key).match(name)), None)


def check_known(names: Iterable[str], of_plugs: Mapping[str, Metric]) -> None:
    """Raise ValueError naming every metric that has no row, and the nearest row that exists.
    `of_plugs`: the rows that the run's plugs declare."""
    unknown = [name for name in names if doc_of(name, of_plugs) is None]
    if not unknown:
        return
    lines = []
    for name in unknown:
        near = get_close_matches(name, [*METRICS, *of_plugs], n=1)
        lines.append(name + (f" (did you mean {near[0]}?)" if near else ""))
    raise ValueError(
        "metrics without a row in rl/run/metric_table.py: " + ", ".join(lines) + ". "
        "Add one with its unit and meaning."
    )


def markdown_table(rows: Mapping[str, Metric]) -> str:
    """As the page holds it; a bar within a cell is no border."""
    lines = ["| metric | unit | meaning |", "|---|---|---|"]
    for name, metric in rows.items():
        cells = (f"`{name}`", metric.unit, metric.meaning)
        lines.append("| " + " | ".join(_cell(text) for text in cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", r"\|").split())


_PLACES = {
    "policies": "policy",
    "engines": "engine",
    "renderers": "renderer",
    "rewards": "rewards.<name>",
    "data": "data.train.<i>",
}
"""Room -> where a plug of it stands in a config."""


def shipped_rows() -> dict[str, Metric]:
    """What the plugs that lie in the rooms declare."""
    rows = {}
    for room, place in _PLACES.items():
        for name in build.plugs_of(room):
            module = importlib.import_module(build.module_of(room, name))
            for cls in find.plugs_in(module, PlugBase):
                for own, metric in cls.metrics.items():
                    rows[prefix_of(place) + own] = Metric(metric.unit, f"{name}: {metric.meaning}")
    return rows


def page(of_plugs: Mapping[str, Metric]) -> str:
    """`docs/metrics.md`, or the same for the plugs of one run."""
    return "\n".join([_HEAD, markdown_table(METRICS), _OF_PLUGS, markdown_table(of_plugs)])


_HEAD = """\
# Metrics

One line an iteration, over all ranks: in `metrics.jsonl` of the run folder, and under the same
names in wandb. `<...>` stands for words that the config or the data choose. Iteration 0 is what was
measured before training. This page is made from the code:
`python -m rl.run.metric_table > docs/metrics.md`.
"""
_OF_PLUGS = """\
## What plugs report

A plug of yours reports metrics of its own as the shipped ones do: it declares `metrics` and gives
`take_metrics` (`rl/api/plug.py`). They stand under `reward/metric/<reward>/<name>`,
`data/metric/train.<i>/<name>`, `policy/metric/<name>`, `engine/<name>` and `renderer/<name>`: the
mean over the ranks that report one. `python -m rl.run.metric_table my.jsonnet` prints this page
with those of your plugs.
"""


def main(argv: Sequence[str]) -> None:
    """Print the page: of what is shipped, or of the run that `config.jsonnet [key=value ...]`
    describes."""
    terminal.guard()
    if not argv:
        print(page(shipped_rows()), end="")
        return
    try:
        rows = rows_of(build.resolve(load_config(argv[0], list(argv[1:]))))
    except ConfigError as error:
        sys.exit(listed(error.problems))
    print(page(rows), end="")


@cache
def _regex(pattern: str) -> re.Pattern[str]:
    literal_parts = re.split(r"<[a-z_]+>", pattern)
    return re.compile(".+".join(re.escape(part) for part in literal_parts) + r"\Z")


if __name__ == "__main__":
    main(sys.argv[1:])
