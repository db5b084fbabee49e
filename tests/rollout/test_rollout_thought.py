"""Equal words share a picture whatever their thoughts; rewards that read thoughts see each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from unittest.mock import Mock

import pytest
from tiny_rollout import Graded, Painter, collect, word
from tiny_run import run_config

from rl.algorithm.metrics import Metrics
from rl.api.reward import Reward
from rl.api.types import (
    UNFINISHED_THOUGHT,
    Action,
    Completion,
    Prompt,
    RewardInput,
    RewardOutput,
    Row,
    Sample,
)
from rl.judge.http import BackgroundLoop
from rl.learner.train_step import pack_groups
from rl.ranks.dist import Dist
from rl.rollout.stream import Rollout, RolloutContext, Sampled, train_sequences
from rl.run.episode_metrics import add_thought

MARKER = 26  # 'z'


class Thinker:
    """Decodes ids as letters; the thought ends with 'z'. Plain prompts have no thought."""

    reads_states = False

    def decode_actions(self, rows: Sequence[Row], batch: None, outputs: None) -> list[Action]:
        return [self._action(prompt, tuple(ids)) for prompt, ids in rows]

    def _action(self, prompt: Prompt, ids: tuple[int, ...]) -> Action:
        text = "".join(chr(96 + i) for i in ids)
        if prompt.without_thought is None:
            return Action(text, text)
        if MARKER not in ids:
            return Action(text, None, f"{UNFINISHED_THOUGHT}: cut off", text, len(ids), ())
        at = ids.index(MARKER) + 1
        return Action(text, text[at:], None, text[:at], at, ids[at:])

    def loss_mask(self, completion: Completion, iteration: int) -> list[bool]:
        return [True] * len(completion.token_ids)


class Seen(Graded):
    """Grades only the picture."""

    reads_thoughts = False


class Brief(Reward):
    """Prefers short thoughts, and records what it reads."""

    def __init__(self) -> None:
        self.graded: list[tuple[str, str, str]] = []

    async def grade(self, reward_input: RewardInput) -> RewardOutput:
        self.graded.append((reward_input.text, reward_input.thought, reward_input.words))
        return RewardOutput(1 / (1 + len(reward_input.thought)))


@pytest.fixture
def context() -> Iterator[RolloutContext]:
    rewards = {"seen": Seen(Mock(return_value=0.5)), "brief": Brief()}
    with BackgroundLoop() as loop:
        yield RolloutContext(run_config(), Thinker(), Painter(), rewards, True, loop)


def thinking_prompt() -> Prompt:
    plain = Prompt(Sample("s", "do it"), (1, 2))
    return Prompt(plain.sample, (1, 3, 2), without_thought=plain)


def sampled(completions: list[Completion], bare: Completion | None = None) -> Sampled:
    return Sampled([thinking_prompt()], [completions], [51], ["0/0"], [bare])


def roll(context: RolloutContext) -> Rollout:
    """Two thoughts before equal words, other words, an unfinished thought, and the bare arm."""
    completions = [word("azc"), word("abzc"), word("azd"), word("abc")]
    return collect(context, sampled(completions, word("c")))


def test_equal_words_are_drawn_once_and_graded_with_each_thought(context: RolloutContext) -> None:
    rollout = roll(context)
    one, two, other, failed = rollout.episodes[0]
    [bare] = rollout.bare_episodes
    assert [job.payload for job in context.renderer.jobs] == ["c", "d"]
    assert one.image is two.image is bare.image and one.image is not other.image
    seen = context.rewards["seen"].grade
    assert seen.call_count == 2, "a reward of pictures grades each picture once"
    assert sorted(context.rewards["brief"].graded) == [
        ("abzc", "abz", "c"), ("azc", "az", "c"), ("azd", "az", "d"), ("c", "", "c"),
    ]  # fmt: skip
    assert [e.parts["brief"] for e in (one, two, other, bare)] == [1 / 3, 1 / 4, 1 / 3, 1]
    assert (failed.status, failed.failure) == ("policy_failed", "unfinished thought: cut off")
    assert bare.action.thought == "" and bare.status == "scored", "a bare completion is all words"


@pytest.mark.parametrize("reads", [False, True])
def test_a_group_reward_gets_equal_words_once_unless_it_reads_thoughts(
    context: RolloutContext, reads: bool
) -> None:
    class Ranked(Reward):
        """Gives later inputs higher rewards."""

        reads_thoughts = reads

        def score_group(self, inputs_G: Sequence[RewardInput]) -> list[float]:
            groups.append([(each.thought, each.words) for each in inputs_G])
            return [number / len(inputs_G) for number in range(len(inputs_G))]

    groups: list[list[tuple[str, str]]] = []
    rollout = roll(replace(context, rewards={"ranked": Ranked(None, None), "brief": Brief()}))
    [group] = groups
    values = [e.parts["ranked"] for e in (*rollout.episodes[0][:3], *rollout.bare_episodes)]
    if reads:
        assert group == [("az", "c"), ("abz", "c"), ("az", "d"), ("", "c")]
        assert values == [0, 1 / 4, 2 / 4, 3 / 4]
    else:
        assert [words for _, words in group] == ["c", "d"]
        assert values == [0, 0, 1 / 2, 0]


def test_lengths_of_thoughts_and_unfinished_thoughts_are_logged(context: RolloutContext) -> None:
    metrics = Metrics()
    for episode in roll(context).episodes[0]:
        add_thought(metrics, "eval/", episode)
    assert Dist().reduce(metrics) == {
        "eval/thought/tokens_mean": (2 + 3 + 2 + 3) / 4,
        "eval/thought/tokens_max": 3,
        "eval/thought/unfinished": 0.25,
        "eval/thought/no_marker": 0,
    }


@pytest.mark.parametrize("rule", ["floor", "score", "mask"])
def test_a_thought_that_is_cut_off_is_a_failure_with_every_rule(
    context: RolloutContext, rule: str
) -> None:
    """With 'mask' it has no loss. Cut words follow the rule, as without thoughts."""
    config = run_config(algorithm={"truncated_completions": rule})
    batch = sampled([word("ab", finish="length"), word("azc", finish="length"), word("azd")])
    episodes = collect(replace(context, config=config), batch).episodes[0]
    cut_thought, cut_words, _ = episodes
    assert (cut_thought.status, cut_thought.reward) == ("policy_failed", 0.0)
    assert str(cut_thought.failure).startswith(UNFINISHED_THOUGHT)
    assert cut_words.status == ("policy_failed" if rule == "floor" else "scored")
    sequences = train_sequences(config, Thinker(), 0, episodes, [-1, 1, 1])
    masks = [any(sequence.loss_mask) for sequence in sequences if sequence is not None]
    assert masks == ([False, False, True] if rule == "mask" else [True] * 3)


def test_the_bare_arm_follows_the_prompt_without_a_thought() -> None:
    prompt = thinking_prompt()
    [whole], cut = (
        pack_groups([prompt], [[(5,), (6,), (7,)]], most, num_sampled_P=[2]) for most in (100, 6)
    )
    assert [p for p, _ in whole.rows] == [prompt, prompt, prompt.plain]
    assert whole.num_tokens == 3 + 2 + 3, "both prompts are read"
    assert [m.num_tokens for m in cut] == [5, 3]
