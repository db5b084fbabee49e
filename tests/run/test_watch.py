"""A run warns once when a suspicious condition begins, and again if it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
from tiny_messages import holds
from tiny_run import episode, run_config

from rl.algorithm.metrics import Metrics
from rl.api.types import Episode
from rl.ranks.dist import Dist
from rl.rollout.stream import Rollout
from rl.run.alarms import LEARNING, MISMATCHED, SEVERAL, TREND, Watch, alarms_of
from rl.run.episode_metrics import add_ranges, rollout_metrics
from rl.run.metric_table import doc_of

LEARNS = {"optimizer/steps": 1.0, "optimizer/grad_norm": 0.3, "groups/zero_spread": 0.25}
NO_STEP = {"optimizer/steps": 0.0}


def graded(*values: float) -> list[Episode]:
    parts = ("judge", "judge/edit_success")
    return [replace(episode(), reward=v, parts=dict.fromkeys(parts, v)) for v in values]


def make_watch(dtype: str = "float32", dropout: float = 0.0, **changes: Any) -> Watch:
    return Watch(alarms_of(run_config(**changes), dtype, dropout))


def warnings_of(watch: Watch, *iterations: dict[str, float]) -> list[list[str]]:
    """The warnings of each iteration with these metrics."""
    return [list(watch.sentences(LEARNS | each)) for each in iterations]


def warnings_of_rewards(
    watch: Watch, rows: Sequence[Sequence[float]], counted: Sequence[str] = ("judge",)
) -> list[str]:
    """The warnings of iterations with these rewards, one row per iteration. `counted`: the names of
    the rewards that count."""
    warnings = []
    for row in rows:
        rollout = Rollout([graded(*row)], [None])
        metrics = rollout_metrics(rollout, Dist()) if row else Metrics()
        add_ranges(metrics, rollout, counted, Dist())
        line = Dist().reduce(metrics)
        parts = {name: value for name, value in line.items() if name.startswith("reward/")}
        warnings += watch.sentences(parts | LEARNS)
    return warnings


def mismatches(*k3: float, ess: float = 1.0) -> list[dict[str, float]]:
    return [{"mismatch/k3": each, "mismatch/ess": ess} for each in k3]


@pytest.mark.parametrize("value", [0.0, 0.65, 1.0])
def test_a_judge_that_always_gives_the_same_score_is_warned_of_once(value: float) -> None:
    watch = make_watch()
    assert warnings_of_rewards(watch, [[value] * 4] * (SEVERAL - 1)) == [], "may be chance"
    [sentence] = warnings_of_rewards(watch, [[value] * 4] * 5)
    assert holds(
        sentence,
        f"rewards.judge: {value:.4g} ... every completion ... reward/range/judge ... judge.model",
    )
    assert warnings_of_rewards(watch, [[value, 0.3]]) == [], "it has changed"
    assert len(warnings_of_rewards(watch, [[value] * 4] * SEVERAL)) == 1, "it has begun again"


@pytest.mark.parametrize(
    ("counted", "rows", "keys"),
    [
        ("judge", [[0.2] * 4, [0.8] * 4] * 5, []),  # equal within each group, but the groups differ
        ("judge", [[], [0.5] * 8, [], [0.5] * 8, []], []),  # an ungraded iteration does not count
        ("judge", [[], [0.5] * 8, [], [0.5] * 8, [], [0.5] * 8], ["judge"]),  # the third graded one
        ("other", [[0.5] * 8] * 5, []),  # the reward has weight 0
        ("judge/edit_success", [[0.5] * 8] * 3, ["judge/edit_success"]),
    ],
)
def test_only_a_constant_reward_with_a_weight_is_warned_of(
    counted: str, rows: list[list[float]], keys: list[str]
) -> None:
    sentences = warnings_of_rewards(Watch(LEARNING), rows, [counted])
    assert [one.partition(":")[0] for one in sentences] == [f"rewards.{name}" for name in keys]


def test_the_logged_range_covers_all_ranks_and_the_bare_arm() -> None:
    gathered: list[Any] = []

    class SecondOfTwo(Dist):
        def gather(self, value: Any) -> list[Any]:
            gathered.append(value)
            return gathered

    for rewards, bare in (((0.5, 0.5), graded(0.25)[0]), ((0.5, 0.75), None)):
        rollout = Rollout([graded(*rewards)], [bare])
        add_ranges(metrics := Metrics(), rollout, ["judge"], SecondOfTwo(1, 2))
    merged = Dist().reduce(metrics)
    assert merged == {"reward/range/judge": 0.5}
    assert all(map(doc_of, merged))


@pytest.mark.parametrize(
    ("metric", "high", "low", "num", "parts"),
    [
        ("groups/zero_spread", 1.0, 0.0, SEVERAL, "100% of the groups ... 3 iterations"),
        ("groups/zero_spread", 0.95, 0.5, TREND, "95% of the groups ... 10 iterations"),
        ("groups/dead", 0.9, 0.0, TREND, "90% of the groups ... 10 iterations ... groups/dead"),
        ("mismatch/k3", 0.01, 1e-9, MISMATCHED, "mismatch/k3 0.01 nats ... limit 1e-05 ... engine"),
        ("mismatch/ess", 0.9, 1.0, MISMATCHED, "mismatch/ess 0.900 ... limit 0.999"),
    ],
)
def test_a_condition_warns_when_it_begins_and_again_when_it_returns(
    metric: str, high: float, low: float, num: int, parts: str
) -> None:
    watch = make_watch()
    [sound] = mismatches(1e-10)
    bad, good = sound | {metric: high}, sound | {metric: low}
    assert warnings_of(watch, *[bad] * (num - 1)) == [[]] * (num - 1), "may be transient"
    [[sentence]] = warnings_of(watch, bad)
    assert holds(sentence, parts)
    assert warnings_of(watch, *[bad] * 5, *[good] * TREND) == [[]] * (5 + TREND), "warned once"
    assert len(list(chain(*warnings_of(watch, *[bad] * num)))) == 1, "it has begun again"
    resumed = make_watch()
    resumed.replay(LEARNS | each for each in [bad] * num)
    assert len(list(chain(*warnings_of(resumed, bad, bad)))) == 1, "the log is a new one"


@pytest.mark.parametrize(
    ("watch", "iterations"),
    [
        (make_watch(), [{"groups/zero_spread": 0.85}] * 30),
        (make_watch(), [{"groups/zero_spread": each} for each in (1, 1, 0.5) * 10]),
        (make_watch(), [{"groups/dead": 0.25}] * 30),
        (make_watch(), mismatches(*(1.0, 1e-7) * 10)),
        # Sound bfloat16 runs of the quickstart reach 5.5e-5, TF32 in a GPU's attention about 1e-6.
        (make_watch("bfloat16"), mismatches(*[6e-5] * 5, ess=0.9999)),
        (make_watch(), mismatches(*[1e-6] * 5, ess=0.9999)),
        (make_watch("bfloat16"), mismatches(5e-4, 6e-4, 9e-4, 7e-4, 8e-4)),  # a large model
        (make_watch("bfloat16"), mismatches(1.5e-5, 5.5e-5, 5.5e-5, 5.5e-5)),
        (make_watch(), mismatches(1e-6, 5e-6, 5e-6, 5e-6)),
        (make_watch("bfloat16"), mismatches(2.4e-3, *[4.1e-3] * 5)),  # a model of 135M, measured
        # With these settings the engine's log-probs are expected to differ.
        (make_watch(max_staleness=1), mismatches(*[1.0] * 5, ess=0.5)),
        (make_watch(sampling={"top_p": 0.9}), mismatches(*[1.0] * 5, ess=0.5)),
        (make_watch(sampling={"top_k": 20}), mismatches(*[1.0] * 5, ess=0.5)),
        (make_watch(dropout=0.1), mismatches(*[1.0] * 5, ess=0.5)),
    ],
)
def test_healthy_iterations_do_not_warn(watch: Watch, iterations: list[dict[str, float]]) -> None:
    assert list(chain(*warnings_of(watch, *iterations))) == []


@pytest.mark.parametrize(
    ("dtype", "k3"),
    [
        ("bfloat16", [1.5e-5, 5.7e-4, 1.2e-3]),  # an adapter at twice its scale
        ("bfloat16", [0.02, 0.015]),  # wrong from the start, beyond any rounding
        ("float32", [1e-13, 2e-6, 2e-6]),
    ],
)
def test_a_growing_mismatch_warns_within_three_iterations(dtype: str, k3: list[float]) -> None:
    *before, [sentence] = warnings_of(make_watch(dtype), *mismatches(*k3))
    assert before == [[]] * (len(k3) - 1)
    assert holds(sentence, f"{dtype} ... mismatch/k3")


def test_a_resumed_run_keeps_the_limit_of_its_first_iteration() -> None:
    """The run's first k3 was 1e-5, so that 4e-3 is too much; the process's first is 4e-3."""
    resumed = make_watch("bfloat16")
    resumed.replay(LEARNS | line for line in mismatches(1e-5, 1e-5))
    assert warnings_of(resumed, *mismatches(4e-3, 4e-3))[-1]
    assert not any(warnings_of(make_watch("bfloat16"), *mismatches(*[4e-3] * 3)))


@pytest.mark.parametrize(("rise", "warns"), [(-0.31, True), (-0.29, False), (0.5, False)])
def test_a_step_against_the_advantages_warns_at_once(rise: float, warns: bool) -> None:
    [sentences] = warnings_of(make_watch(), {"policy/rise": rise, "policy/rise_error": 0.1})
    assert [holds(one, "downwards ... -0.31 +- 0.1 nats") for one in sentences] == [True] * warns


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_training_reward_below_its_first_iterations_warns(is_resumed: bool) -> None:
    """Two groups an iteration: the error of the difference of two means over three iterations is
    (6 x 0.3^2 / 2)^0.5 / 3 = 0.173, so a fall of more than 0.52 is not chance."""

    def lines(*means: float) -> list[dict[str, float]]:
        return [{"reward/mean": mean, "reward/std": 0.3} for mean in means]

    watch, first = make_watch(), lines(0.7, 0.8, 0.9)
    if is_resumed:
        watch.replay(LEARNS | line for line in first)
    else:
        assert not any(warnings_of(watch, *first))
    assert not any(warnings_of(watch, *lines(0.3, 0.29, 0.29))), "0.507 lower"
    [[sentence]] = warnings_of(watch, *lines(0.2))
    assert holds(sentence, "fell from 0.800 ... to 0.260 ... more than 0.520, 3 standard errors")


def test_prompts_that_repeat_in_every_iteration_warn() -> None:
    twice, once = {"data/repeated_prompts": 2.0}, {"data/repeated_prompts": 0.0}
    watch = make_watch()
    assert not any(warnings_of(watch, twice, twice, once, twice, twice))
    [[sentence]] = warnings_of(watch, twice)
    assert holds(sentence, "2 prompts of an iteration repeat ... a rank")


FLAT = {"groups/zero_spread": 1.0}


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        (FLAT | {"status/policy_failed": 1.0}, "no completion"),
        (FLAT | {"status/ungraded": 1.0}, "no picture"),
        (FLAT | {"groups/distinct_completions": 0.125}, "sampling.temperature"),
        (FLAT | {"groups/distinct_completions": 1.0, "reward/mean": 1.0}, "the full reward"),
        (FLAT | {"groups/distinct_completions": 1.0, "reward/mean": 0.4}, "distinguish"),
        (NO_STEP | FLAT, "all rewards of each group were equal, and nothing else"),
        (NO_STEP | {"optimizer/skipped_steps": 1.0}, "not finite"),
        (NO_STEP | {"status/ungraded": 1.0}, "nothing was graded"),
        ({"optimizer/steps": 1.0, "optimizer/grad_norm": 0.0}, "gradient was exactly 0"),
        (NO_STEP, "no token was in the loss"),
    ],
)
def test_iterations_without_spread_or_step_warn_once_with_the_reason(
    metrics: dict[str, float], reason: str
) -> None:
    watch = make_watch()
    *before, last = warnings_of(watch, *[metrics] * SEVERAL)
    assert before == [[]] * (SEVERAL - 1)
    assert reason in str(last)
    assert warnings_of(watch, metrics) == [[]]


def test_the_held_out_run_before_training_does_not_count_as_an_iteration() -> None:
    watch = make_watch()
    assert list(chain(*(watch.sentences(FLAT) for _ in range(TREND)))) == []


def test_a_reference_that_is_the_policy_is_noticed() -> None:
    """Its KL is only rounding for ever; in a sound run it is 0 in the first iteration."""
    same, sound = {"kl/reference_k3": 1e-16}, {"kl/reference_k3": 2e-5}
    with_kl = {"algorithm": {"kl_coeff": 0.1}}
    *before, [sentence] = warnings_of(make_watch(**with_kl), *[same] * SEVERAL)
    assert before == [[]] * (SEVERAL - 1) and holds(sentence, "KL ... was 0 ... reference")
    assert not any(warnings_of(make_watch(**with_kl), same, *[sound] * 5))
    assert not any(warnings_of(make_watch(), *[{}] * 5)), "the config asks for no KL"
    still = warnings_of(make_watch(**with_kl), *[same | {"optimizer/grad_norm": 0.0}] * 5)
    assert "KL" not in str(still), "nothing moves"
