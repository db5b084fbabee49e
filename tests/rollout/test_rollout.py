"""A completion is scored, failed by the policy or ungraded; the status decides what trains."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import pvariance
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from PIL import Image
from tiny_messages import holds, raising
from tiny_rollout import Batches, Graded, Painter, bare_run, collect, word
from tiny_run import run_config

from rl.api.reward import Reward
from rl.api.types import (
    Action,
    Completion,
    Episode,
    Prompt,
    Region,
    RenderJob,
    RewardInput,
    RewardOutput,
    Row,
    Sample,
    Status,
)
from rl.config.schema import RunConfig
from rl.judge.client import JudgeError, JudgeRefused
from rl.judge.http import BackgroundLoop
from rl.ranks import signals
from rl.ranks.dist import Dist
from rl.rollout.episodes import Interrupted, PendingEpisode, Picture, PictureAndText, episode_of
from rl.rollout.stream import Advantages, Rollout, RolloutContext, Sampled, train_sequences
from rl.run.alarms import LEARNING, Watch
from rl.run.checks import Checks, TooManyFailuresError
from rl.run.episode_metrics import rollout_metrics, size_text
from rl.run.run import PendingStep, Run


class Speller:
    """A policy that decodes token ids as letters; a completion of only 0 is a failure."""

    reads_states = False

    def decode_actions(self, rows: Sequence[Row], batch: None, outputs: None) -> list[Action]:
        texts = ["".join(chr(96 + i) for i in ids if i) for _, ids in rows]
        return [Action(t, t or None, None if t else "empty: no words") for t in texts]

    def pass_through_completion(self, sample: Sample) -> Completion:
        return word("b")

    def loss_mask(self, completion: Completion, iteration: int) -> list[bool]:
        """In odd iterations the first letter is not trained."""
        return [index > 0 or iteration % 2 == 0 for index in range(len(completion.token_ids))]


class Level(Reward):
    """Grades the grey level; the judge does not answer about words that begin with 'j'."""

    def __init__(self) -> None:
        self.num_asked = 0

    async def grade(self, reward_input: RewardInput) -> RewardOutput:
        self.num_asked += 1
        if reward_input.text.startswith("j"):
            return RewardOutput(None, failure="timeout: no answer", replies=("half a",))
        assert reward_input.image is not None
        level = reward_input.image.getpixel((0, 0))[0] / 255
        parts, regions = {"raw": level * 10}, (Region(f"{level}", (0, 0, 1, 1)),)
        return RewardOutput(level, parts, replies=(f"{level}",), seconds=0.5, regions=regions)


@pytest.fixture
def context() -> Iterator[RolloutContext]:
    with BackgroundLoop() as loop:
        yield RolloutContext(run_config(), Speller(), Painter(), {"level": Level()}, True, loop)


def sampled(*completions: Completion, bare: Completion | None = None) -> Sampled:
    return Sampled([Prompt(Sample("s", "do it"), (1, 2))], [completions], [51], ["0/0"], [bare])


def two_groups(first: str, second: str) -> Sampled:
    prompts = [Prompt(Sample(name, f"draw {name}"), (1, 2)) for name in "ab"]
    return Sampled(prompts, [[word(first)], [word(second)]], [51, 52], ["0/0", "0/1"], [None, None])


def roll(context: RolloutContext, *completions: Completion) -> list[Episode]:
    return collect(context, sampled(*completions)).episodes[0]


def test_a_completion_is_scored_or_fails_or_is_ungraded(context: RolloutContext) -> None:
    scored, empty, broken, ragged, unjudged = roll(
        context, word("ab"), word(""), word("xa"), word("ya"), word("ja")
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
    assert unjudged.replies == {"level": ("half a",)}, "a reply without a grade is kept"


def test_a_group_shares_its_noise_and_equal_completions_are_one_picture(
    context: RolloutContext,
) -> None:
    episodes = roll(context, word("a"), word("b"), word("a"))
    assert {job.noise_seed for job in context.renderer.jobs} == {51}
    assert len(context.renderer.jobs) == 2 and context.rewards["level"].num_asked == 2
    assert episodes[0].image is episodes[2].image
    # Episodes drop the payload that the renderer took: a batch's states would fill the device.
    assert {job.payload for job in context.renderer.jobs} == {"a", "b"}
    assert [episode.action.payload for episode in episodes] == [None] * 3


def test_a_renderer_that_exchanges_samples_stops_the_run(context: RolloutContext) -> None:
    two = two_groups("a", "b")
    assert len(collect(context, two).episodes) == 2
    context.renderer.decode_sources = lambda samples: samples[::-1]
    with pytest.raises(
        RuntimeError, match=r"sample 'a' \(draw a\) was decoded with the sample 'b'"
    ):
        collect(context, two)


@pytest.mark.parametrize("what", ["drawn", "graded"])
def test_an_episode_is_of_its_own_prompt(what: str) -> None:
    own, other = (Sample("s", instruction) for instruction in ("do it", "do that"))
    drawn, graded = (other, own) if what == "drawn" else (own, other)
    pair = PictureAndText(Picture(0, 0, drawn_of=drawn), RewardInput(graded, "a", None))
    pending = PendingEpisode(Prompt(own, (1,)), word("a"), Action("a", "a"), None, [pair])
    with pytest.raises(
        RuntimeError, match=f"'s' \\(do it\\) was {what} with the sample 's' \\(do that\\)"
    ):
        episode_of(run_config(), pending, "0/0", 51)


def test_several_pictures_of_a_completion_are_averaged(context: RolloutContext) -> None:
    config = run_config(images_per_completion=3)
    one, two = roll(replace(context, config=config), word("a"), word("b"))
    levels = [job.noise_seed % 256 / 255 for job in context.renderer.jobs]
    assert len(levels) == 6 and levels[:3] == levels[3:] and len(set(levels[:3])) == 3
    assert one.reward == pytest.approx(sum(levels[:3]) / 3)
    recorded = one.image.getpixel((0, 0))[0] / 255
    assert one.regions == {"level": (Region(f"{recorded}", (0, 0, 1, 1)),)}
    assert two.reward == one.reward, "both completions got the same three rewards"


@pytest.mark.parametrize(
    ("rule", "reward", "mask"),
    [("floor", 0.0, (True, True)), ("score", 51 / 255, (True, True)), ("mask", 51 / 255, ())],
)
def test_truncated_completions(
    context: RolloutContext, rule: str, reward: float, mask: tuple[bool, ...]
) -> None:
    config = run_config(algorithm={"truncated_completions": rule})
    words = word("ab", finish="length"), word("c")
    episodes = roll(replace(context, config=config), *words)
    assert episodes[0].reward == reward
    sequences = train_sequences(config, Speller(), 0, episodes, [0.5, -0.5])
    assert [s.loss_mask for s in sequences] == [mask or (False, False), (True,)]


def test_forced_tokens_masked_tokens_and_ungraded_completions_do_not_train(
    context: RolloutContext,
) -> None:
    episodes = roll(context, word("abc", forced=(False, True, False)), word("j"), word("d"))

    def trained(iteration: int) -> list[Any]:
        return train_sequences(context.config, context.policy, iteration, episodes, [1, None, -1])

    first, ungraded, _ = trained(0)
    assert ungraded is None
    assert first.loss_mask == (True, False, True)
    assert first.sampler_logprobs == (-0.5,) * 3
    assert [s and s.loss_mask for s in trained(1)] == [(False, False, True), None, (False,)]


def test_the_bare_arm_shares_the_noise_and_trains_nothing(context: RolloutContext) -> None:
    rollout = collect(context, sampled(word("a"), word("c"), bare=word("b")))
    [bare] = rollout.bare_episodes
    assert [e.action.text for e in rollout.episodes[0]] == ["a", "c"]
    assert (bare.action.text, bare.reward) == ("b", 51 / 255)
    assert rollout.renderer_metrics == {"clip_cut_share": 0.5}
    assert {job.noise_seed for job in context.renderer.jobs} == {51}
    same = collect(context, sampled(word("b"), bare=word("b")))
    assert same.episodes[0][0].image is same.bare_episodes[0].image, "equal words are one picture"
    assert collect(context, sampled(word("a"))).bare_episodes == [None]


def test_sources_given_as_codes_are_decoded_before_they_are_used(context: RolloutContext) -> None:
    drawn = replace(Sample("s", "do it"), category="drawn")
    context.renderer.decode_sources = lambda samples: [drawn for _ in samples]
    [episode, other] = roll(context, word("a"), word("c"))
    assert episode.prompt.sample is drawn and episode.prompt is other.prompt
    assert context.renderer.jobs[0].sample.category == "drawn"


@pytest.mark.parametrize(
    ("algorithm", "counted"),
    [
        ({"kl_coeff": 0.1}, False),  # its KL is added, but no denominator counts it
        ({"kl_coeff": 0.0}, None),  # without a KL it has no backward
        ({"kl_coeff": 0.1, "zero_spread_groups": "keep"}, True),
        ({"kl_coeff": 0.0, "zero_spread_groups": "keep"}, True),
        ({"kl_coeff": 0.1, "zero_spread_groups": "drop"}, None),
    ],
)
def test_a_group_without_spread_trains_as_configured(
    context: RolloutContext, algorithm: dict[str, object], counted: bool | None
) -> None:
    episodes, config = roll(context, word("a"), word("b")), run_config(algorithm=algorithm)
    flat = train_sequences(config, context.policy, 0, episodes, [0.0, 0.0])
    assert [sequence and (sequence.advantage, sequence.counted) for sequence in flat] == [
        None if counted is None else (0.0, counted)
    ] * 2
    for sequence in train_sequences(config, context.policy, 0, episodes, [1.0, -1.0]):
        assert sequence is not None and sequence.counted


def graded(*rewards: float | None) -> list[Episode]:
    prompt = Prompt(Sample("s", "do it", category="paint"), (1, 2))
    scored = Episode("0/0", prompt, word("a"), Action("a", "a"), 1, None, Status.SCORED, 0.0)
    ungraded = replace(scored, status=Status.UNGRADED, reward=None)
    return [ungraded if reward is None else replace(scored, reward=reward) for reward in rewards]


def weigh(
    config: RunConfig, iteration: int, episodes_PG: Sequence[Sequence[Episode]]
) -> list[Sequence[float | None]]:
    """Returns advantages_PG; asserts that each group is returned once and in order."""
    advantages = Advantages(config, Speller(), iteration, Dist())
    groups = [g for p, episodes_G in enumerate(episodes_PG) for g in advantages.add(p, episodes_G)]
    groups += advantages.rest()
    assert [group.p for group in groups] == list(range(len(episodes_PG)))
    return [group.advantages for group in groups]


def test_reward_metrics_against_hand_computed_values() -> None:
    config = run_config(algorithm={"advantage_scale": "none"})
    episodes_PG = [graded(0.0, 1.0), graded(0.5, None)]
    assert weigh(config, 0, episodes_PG) == [[-0.5, 0.5], [0.0, None]]
    merged = Dist().reduce(rollout_metrics(Rollout(episodes_PG, [*graded(0.2), None]), Dist()))
    expected = {
        "reward/mean": 0.5,
        "reward/std": math.sqrt(pvariance([0, 1, 0.5])),
        "reward/group_std": 0.5,
        "status/ungraded": 0.25,
        "bare_reward": 0.2,
        "reward_gain": (-0.2 + 0.8) / 2,  # only of the group with a bare arm
        "groups/zero_spread": 0.5,
    }
    assert {name: merged[name] for name in expected} == pytest.approx(expected)
    assert size_text([[word("ab"), word("c")]]) == "2 completions, 3 tokens"


@pytest.mark.parametrize("scale", ["none", "group_std"])
def test_a_sequence_knows_how_far_its_reward_is_above_the_mean(scale: str) -> None:
    config = run_config(algorithm={"advantage_scale": scale})
    [group] = Advantages(config, Speller(), 0, Dist()).add(0, graded(0.1, 0.9, 0.2))
    assert [s.excess for s in group.sequences if s] == pytest.approx([-0.3, 0.5, -0.2])


def test_a_control_run_shuffles_rewards_between_episodes() -> None:
    config = run_config(algorithm={"shuffle_rewards": True, "advantage_scale": "none"})
    episodes_PG = [graded(*[0.1 * g + p for g in range(8)]) for p in range(2)]
    rewards = sorted(e.reward for row in episodes_PG for e in row)
    alone = Advantages(config, Speller(), 0, Dist()).add(0, episodes_PG[0])
    assert list(alone) == [], "shuffling needs all groups"
    one, same, other = (weigh(config, it, episodes_PG) for it in (0, 0, 1))
    assert one == same != other, "a pure function of seed and iteration"
    assert max(one[0]) - min(one[0]) > 0.75, "rewards were moved between groups"
    assert rewards == sorted(e.reward for row in episodes_PG for e in row)


class SecondOfTwo(Dist):
    """Rank 1; rank 0 always contributes the sums of the rewards 0, 0, 4 and 4."""

    def gather(self, value: Any) -> list[Any]:
        return [[8.0, 32.0, 4.0], value]


def test_batch_std_is_over_the_rewards_of_all_ranks() -> None:
    config = run_config(algorithm={"advantage_scale": "batch_std", "advantage_eps": 0.0})
    advantages = Advantages(config, Speller(), 0, SecondOfTwo(rank=1, world_size=2))
    assert list(advantages.add(0, graded(1.0, 3.0))) == []
    [group] = advantages.rest()
    # 0, 0, 4, 4, 1, 3: mean 2, mean square 42 / 6 = 7, variance 7 - 4 = 3.
    assert group.advantages == pytest.approx([-1 / math.sqrt(3), 1 / math.sqrt(3)])


@pytest.mark.parametrize(
    "checks", [0, 2, None], ids=["before-rendering", "while-rendering", "while-judging"]
)
def test_a_stop_request_ends_a_long_rollout_at_once(
    context: RolloutContext, checks: int | None
) -> None:
    asked, ended = list[str](), list[str]()
    checks_before_stop = iter(range(checks or 0))

    def should_stop() -> bool:
        return len(asked) == 2 if checks is None else next(checks_before_stop, None) is None

    async def never_answers(reward_input: RewardInput) -> None:
        asked.append(reward_input.text)
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(reward_input.text)

    slow = replace(context, rewards={"level": Graded(never_answers)})
    with pytest.raises(Interrupted):
        collect(slow, sampled(word("ab"), word("cd")), should_stop)
    context.loop.submit(asyncio.sleep(0.1)).result()
    assert sorted(ended) == sorted(asked), "questions are still being asked"
    assert checks is None or len(asked) < 2


def run_of(context: RolloutContext) -> Run:
    """A run with only the attributes that a rollout uses."""
    checks = Checks(context.config, Dist(), [], Mock(), Watch(LEARNING))
    return bare_run(config=context.config, context=context, checks=checks)


def started(run: Run, batch: Sampled) -> PendingStep:
    train_step = Batches(batch)
    return PendingStep(0, run.render(batch, train_step), train_step)


def start(run: Run, *completions: str) -> PendingStep:
    return started(run, sampled(*map(word, completions)))


def test_a_judge_that_refuses_or_fails_too_often_stops_the_run(context: RolloutContext) -> None:
    refusing = Mock(side_effect=JudgeRefused("HTTP 401: the key has expired"))
    run = run_of(replace(context, rewards={"level": Graded(refusing)}))
    with pytest.raises(JudgeError, match="the key has expired"):
        list(run.graded_groups(start(run, "ja", "jb")))
    run = run_of(replace(context, config=run_config(judge={"max_failure_rate": 0.5})))
    list(run.graded_groups(start(run, "a", "ja")))
    limit = r"2 of 3 .*2 x level: timeout.*judge\.max_failure_rate=0\.5"
    with pytest.raises(TooManyFailuresError, match=limit):
        list(run.graded_groups(start(run, "a", "ja", "jb")))


def test_a_run_that_is_asked_to_stop_collects_no_more_rollouts(
    context: RolloutContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(context)
    [group] = run.graded_groups(start(run, "ab", "j"))
    assert [e.status for e in group.episodes] == [Status.SCORED, Status.UNGRADED]
    assert group.sequences == [None, None], "one graded, no spread"
    late = start(run, "ab", "cd")
    monkeypatch.setitem(signals._received_s, 15, 0.0)
    with pytest.raises(Interrupted):
        list(run.graded_groups(late))
    with pytest.raises(Interrupted):
        start(run, "ab", "cd")


def test_a_graded_group_is_learnt_from_before_the_last_one(context: RolloutContext) -> None:
    """The second group's judge does not answer before the first group has been accumulated."""
    accumulated: list[int] = []
    deadline = time.monotonic() + 120

    async def waits(reward_input: RewardInput) -> float:
        while reward_input.text == "late" and not accumulated:
            await asyncio.sleep(0.01)
            assert time.monotonic() < deadline, "the first group was not accumulated"
        return 0.5

    run = run_of(replace(context, rewards={"level": Graded(waits)}))
    for group in run.graded_groups(started(run, two_groups("ab", "late"))):
        accumulated.append(group.p)
    assert accumulated == [0, 1]


def raises(reward_input: RewardInput) -> float:
    """A reward that raises on words that begin with 'r'."""
    if reward_input.text.startswith("r"):
        raise KeyError("nothing there")
    return 0.25


@pytest.mark.parametrize(
    "error",
    [StopIteration(), KeyboardInterrupt(), SystemExit(0), GeneratorExit(), MemoryError(),
     asyncio.CancelledError()],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
@pytest.mark.parametrize("is_async", [False, True])
def test_whatever_a_reward_raises_leaves_its_picture_ungraded(
    context: RolloutContext, error: BaseException, is_async: bool
) -> None:
    def plain(reward_input: RewardInput) -> float:
        raise error

    async def waiting(reward_input: RewardInput) -> float:
        await asyncio.sleep(0)
        raise error

    odd = Graded(waiting if is_async else plain)
    [episode] = roll(replace(context, rewards={"odd": odd}), word("a"))
    assert episode.status is Status.UNGRADED
    assert holds(episode.failure, f"odd: raised ... {type(error).__name__}")


def test_a_reward_that_raises_leaves_that_picture_ungraded(context: RolloutContext) -> None:
    rewards = {"level": Level(), "mine": Graded(raises)}
    good, bad = roll(replace(context, rewards=rewards), word("a"), word("r"))
    assert (good.status, good.parts["mine"]) == (Status.SCORED, 0.25), "a synchronous reward works"
    assert bad.status is Status.UNGRADED and bad.reward is None and bad.failure is not None
    first, *traceback = bad.failure.split("\n")
    assert holds(first, "mine: raised KeyError: 'nothing there' ... test_rollout.py, line ")
    assert "in raises" in "".join(traceback) and traceback[-1] == "KeyError: 'nothing there'"


def test_a_gpu_error_in_a_reward_ends_the_run(context: RolloutContext) -> None:
    lost = Mock(side_effect=torch.AcceleratorError("CUDA error: an illegal memory access"))
    with pytest.raises(torch.AcceleratorError):
        roll(replace(context, rewards={"lost": Graded(lost)}), word("a"))


@pytest.mark.parametrize("wrong", [1.5, "good", None, math.nan, RewardOutput(0.5, {"a b": 1.0})])
def test_a_reward_that_returns_an_invalid_value_leaves_the_picture_ungraded(
    context: RolloutContext, wrong: object
) -> None:
    [episode] = roll(replace(context, rewards={"odd": Graded(lambda _: wrong)}), word("a"))
    assert episode.status is Status.UNGRADED and episode.failure.startswith("odd: ")
    assert "Traceback" not in episode.failure, "it would show no line of the user's"
    assert wrong is not None or episode.failure == "odd: gave no value (None)"


def test_a_reward_that_raises_on_every_picture_stops_the_run_with_its_traceback(
    context: RolloutContext,
) -> None:
    run = run_of(replace(context, rewards={"level": Level(), "mine": Graded(raises)}))
    list(run.graded_groups(start(run, "ra", "ab")))
    parts = "2 of 2 ... 2 x mine: raised KeyError ... max_failure_rate ... in raises"
    with raising(TooManyFailuresError, parts):
        list(run.graded_groups(start(run, "ra", "rb")))


RED, EMPTY = Image.new("RGB", (8, 8), "red"), Image.new("RGB", (0, 8))


@pytest.mark.parametrize(
    ("drawn", "part"),
    [
        ([(0, None)], "(0, None) (tuple)"),
        ([(0, Image.new("L", (8, 8)))], "mode=L"),
        ([(0, EMPTY)], "size=0x8"),
        ([(0, "a picture")], "'a picture'"),
        ([RED], "mode=RGB size=8x8"),
        ([(1, RED)], "(1, <PIL"),
        ([(0, RED), (0, RED)], "(0, <PIL"),
        ([], "no picture for 1 of 1 jobs"),
        (None, "takes none for 1 completions"),
    ],
)
def test_what_a_renderer_may_not_yield_ends_the_run_with_a_sentence(
    context: RolloutContext, drawn: list[Any] | None, part: str
) -> None:
    """`drawn` None: the renderer takes no job."""
    taken = () if drawn is None else drawn
    context.renderer.render = lambda jobs: (drawn is None or [*jobs]) and iter(taken)
    with pytest.raises((TypeError, ValueError)) as error:
        roll(context, word("a"))
    assert holds(signals.sentence(error.value), f"renderer: none yields ... {part}")


class SpoilsGroups(Reward):
    """Draws on all pictures of its input and empties the hidden keys."""

    def spoil(self, x: RewardInput) -> float:
        for picture in (x.image, *x.sample.sources, x.sample.target, x.sample.hidden["mask"][0]):
            picture.paste("black", (0, 0, *picture.size))
        x.sample.hidden.clear()
        return 1.0

    def score_group(self, inputs_G: Sequence[RewardInput]) -> list[float]:
        return [self.spoil(x) for x in inputs_G]


class OneCanvas(Painter):
    """Paints over its sources, and yields one canvas for all pictures."""

    def render(self, jobs: Iterable[RenderJob]) -> Iterator[tuple[int, Image.Image]]:
        canvas = Image.new("RGB", (8, 8))
        for number, job in enumerate(jobs):
            job.sample.sources[0].paste("black", (0, 0, 8, 8))
            canvas.paste((200 + number, 0, 0), (0, 0, 8, 8))
            yield number, canvas


def test_a_plugin_that_changes_its_input_does_not_affect_other_plugins(
    context: RolloutContext,
) -> None:
    seen = []

    async def sees(x: RewardInput) -> float:
        await asyncio.sleep(0.02)  # the other rewards have run
        white = [picture.getpixel((1, 1)) for picture in (x.sample.source, x.sample.target)]
        seen.append((x.image.getpixel((1, 1)), white, set(x.sample.hidden)))
        return 1.0

    white = [Image.new("RGB", (8, 8), "white") for _ in range(3)]
    sample = Sample("s", "x", (white[0],), target=white[1], hidden={"mask": [white[2]]})
    batch = replace(sampled(word("a"), word("b")), prompts=[Prompt(sample, (1, 2))])
    group = SpoilsGroups(None, None)
    rewards = {"group": group, "one": Graded(group.spoil), "sees": Graded(sees)}
    episodes = collect(replace(context, rewards=rewards, renderer=OneCanvas()), batch).episodes[0]
    assert [episode.reward for episode in episodes] == [1.0, 1.0], episodes[0].failure
    reds, pure = [(200, 0, 0), (201, 0, 0)], [(255, 255, 255)] * 2
    assert sorted(seen) == [(red, pure, {"mask"}) for red in reds]
    assert {picture.getpixel((0, 0)) for picture in white} == {(255, 255, 255)}
    assert [episode.image.getpixel((0, 0)) for episode in episodes] == reds


class Longest(Reward):
    """Gives 1 to the longest words of a group."""

    def __init__(self) -> None:
        self.groups: list[list[str]] = []

    async def score_group(self, inputs_G: Sequence[RewardInput]) -> list[float]:
        texts = [reward_input.text for reward_input in inputs_G]
        self.groups.append(texts)
        if "r" in texts:
            raise ValueError("no")
        return [float(len(text) == max(map(len, texts))) for text in texts]


def test_a_reward_may_score_a_group_at_once(context: RolloutContext) -> None:
    longest = Longest()
    both = replace(context, rewards={"longest": longest, "level": Level()})
    batch = sampled(
        word("ab"), word("abc"), word("xa"), word(""), word("ab"), word("ya"), bare=word("b")
    )
    rollout = collect(both, batch)
    assert longest.groups == [["ab", "abc", "b"]], "one call with each distinct picture"
    values = [episode.parts.get("longest") for episode in rollout.episodes[0]]
    assert values == [0, 1, None, None, 0, None]
    assert rollout.bare_episodes[0].parts["longest"] == 0
    assert list(rollout.episodes[0][0].parts)[:1] == ["longest"], "in the config's order"
    [a, r] = roll(both, word("a"), word("r"))
    assert a.status is r.status is Status.UNGRADED, "an error fails the whole group"
    assert "longest: raised ValueError: no" in a.failure


def test_each_rendering_noise_is_scored_as_its_own_group(context: RolloutContext) -> None:
    longest, config = Longest(), run_config(images_per_completion=2)
    mine = replace(context, config=config, rewards={"longest": longest})
    one, two = roll(mine, word("ab"), word("a"))
    assert longest.groups == [["ab", "a"]] * 2
    assert (one.reward, two.reward) == (1, 0)
