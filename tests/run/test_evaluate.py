"""The evaluation has its own sampling parameters, and works on ranks with unequal shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from pathlib import Path

import pytest
import torch
from tiny_loop import rows_of
from tiny_messages import holds
from tiny_ranks import run_ranks
from tiny_rollout import Graded, Painter
from tiny_run import run_config, writes

from rl.api.policy import PolicyConfig
from rl.api.types import (
    Action,
    Completion,
    HiddenStates,
    Prompt,
    RewardInput,
    RewardOutput,
    Row,
    Sample,
)
from rl.judge.client import JudgeRefused
from rl.judge.http import BackgroundLoop
from rl.progress import PhaseTimer
from rl.ranks.dist import Dist
from rl.record.run_record import BackgroundWriter
from rl.rollout.stream import RolloutContext
from rl.run.alarms import HELD_OUT, Watch
from rl.run.checks import TooManyFailuresError
from rl.run.evaluation import evaluate
from rl.run.metric_table import doc_of

Grades = Callable[[RewardInput], float | RewardOutput]
ENGINE = writes(Completion((2,), (-0.5,), "stop"))


class Gathering:
    """A policy whose every forward is a collective call, as with ZeRO-3. If hidden states condition
    the renderer, the policy's module makes that call."""

    starts_as_stock = False

    def __init__(self, dist: Dist, reads_states: bool = False) -> None:
        self.reads_states = reads_states
        self.config = PolicyConfig() if reads_states else PolicyConfig(lora=None)
        self.num_forwards = 0
        self.module = torch.nn.Linear(1, 1)
        self.module.weight.ds_id = 0
        self.module.forward = self._gather
        self._dist = dist

    def _gather(self, rows: Sequence[Row]) -> None:
        assert self._dist.gather("forward") == ["forward"] * self._dist.world_size

    def build_prompt(self, sample: Sample) -> Prompt:
        return Prompt(sample, (1,))

    def encode_completion(self, text: str) -> Completion:
        return Completion((2,), (0.0,), "stop")

    def pass_through_completion(self, sample: Sample) -> Completion:
        return self.encode_completion(sample.instruction)

    def stock_arms(self, prompt: Prompt) -> dict[str, tuple[Prompt, Completion]]:
        return {"stock": (prompt, self.pass_through_completion(prompt.sample))}

    def collate(self, rows: Sequence[Row]) -> Sequence[Row]:
        return rows

    def collate_states(self, rows: Sequence[Row]) -> None:
        return None

    def reference(self) -> AbstractContextManager[None]:
        return nullcontext()

    base_model = reference

    def decode_actions(self, rows: Sequence[Row], batch: object, outputs: None) -> list[Action]:
        self.num_forwards += 1
        if self.reads_states:
            return [Action("words", HiddenStates(torch.ones(2 + len(ids), 3))) for _, ids in rows]
        self._gather(rows)
        return [Action("words", "words") for _ in rows]


def fixed(evidence: RewardInput) -> float:
    return 0.25 if evidence.sample.id == "0" else 0.75


def held_out_run(num_samples: int, folder: str) -> dict[bool, dict[str, float]]:
    """Maps whether hidden states condition the renderer to the metrics."""
    dist = Dist.from_env("cpu")
    metrics_of = {}
    for reads_states in (False, True):
        policy = Gathering(dist, reads_states)
        own = Path(folder, str(reads_states))
        metrics = evaluate_samples(num_samples, own, policy=policy, dist=dist)
        metrics_of[reads_states] = {"forwards": policy.num_forwards, **metrics}
    dist.close()
    return metrics_of


def evaluate_samples(
    num_samples: int,
    folder: Path,
    iteration: int = 0,
    second: Grades | None = None,
    grade: Grades = fixed,
    policy: Gathering | None = None,
    dist: Dist = Dist(),  # noqa: B008
) -> dict[str, float]:
    # Only one sample has a reference, so only one rank scores a reference.
    samples = [
        Sample(str(i), f"do it {i}", reference="right" if i == 0 else None)
        for i in range(num_samples)
    ]
    weights = {"weights": {"judge": 1.0}}
    config = run_config(optimizer={"max_tokens_per_micro_batch": 3}, final_reward=weights)
    with BackgroundLoop() as loop, BackgroundWriter(folder) as writer:
        rewards = {"judge": Graded(grade)}, {"second": Graded(second)} if second else {}
        policy = policy or Gathering(dist)
        context = RolloutContext(config, policy, Painter(), rewards[0], True, loop, rewards[1])
        arguments = (context, ENGINE, samples, iteration, folder, dist, PhaseTimer(), writer)
        return dist.reduce(evaluate(*arguments))


def test_held_out_completions_have_their_own_sampling_parameters(tmp_path: Path) -> None:
    evaluate_samples(1, tmp_path)
    config, (_, params, _) = run_config(), ENGINE.generate.call_args.args
    assert params.temperature == config.evaluation.temperature != config.sampling.temperature
    assert (params.top_p, params.num_completions) == (1.0, 1)


@pytest.mark.slow
def test_ranks_with_fewer_samples_keep_step_and_count_nothing_twice(tmp_path: Path) -> None:
    ranks = run_ranks(held_out_run, 2, 3, str(tmp_path))
    # Packs hold one group. Rank 0 has two samples, one reference and two stock arms: five forwards;
    # rank 1 keeps step. States of the bare words take one more each.
    for reads_states, num_forwards in ((False, 5), (True, 5 + 2)):
        one, other = (rank[reads_states] for rank in ranks)
        assert one == other and one["forwards"] == num_forwards
        assert one["eval/reward_gain"] == one["eval/gain_over_stock"] == 0.0
        assert one["eval/reward"] == one["eval/stock_reward"] == (0.25 + 0.75 + 0.75) / 3
        assert one["eval_reference/reward"] == 0.25
        for file in ("evaluation/it_000000/records.jsonl", "stock/rewards.jsonl"):
            rows = rows_of(tmp_path / str(reads_states) / file)
            assert sorted(row["id"] for row in rows) == ["0", "1", "2"]
    assert one["drift/state_l2"] == one["drift/bare_fall"] == one["drift/reference_fall"] == 0.0
    assert "drift/alarm" not in ranks[0][False]


def by_number(low: float, scale: float) -> Grades:
    return lambda evidence: low + scale * int(evidence.sample.id) / 16


def test_a_resumed_run_finds_a_second_reward_as_far_behind_as_its_records_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both rewards rank alike at first; then the judge gives 0.4 more, and the second one does not.
    Nothing but the records passes from one evaluation to the next, as after a resume."""

    def measured(iteration: int, grade: Grades) -> dict[str, float]:
        metrics = evaluate_samples(16, tmp_path, iteration, by_number(0.2, 0.3), grade)
        return {
            name: value
            for name, value in metrics.items()
            if name.startswith("eval/") and "second" in name
        }

    first = measured(0, by_number(0.1, 0.5))
    mean = sum(range(16)) / 16 / 16
    assert first == {
        "eval/part/second": pytest.approx(0.2 + 0.3 * mean),
        "eval/ungraded/second": 0.0,
        "eval/correlation/second": pytest.approx(1.0),
        "eval/gap/second": 0.0,
        "eval/gap_error/second": 0.0,
        "eval/gap_alarm/second": 0.0,
    }
    assert all(map(doc_of, first)) and not capsys.readouterr().err
    later = measured(5, by_number(0.5, 0.5))
    assert later["eval/gap/second"] == pytest.approx(0.6 * 0.4), "slope 0.3 / 0.5 x gain 0.4"
    assert later["eval/gap_alarm/second"] == 1.0
    [warning] = Watch(HELD_OUT).sentences(later | {"optimizer/steps": 1.0})
    assert holds(warning, "second, which trains nothing ... eval/gap/second")


@pytest.mark.parametrize(
    ("failure", "bounds"),
    [
        # Of four samples one is not graded; the others have (0.25 + 0.75 + 0.75) / 3.
        ("unreadable: prose", {"reward_low": 1.75 / 4, "reward_high": 2.75 / 4}),
        ("timeout: no reply", {}),
    ],
)
def test_unreadable_replies_give_the_held_out_mean_bounds(
    failure: str, bounds: dict[str, float], tmp_path: Path
) -> None:
    def grade(evidence: RewardInput) -> float | RewardOutput:
        is_lost = evidence.sample.id == "3" and evidence.text != "as it is"
        return RewardOutput(None, failure=failure) if is_lost else fixed(evidence)

    found = evaluate_samples(4, tmp_path, grade=grade)
    assert found["eval/reward"] == pytest.approx(1.75 / 3) and found["eval/ungraded"] == 0.25
    assert found["eval/unreadable"] == (0.25 if bounds else 0.0)
    names = ("reward_low", "reward_high")
    given = {name: found[f"eval/{name}"] for name in names if f"eval/{name}" in found}
    assert given == pytest.approx(bounds)


@pytest.mark.parametrize("fails", ["refuses", "is unreadable"])
def test_a_failing_second_judge_is_reported_and_stops_nothing(
    fails: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def second(evidence: RewardInput) -> float | RewardOutput:
        if fails == "refuses" and evidence.sample.id == "1":
            raise JudgeRefused("wrong key")
        return RewardOutput(None, failure="no score") if evidence.sample.id == "1" else 0.5

    found = evaluate_samples(2, tmp_path, second=second)
    assert found["eval/reward"] == 0.5 and found["eval/part/second"] == 0.5
    assert found["eval/ungraded"] == 0.0 and found["eval/ungraded/second"] == 0.5
    cause = "wrong key" if fails == "refuses" else "no score"
    assert holds(capsys.readouterr().err, f"second did not grade 1 of 2 ... goes on ... {cause}")


@pytest.mark.parametrize("num_answered", [0, 4, 5])  # then the reference's, then the stock arm's
def test_an_evaluation_whose_judge_went_down_records_nothing_and_is_repeated(
    num_answered: int, tmp_path: Path
) -> None:
    asked, lost = count(), RewardOutput(None, failure="outage: no answer")
    with pytest.raises(TooManyFailuresError, match="evaluation could not be graded"):
        evaluate_samples(
            4,
            tmp_path / "twice",
            grade=lambda evidence: fixed(evidence) if next(asked) < num_answered else lost,
        )
    assert not list(tmp_path.rglob("*.jsonl"))
    assert evaluate_samples(4, tmp_path / "once") == evaluate_samples(4, tmp_path / "twice")
    for file in ("evaluation/it_000000/records.jsonl", "stock/rewards.jsonl"):
        assert (tmp_path / "once" / file).read_bytes() == (tmp_path / "twice" / file).read_bytes()


def test_one_picture_on_which_the_judge_always_fails_ends_no_evaluation(tmp_path: Path) -> None:
    lost = RewardOutput(None, failure="http_500: bad")
    for iteration in range(2):
        found = evaluate_samples(
            4,
            tmp_path,
            iteration,
            grade=lambda evidence: lost if evidence.sample.id == "3" else fixed(evidence),
        )
        assert found["eval/ungraded"] == found["eval/stock_ungraded"] == 0.25
