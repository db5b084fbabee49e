"""Equal words after different thoughts are one picture; who reads thoughts is asked about each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from PIL import Image
from tiny_rollout import Painter, collect, run_config, word

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
from rl.judge.background import BackgroundLoop
from rl.learner.micro_batches import pack_groups
from rl.rollout.graded_groups import train_sequences
from rl.rollout.stream import Rollout, RolloutContext, Sampled
from rl.run.episode_metrics import add_thought

MARKER = 26  # 'z'


class Thinker:
    """Reads ids as letters; what stands before 'z' was thought. Plain prompts have no thought."""

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


class Seen(Reward):
    """Looks at the picture alone."""

    reads_thoughts = False

    def __init__(self) -> None:
        self.num_asked = 0

    async def grade(self, reward_input: RewardInput) -> RewardOutput:
        self.num_asked += 1
        assert isinstance(reward_input.image, Image.Image)
        return RewardOutput(0.5)


class Brief(Reward):
    """The shorter the thought the better; it must see whose it is."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, str]] = []

    async def grade(self, given: RewardInput) -> RewardOutput:
        self.seen.append((given.text, given.thought, given.words))
        return RewardOutput(1 / (1 + len(given.thought)))


@pytest.fixture
def context() -> Iterator[RolloutContext]:
    rewards = {"seen": Seen(), "brief": Brief()}
    with BackgroundLoop() as loop:
        yield RolloutContext(run_config(), Thinker(), Painter(), rewards, True, loop)


def asked() -> Prompt:
    plain = Prompt(Sample("s", "do it"), (1, 2))
    return Prompt(plain.sample, (1, 3, 2), without_thought=plain)


def sampled(completions: list[Completion], bare: Completion | None = None) -> Sampled:
    return Sampled([asked()], [completions], [51], ["0/0"], [bare])


def roll(context: RolloutContext) -> Rollout:
    """Two thoughts before the same words, other words, a thought without an end; the bare arm."""
    words = [word("azc"), word("abzc"), word("azd"), word("abc")]
    return collect(context, sampled(words, word("c")))


def test_equal_words_are_drawn_once_and_read_with_each_thought(context: RolloutContext) -> None:
    rollout = roll(context)
    one, two, other, failed = rollout.episodes[0]
    [bare] = rollout.bare_episodes
    assert [job.payload for job in context.renderer.jobs] == ["c", "d"]
    assert one.image is two.image is bare.image and one.image is not other.image
    assert context.rewards["seen"].num_asked == 2, "who sees pictures alone is asked once of each"
    assert sorted(context.rewards["brief"].seen) == [
        ("abzc", "abz", "c"), ("azc", "az", "c"), ("azd", "az", "d"), ("c", "", "c"),
    ]  # fmt: skip
    assert [e.parts["brief"] for e in (one, two, other, bare)] == [1 / 3, 1 / 4, 1 / 3, 1]
    assert (failed.status, failed.failure) == ("policy_failed", "unfinished thought: cut off")
    assert bare.action.thought == "" and bare.status == "scored", "no marker = all words"


@pytest.mark.parametrize("reads", [False, True])
def test_a_reward_that_compares_is_shown_equal_words_once_unless_it_reads_thoughts(
    context: RolloutContext, reads: bool
) -> None:
    class Ranked(Reward):
        """The later the better."""

        reads_thoughts = reads

        def score_group(self, inputs_G: Sequence[RewardInput]) -> list[float]:
            shown.append([(given.thought, given.words) for given in inputs_G])
            return [number / len(inputs_G) for number in range(len(inputs_G))]

    shown: list[list[tuple[str, str]]] = []
    rewards = {"ranked": Ranked(None, None), "brief": Brief()}
    rollout = roll(replace(context, rewards=rewards))
    [group] = shown
    found = [e.parts["ranked"] for e in (*rollout.episodes[0][:3], *rollout.bare_episodes)]
    if reads:
        assert group == [("az", "c"), ("abz", "c"), ("az", "d"), ("", "c")]
        assert found == [0, 1 / 4, 2 / 4, 3 / 4]
    else:
        assert [words for _, words in group] == ["c", "d"]
        assert found == [0, 0, 1 / 2, 0]


def test_how_long_it_thought_and_how_often_to_no_end(context: RolloutContext) -> None:
    metrics = Metrics()
    for episode in roll(context).episodes[0]:
        add_thought(metrics, "eval/", episode)
    found = metrics.merge([metrics.state()])
    assert found == {
        "eval/thought/tokens_mean": (2 + 3 + 2 + 3) / 4,
        "eval/thought/tokens_max": 3,
        "eval/thought/unfinished": 0.25,
        "eval/thought/no_marker": 0,
    }


@pytest.mark.parametrize("rule", ["floor", "score", "mask"])
def test_a_thought_that_is_cut_off_is_a_failure_under_every_rule(
    context: RolloutContext, rule: str
) -> None:
    """Under 'mask' it carries no loss; words that are cut go by the rule, as ever."""
    config = run_config(algorithm={"truncated_completions": rule})
    cut = [word("ab", finish="length"), word("azc", finish="length"), word("azd")]
    thought, words, whole = collect(replace(context, config=config), sampled(cut)).episodes[0]
    assert (thought.status, thought.reward) == ("policy_failed", 0.0)
    assert str(thought.failure).startswith(UNFINISHED_THOUGHT)
    assert words.status == ("policy_failed" if rule == "floor" else "scored")
    sequences = train_sequences(config, Thinker(), 0, [thought, words, whole], [-1, 1, 1])
    masks = [any(sequence.loss_mask) for sequence in sequences if sequence is not None]
    assert masks == ([False, False, True] if rule == "mask" else [True] * 3)


def test_the_bare_arm_stands_behind_the_plain_prompt() -> None:
    prompt = asked()
    [whole] = pack_groups([prompt], [[(5,), (6,), (7,)]], 100, num_sampled_P=[2])
    assert [p for p, _ in whole.rows] == [prompt, prompt, prompt.plain]
    assert whole.num_tokens == 3 + 2 + 3, "both prompts are read"
    cut = pack_groups([prompt], [[(5,), (6,), (7,)]], 6, num_sampled_P=[2])
    assert [m.num_tokens for m in cut] == [5, 3]
