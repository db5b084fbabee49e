"""What becomes of a completion: scored, the policy's fault, or nobody's; and what trains on it."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import pvariance

import pytest
from PIL import Image
from tiny_faulty_judge import Fault, FaultyJudge, pair_question, quick_config, read_pair

from rl.api.types import (
    Action,
    Completion,
    Episode,
    Evidence,
    Grade,
    Prompt,
    RenderFailure,
    RenderJob,
    Row,
    Sample,
    Status,
    TrainSequence,
)
from rl.config.schema import RunConfig
from rl.judge.background import BackgroundLoop
from rl.judge.client import JudgeClient, JudgeError, JudgeRefused
from rl.learner.micro_batches import pack_groups
from rl.ranks import signals
from rl.ranks.dist import Dist
from rl.record.console import PhaseTimer
from rl.rollout.episodes import group_sequences
from rl.rollout.stream import Crew, Interrupted, Rollout, Sampled, begin
from rl.run.episode_metrics import (
    TooManyFailuresError,
    check_failure_rate,
    early_advantages,
    group_rewards,
    size_of,
)
from rl.run.run import Flight, Run


def run_config(**changes: object) -> RunConfig:
    fields = {
        "run_name": "r",
        "base_exp_dir": "unused",
        "num_iterations": 1,
        "prompts_per_iteration": 1,
        "generations_per_prompt": 2,
        "policy": {"type": "p"},
        "engine": {"type": "e"},
        "renderer": {"type": "r"},
        "rewards": {},
        "data": {"train": []},
    }
    return RunConfig.model_validate(fields | changes)


class Speller:
    """A policy that reads token ids as letters; a lone 0 is nothing readable."""

    reads_states = False

    def act(self, rows: Sequence[Row], batch: None, outputs: None) -> list[Action]:
        texts = ["".join(chr(96 + i) for i in ids if i) for _, ids in rows]
        return [Action(t, t or None, None if t else "empty: no words") for t in texts]

    def bare_completion(self, sample: Sample) -> Completion:
        return word("b")

    def loss_mask(self, completion: Completion, iteration: int) -> list[bool]:
        """In odd iterations the first letter is not trained."""
        return [place > 0 or iteration % 2 == 0 for place in range(len(completion.token_ids))]


class Painter:
    """Paints the noise seed; words beginning with 'x' break it, 'y' is the policy's fault."""

    def __init__(self) -> None:
        self.jobs: list[RenderJob] = []

    def illustrate(self, samples: Sequence[Sample]) -> list[Sample]:
        return list(samples)

    def take_stats(self) -> dict[str, float]:
        return {"clip_cut_share": 0.5}

    def render(
        self, jobs: Iterable[RenderJob]
    ) -> Iterator[tuple[int, Image.Image | RenderFailure]]:
        taken = list(jobs)
        self.jobs += taken
        for index in reversed(range(len(taken))):
            job = taken[index]
            if job.payload[0] in "xy":
                blame = "policy" if job.payload[0] == "y" else "renderer"
                yield index, RenderFailure("ragged", blame)
            else:
                yield index, Image.new("L", (1, 1), job.noise_seed % 256)


class Level:
    """Grades the grey level; words beginning with 'j' get no answer."""

    def __init__(self) -> None:
        self.num_asked = 0

    async def grade(self, evidence: Evidence) -> Grade:
        self.num_asked += 1
        if evidence.text.startswith("j"):
            return Grade(None, failure="timeout: no answer", replies=("half a",))
        assert evidence.image is not None
        level = evidence.image.getpixel((0, 0)) / 255
        return Grade(level, parts={"raw": level * 10}, replies=(f"{level}",), seconds=0.5)


@pytest.fixture
def crew() -> Iterator[Crew]:
    with BackgroundLoop() as loop:
        yield Crew(run_config(), Speller(), Painter(), {"level": Level()}, True, loop)


def word(text: str, finish: str = "stop", forced: tuple[bool, ...] | None = None) -> Completion:
    ids = tuple(ord(letter) - 96 for letter in text) or (0,)
    return Completion(ids, (-0.5,) * len(ids), finish, forced)


class Packs:
    """One pack a group; nothing is ever forwarded, since the policy reads no states."""

    collective = False

    def __init__(self, sampled: Sampled) -> None:
        self.packs = pack_groups(sampled.prompts, sampled.token_ids, 1000)


class Waiting(Packs):
    """What the run asks of an update while verdicts come in."""

    def __init__(self, sampled: Sampled) -> None:
        super().__init__(sampled)
        self.seen: list[object] = []

    def work_ahead(self, still_waiting: Callable[[], bool]) -> None:
        self.seen.append("ahead")

    def hand_in(self, p: int, sequences_G: Sequence[TrainSequence | None]) -> None:
        self.seen.append((p, [s and s.advantage for s in sequences_G]))


def sampled(*completions: Completion, seed: int = 51, bare: Completion | None = None) -> Sampled:
    prompt = Prompt(Sample("s", "do it"), (1, 2))
    return Sampled([prompt], [completions], [seed], ["0/0"], [bare])


def collect(crew: Crew, batch: Sampled, should_stop: Callable[[], bool] = lambda: False) -> Rollout:
    timer = PhaseTimer()
    judging = begin(crew, batch, Packs(batch), timer, should_stop)
    groups = list(judging.groups(timer, should_stop))
    rollout = judging.rollout()
    assert groups == list(enumerate(rollout.episodes))
    return rollout


def roll(crew: Crew, *completions: Completion, seed: int = 51) -> list[Episode]:
    return collect(crew, sampled(*completions, seed=seed)).episodes[0]


def test_three_ways_to_end(crew: Crew) -> None:
    scored, empty, broken, ragged, unjudged = roll(
        crew, word("ab"), word(""), word("xa"), word("ya"), word("ja")
    )
    assert (scored.status, scored.reward) == (Status.SCORED, 51 / 255)
    assert scored.parts == {"level": 51 / 255, "level/raw": pytest.approx(2.0)}
    assert scored.replies == {"level": ("0.2",)}
    assert (empty.status, empty.reward, empty.failure) == ("policy_failed", 0.0, "empty: no words")
    assert (ragged.status, ragged.reward, ragged.failure) == ("policy_failed", 0.0, "ragged")
    assert (broken.status, broken.reward) == (Status.UNGRADED, None)
    assert broken.failure == "renderer: ragged"
    assert (unjudged.status, unjudged.reward) == (Status.UNGRADED, None)
    assert unjudged.failure == "level: timeout: no answer"
    assert unjudged.replies == {"level": ("half a",)}, "a reply is kept though it graded nothing"


def test_a_group_shares_its_noise_and_equal_completions_are_one_picture(crew: Crew) -> None:
    episodes = roll(crew, word("a"), word("b"), word("a"))
    assert {job.noise_seed for job in crew.renderer.jobs} == {51}
    assert len(crew.renderer.jobs) == 2 and crew.rewards["level"].num_asked == 2
    assert episodes[0].image is episodes[2].image
    # What the renderer took is its own: states of a whole batch would fill the device.
    assert {job.payload for job in crew.renderer.jobs} == {"a", "b"}
    assert [episode.action.payload for episode in episodes] == [None] * 3


def test_several_pictures_of_a_completion_are_averaged() -> None:
    with BackgroundLoop() as loop:
        config = run_config(images_per_completion=3)
        crew = Crew(config, Speller(), Painter(), {"level": Level()}, True, loop)
        one, two = roll(crew, word("a"), word("b"))
        levels = [job.noise_seed % 256 / 255 for job in crew.renderer.jobs]
        assert len(levels) == 6 and levels[:3] == levels[3:] and len(set(levels[:3])) == 3
        assert one.reward == pytest.approx(sum(levels[:3]) / 3)
        assert sorted(one.image_rewards) == sorted(levels[:3])
        # Both completions got the same three rewards: all of the variance is the noise's.
        _, metrics = group_rewards(config, 0, Rollout([[one, two]], [None]), Dist())
        assert metrics.merge([metrics.state()])["reward/noise_variance_share"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("rule", "reward", "mask"),
    [("floor", 0.0, (True, True)), ("score", 51 / 255, (True, True)), ("mask", 51 / 255, ())],
)
def test_truncated_completions(rule: str, reward: float, mask: tuple[bool, ...]) -> None:
    with BackgroundLoop() as loop:
        config = run_config(algorithm={"truncated_completions": rule})
        crew = Crew(config, Speller(), Painter(), {"level": Level()}, True, loop)
        cut, _ = episodes = roll(crew, word("ab", finish="length"), word("c"))
        assert cut.reward == reward
        sequences = group_sequences(config, Speller(), 0, episodes, [0.5, -0.5])
        assert sequences[0].loss_mask == (mask or (False, False))
        assert sequences[1].loss_mask == (True,)


def test_forced_tokens_and_ungraded_episodes_do_not_train(crew: Crew) -> None:
    episodes = roll(crew, word("abc", forced=(False, True, False)), word("j"))
    first, ungraded = group_sequences(crew.config, crew.policy, 0, episodes, [1.0, None])
    assert ungraded is None
    assert first.loss_mask == (True, False, True)
    assert first.sampler_logprobs == (-0.5,) * 3


def test_the_policy_says_what_trains_in_which_iteration(crew: Crew) -> None:
    episodes = roll(crew, word("abc", forced=(False, True, False)), word("d"))
    odd = group_sequences(crew.config, crew.policy, 1, episodes, [1.0, -1.0])
    assert [s.loss_mask for s in odd] == [(False, False, True), (False,)]


def test_the_baseline_arm_shares_the_noise_and_trains_nothing(crew: Crew) -> None:
    rollout = collect(crew, sampled(word("a"), word("c"), bare=word("b")))
    [baseline] = rollout.baselines
    assert [e.action.text for e in rollout.episodes[0]] == ["a", "c"]
    assert (baseline.action.text, baseline.reward) == ("b", 51 / 255)
    assert rollout.renderer_stats == {"clip_cut_share": 0.5}
    assert {job.noise_seed for job in crew.renderer.jobs} == {51}
    same = collect(crew, sampled(word("b"), bare=word("b")))
    assert same.episodes[0][0].image is same.baselines[0].image, "equal words are one picture"
    assert collect(crew, sampled(word("a"))).baselines == [None]


def test_pictures_known_only_as_codes_are_drawn_before_anyone_looks(crew: Crew) -> None:
    drawn = replace(Sample("s", "do it"), category="drawn")
    crew.renderer.illustrate = lambda samples: [drawn for _ in samples]
    [episode, other] = roll(crew, word("a"), word("c"))
    assert episode.prompt.sample is drawn and episode.prompt is other.prompt
    assert crew.renderer.jobs[0].sample is drawn


def test_flat_groups_are_dropped_or_kept(crew: Crew) -> None:
    episodes = roll(crew, word("a"), word("b"))
    assert group_sequences(crew.config, crew.policy, 0, episodes, [0.0, 0.0]) == [None, None]
    kept = run_config(algorithm={"zero_spread_groups": "keep"})
    assert None not in group_sequences(kept, crew.policy, 0, episodes, [0.0, 0.0])


def graded(*rewards: float | None) -> list[Episode]:
    prompt = Prompt(Sample("s", "do it", category="paint"), (1, 2))
    return [
        Episode(
            "0/0", prompt, word("a"), Action("a", "a"), 1, None,
            Status.UNGRADED if reward is None else Status.SCORED, reward,
        )
        for reward in rewards
    ]  # fmt: skip


def test_reward_metrics_against_hand_computed_values() -> None:
    config = run_config(algorithm={"advantage_scale": "none"})
    episodes_PG = [graded(0.0, 1.0), graded(0.5, None)]
    baselines = [graded(0.2)[0], None]
    rollout = Rollout(episodes_PG, baselines, {"clip_cut_share": 0.25})
    advantages, metrics = group_rewards(config, 0, rollout, Dist())
    assert advantages == [[-0.5, 0.5], [0.0, None]]
    assert [early_advantages(config, episodes_G) for episodes_G in episodes_PG] == advantages
    seen = metrics.merge([metrics.state()])
    assert seen["reward/mean"] == pytest.approx(0.5)
    assert seen["reward/std"] == pytest.approx(math.sqrt(pvariance([0, 1, 0.5])))
    assert seen["reward/group_std"] == pytest.approx(0.5)
    assert seen["status/ungraded"] == pytest.approx(0.25)
    assert seen["renderer/clip_cut_share"] == 0.25
    assert seen["baseline_reward"] == pytest.approx(0.2)
    assert seen["reward_gain"] == pytest.approx((-0.2 + 0.8) / 2), "of the group that has one"
    assert seen["groups/zero_spread"] == pytest.approx(0.5)
    assert size_of([[word("ab"), word("c")]]) == "2 completions, 3 tokens"


def test_control_arm_hands_the_same_rewards_to_other_episodes() -> None:
    config = run_config(algorithm={"shuffle_rewards": True, "advantage_scale": "none"})
    episodes_PG = [graded(*[0.1 * g + p for g in range(8)]) for p in range(2)]
    rewards = sorted(e.reward for row in episodes_PG for e in row)
    rollout = Rollout(episodes_PG, [None, None])
    assert early_advantages(config, episodes_PG[0]) is None, "no group can be learnt from alone"
    shuffled = [group_rewards(config, it, rollout, Dist())[0] for it in (0, 0, 1)]
    assert shuffled[0] == shuffled[1] != shuffled[2], "a pure function of seed and iteration"
    spread = max(shuffled[0][0]) - min(shuffled[0][0])
    assert spread > 0.75, "rewards crossed the border between groups"
    assert rewards == sorted(e.reward for row in episodes_PG for e in row)


def test_too_many_ungraded_episodes_stop_the_run() -> None:
    config = run_config(judge={"max_failure_rate": 0.5})
    check_failure_rate(config, [graded(0.1, None)], Dist())
    with pytest.raises(TooManyFailuresError, match=r"2 of 3 .*judge\.max_failure_rate=0\.5"):
        check_failure_rate(config, [graded(0.1, None, None)], Dist())


class Endless:
    """A judge that never answers."""

    num_asked = num_waiting = 0

    async def grade(self, evidence: Evidence) -> Grade:
        self.num_asked += 1
        self.num_waiting += 1
        try:
            await asyncio.sleep(3600)
        finally:
            self.num_waiting -= 1
        raise AssertionError("not reached")


@pytest.mark.parametrize(
    "looks", [0, 2, 4], ids=["before-rendering", "while-rendering", "while-judging"]
)
def test_being_asked_to_stop_leaves_a_long_rollout_at_once(crew: Crew, looks: int) -> None:
    judge, left = Endless(), iter(range(looks))
    slow = replace(crew, rewards={"level": judge})
    with pytest.raises(Interrupted):
        collect(slow, sampled(word("ab"), word("cd")), lambda: next(left, None) is None)
    crew.loop.submit(asyncio.sleep(0.1)).result()
    assert judge.num_waiting == 0, "questions are still being asked"
    assert judge.num_asked == 2 or looks < 4


class Refusing:
    async def grade(self, evidence: Evidence) -> Grade:
        raise JudgeRefused("HTTP 401: the key has expired")


def run_of(crew: Crew, saved: list[int]) -> Run:
    """As much of a run as a rollout touches."""
    run = Run.__new__(Run)
    run.config, run.crew, run.dist, run.timer = crew.config, crew, Dist(), PhaseTimer()
    run.policy = crew.policy
    run.save = lambda done, final=False: saved.append(done)
    return run


def fly(run: Run, *words: str) -> Flight | None:
    batch = sampled(*(word(text) for text in words))
    update = Waiting(batch)
    judging = run.render(batch, update)
    return None if judging is None else Flight(0, judging, update)


@pytest.mark.parametrize(("done", "expected"), [(0, []), (7, [7])])
def test_a_judge_that_stops_the_run_costs_no_finished_iteration(
    crew: Crew, done: int, expected: list[int]
) -> None:
    saved: list[int] = []
    run = run_of(replace(crew, rewards={"level": Refusing()}), saved)
    with pytest.raises(JudgeError, match="the key has expired"):
        run.grade(fly(run, "ja", "jb"), done)
    assert saved == expected
    run = run_of(crew, saved)
    with pytest.raises(TooManyFailuresError, match="2 x ungraded"):
        run.grade(fly(run, "ja", "jb"), done)
    assert saved == 2 * expected


def test_a_run_that_is_asked_to_stop_collects_nothing(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(crew, [])
    flight = fly(run, "ab", "cd")
    assert [e.status for e in run.grade(flight, 3).episodes[0]] == [Status.SCORED] * 2
    late = fly(run, "ab", "cd")
    monkeypatch.setattr(signals._received, "first", signal.SIGTERM)
    assert run.grade(late, 3) is None
    assert fly(run, "ab", "cd") is None


def test_groups_are_handed_in_while_others_are_judged(crew: Crew) -> None:
    run = run_of(crew, [])
    flight = fly(run, "ab", "j")
    run.grade(flight, 0)
    assert flight.update.seen == ["ahead", (0, [None, None])], "one graded, no spread"
    run.config = run_config(algorithm={"shuffle_rewards": True})
    control = fly(run, "ab", "cd")
    run.grade(control, 0)
    assert control.update.seen == ["ahead"], "advantages need the whole batch"


def test_a_finished_group_is_learnt_from_before_the_last_verdict(crew: Crew) -> None:
    """The second group's judge does not speak before the first group has been handed in."""
    prompts = [Prompt(Sample(name, "do it"), (1, 2)) for name in "ab"]
    batch = Sampled(prompts, [[word("ab")], [word("late")]], [51, 52], ["0/0", "0/1"], [None, None])
    update = Waiting(batch)

    class Waits(Level):
        async def grade(self, evidence: Evidence) -> Grade:
            for _ in range(500 if evidence.text == "late" else 0):
                if update.seen[1:]:
                    return await super().grade(evidence)
                await asyncio.sleep(0.01)
            return await super().grade(evidence)

    run = run_of(replace(crew, rewards={"level": Waits()}), [])
    judging = run.render(batch, update)
    assert judging is not None
    started = time.monotonic()
    run.grade(Flight(0, judging, update), 0)
    assert [seen[0] for seen in update.seen[1:]] == [0, 1]
    assert time.monotonic() - started < 4, "the judge waited in vain"


def test_a_judge_that_stalls_costs_no_picture_and_no_finished_reward(crew: Crew) -> None:
    """It stalls for six time-outs (12 minutes at the default 120 s) in the middle of a rollout."""

    class Asks:
        def __init__(self, client: JudgeClient) -> None:
            self.client = client

        async def grade(self, evidence: Evidence) -> Grade:
            answer = await self.client.ask(pair_question(evidence.text), read_pair)
            value = None if answer.value is None else answer.value[0] / 10
            return Grade(value, failure=answer.failure)

    async def recover() -> None:
        await asyncio.sleep(0.9)
        judge.after = Fault()

    words = [word(chr(97 + i) * 2) for i in range(8)]
    with FaultyJudge([Fault()] * 3, after=Fault(stall_s=0.4)) as judge:
        config = quick_config(timeout_s=0.15, max_concurrency=2, breaker_failures=2)
        client = JudgeClient(config, judge.api_base)
        back = crew.loop.submit(recover())
        episodes = roll(replace(crew, rewards={"asks": Asks(client)}), *words)
        back.result()
        crew.loop.submit(client.aclose()).result()
    assert [episode.reward for episode in episodes] == [0.8] * 8
    assert len(crew.renderer.jobs) == 8, "a picture was made twice"
    assert len({json.dumps(request["messages"]) for request in judge.requests[:3]}) == 3
    asked = Counter(json.dumps(request["messages"]) for request in judge.requests)
    answered_at_once = [json.dumps(request["messages"]) for request in judge.requests[:3]]
    assert all(asked[question] == 1 for question in answered_at_once), "a reward was asked again"
