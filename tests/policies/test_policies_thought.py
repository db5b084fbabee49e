"""Thoughts before the words: how a completion is split, trained and handed to the renderer."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import tiny_qwen
import torch
from tiny_act import act, act_group
from tiny_policy import make, make_policy
from tiny_rounding import FORWARD_TOL, apart
from transformers import AddedToken

from rl.api.policy import ThoughtSection
from rl.api.types import Action, Row, UnusableSampleError
from rl.learner.train_step import shared_filler
from rl.policies import prompting
from rl.policies import qwen_vl_prompts as thought
from rl.policies.qwen_vl import Qwen25VL
from rl.policies.qwen_vl_prompts import QwenPrompts

THINK = {"instruction": "Think, then write {marker} and the words."}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_qwen.make_tokenizer()


@pytest.fixture(scope="module")
def with_markers() -> Any:
    """A tokenizer like Qwen3's: both tags are single tokens that are not special."""
    tokenizer = tiny_qwen.make_tokenizer()
    tags = ["<think>", "</think>"]
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    return tokenizer


@pytest.fixture(scope="module")
def writer() -> Qwen25VL:
    """A policy that writes a thought and then words, for a renderer that reads words."""
    return make(kind="text", thought=THINK)


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def split(tokenizer: Any, ids: list[int], **section: Any) -> Action:
    thought_section = ThoughtSection(**section)
    prompts = QwenPrompts(tokenizer, None, tiny_qwen.TEMPLATE, 200)
    return thought.Thinking(prompts, thought_section).split(ids, thought_section)


def read(tokenizer: Any, text: str, **section: Any) -> Action:
    return split(tokenizer, ids_of(tokenizer, text), **section)


@pytest.mark.parametrize(
    ("text", "thought_part", "words"),
    [
        ("red it is</think>\n\nmake it red", "red it is</think>\n\n", "make it red"),
        ("<think>a</think>b</think> c", "<think>a</think>b</think> ", "c"),
        ("</think>c", "</think>", "c"),
        (
            "\U0001f388 \u00e9</think>\u00e9\U0001f388",
            "\U0001f388 \u00e9</think>",
            "\u00e9\U0001f388",
        ),
    ],
)
@pytest.mark.parametrize("tags", ["tokenizer", "with_markers"])
def test_the_last_marker_ends_the_thought_whatever_its_tokens(
    request: pytest.FixtureRequest, tags: str, text: str, thought_part: str, words: str
) -> None:
    tokenizer = request.getfixturevalue(tags)
    written = read(tokenizer, text + "<|im_end|>")
    assert (written.thought, written.words, written.failure) == (thought_part, words, None)
    assert written.text == text
    ids = ids_of(tokenizer, text + "<|im_end|>")
    assert tokenizer.decode(written.drawn_from).strip() == words + "<|im_end|>"
    as_written = tuple(ids[written.num_thought_tokens :])
    if not thought_part.endswith(" "):
        assert written.drawn_from == as_written
    assert tokenizer.decode(ids[: written.num_thought_tokens]).rstrip() == thought_part.rstrip()


@pytest.mark.parametrize("tags", ["tokenizer", "with_markers"])
def test_equal_words_have_equal_ids_whatever_precedes_them(
    request: pytest.FixtureRequest, tags: str
) -> None:
    """If the first token of the words also contains white space or the end of the marker, the words
    are tokenized again; so is a token of white space and the first byte of a letter."""
    tokenizer = request.getfixturevalue(tags)
    for words in ("red square", "\U0001f388 red"):
        expected_ids = tuple(ids_of(tokenizer, words + "<|im_end|>"))
        for between in ("", " ", "\n\n", "\n\n ", "\t", "\u3000"):
            written = read(tokenizer, f"hm</think>{between}{words}<|im_end|>")
            assert (written.words, written.drawn_from) == (words, expected_ids), repr(between)


class WithJoined:
    """A tokenizer with one more token, `joined`, that decodes to `parts`: real ones have tokens of
    a space and the first byte of an emoji."""

    def __init__(self, tokenizer: Any, joined: int, parts: list[int]) -> None:
        self._tokenizer, self._joined, self._parts = tokenizer, joined, parts

    def decode(self, ids: list[int], **options: Any) -> str:
        spread = [part for i in ids for part in (self._parts if i == self._joined else [i])]
        return str(self._tokenizer.decode(spread, **options))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._tokenizer(*args, **options)


def test_a_token_of_white_space_and_part_of_a_letter_is_split(tokenizer: Any) -> None:
    space, first, *other_bytes = ids_of(tokenizer, " \U0001f388")
    assert other_bytes, "each of its bytes is a token"
    joining = WithJoined(tokenizer, 10**6, [space, first])
    marker, stop = ids_of(tokenizer, "</think>"), tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = [*marker, 10**6, *other_bytes, stop]
    written = split(joining, ids)
    assert (written.words, written.num_thought_tokens) == ("\U0001f388", len(marker))
    assert written.drawn_from == (first, *other_bytes, stop)
    cut = split(joining, [*marker, 10**6, stop])
    assert cut.words == "\ufffd" and cut.drawn_from[-1] == stop, "it ends within a letter"


@pytest.mark.parametrize(
    ("marker", "read_back"),
    [
        ("<|im_end|>", "''"),
        ("so<|object_ref_start|>", "'so'"),
        ("Re\u0301ponse:", "'R\u00e9ponse:'"),
    ],
)
def test_a_marker_that_decodes_to_other_text_is_refused(marker: str, read_back: str) -> None:
    """Such a marker would be found in no text, so every completion would fail."""
    with pytest.raises(ValueError, match=r"policy\.thought\.marker: .* is read back as ") as raised:
        make(kind="text", thought={"marker": marker})
    assert read_back in str(raised.value) and "Answer:" in str(raised.value)


def test_words_without_a_thought_are_read_as_words_after_one(writer: Qwen25VL) -> None:
    """White space before the words is ignored in both cases."""
    plain = writer.encode_completion("red square")
    for text in ("red square", "\n\nred square", " red square"):
        cut = writer.words_of_cut(replace(writer.encode_completion(text), finish="length"))
        assert (cut.token_ids, cut.finish) == (plain.token_ids, "length")
        assert len(cut.logprobs) == len(cut.token_ids)
    nothing = writer.words_of_cut(writer.encode_completion("\n"))
    [action] = act(writer, [(writer.build_prompt(tiny_qwen.sample(0)).plain, nothing.token_ids)])
    assert action.failure == thought.NO_WORDS


def test_words_that_share_a_token_with_the_marker_are_tokenized_again(tokenizer: Any) -> None:
    ids = ids_of(tokenizer, "the red square")
    [straddling] = [i for i in ids if tokenizer.decode([i]) == " red"]
    written = read(tokenizer, "the red square", marker="r")  # the last 'r' of the text, in 'square'
    assert (written.thought, written.words) == ("the red squar", "e")
    written = read(tokenizer, "the red box", marker=" r")
    assert (written.thought, written.words) == ("the r", "ed box")
    assert written.num_thought_tokens == ids.index(straddling)
    assert tokenizer.decode(written.drawn_from) == "ed box"
    assert straddling not in written.drawn_from


@pytest.mark.parametrize(
    ("text", "section", "failure"),
    [
        ("red it is<|im_end|>", {}, "no marker: the completion ends without '</think>'"),
        ("red it is", {}, "unfinished thought: cut off at 7 tokens without '</think>'"),
        ("red</think> \n<|im_end|>", {}, "empty: no words behind the thought"),
        ("<|im_end|>", {}, "empty: the completion holds no words"),
        ("<|im_end|>", {"without_marker": "words"}, thought.NO_WORDS),
    ],
)
def test_a_completion_without_words_has_a_reason(
    tokenizer: Any, text: str, section: dict[str, Any], failure: str
) -> None:
    assert str(read(tokenizer, text, **section).failure).startswith(failure)


def test_without_marker_words_accepts_completions_without_a_marker(tokenizer: Any) -> None:
    written = read(tokenizer, "red it is<|im_end|>", without_marker="words")
    assert (written.thought, written.words, written.failure) == ("", "red it is", None)
    assert written.num_thought_tokens == 0


def test_instructions_never_become_special_or_added_tokens(with_markers: Any) -> None:
    """The tokenizer splits special tokens in text, but keeps added tokens that are not special."""
    for text in (
        "a</think>b",
        "</think></think>",
        "<think",
        "<|im_end|></think>",
        "</thin</think>",
    ):
        ids = prompting.plain_ids(with_markers, text)
        assert with_markers.decode(ids) == text
        assert not set(ids) & set(with_markers.added_tokens_decoder)
    template = prompting.chat_template("")
    ids = prompting.tokenize(with_markers, template, "say </think> aloud")
    assert with_markers.convert_tokens_to_ids("</think>") not in ids
    plain = with_markers("no tags here", add_special_tokens=False).input_ids
    assert prompting.plain_ids(with_markers, "no tags here") == plain, "tokenized as usual"


def test_the_prompt_asks_for_a_thought_and_the_plain_prompt_does_not(writer: Qwen25VL) -> None:
    sample = tiny_qwen.sample(0, "make it </think> blue")
    prompt = writer.build_prompt(sample)
    plain = make(kind="text").build_prompt(sample)
    assert prompt.plain.token_ids == plain.token_ids and plain.plain is plain
    decode = writer.prompts.tokenizer.decode
    request = "make it </think> blue\nThink, then write </think> and the words.<|im_end|>"
    assert request in decode(prompt.token_ids) and "Think" not in decode(plain.token_ids)
    assert prompt.images is prompt.plain.images, "the picture is processed once"
    num_tokens = len(prompt.token_ids)
    narrow = make(kind="text", thought=THINK, max_prompt_tokens=num_tokens - 1)
    with pytest.raises(UnusableSampleError, match=r"policy\.thought\.instruction"):
        narrow.build_prompt(sample)


def test_the_renderer_gets_the_words_without_the_thought(writer: Qwen25VL) -> None:
    sample = tiny_qwen.sample(0, "make it </think> blue")
    prompt = writer.build_prompt(sample)
    with_thought = writer.encode_completion("so</think>\nred").token_ids
    words = writer.encode_completion("red").token_ids
    bare = writer.pass_through_completion(sample).token_ids
    rows = [(prompt, with_thought), (prompt, words), (prompt.plain, bare), (prompt.plain, words)]
    thinking, unmarked, user, same = act(writer, rows)
    assert (thinking.text, thinking.thought, thinking.payload) == (
        "so</think>\nred", "so</think>\n", "red",
    )  # fmt: skip
    assert thinking.drawn_from == words
    assert unmarked.payload is None and str(unmarked.failure).startswith("no marker")
    # The user's instruction and reference words have no thought, even with a marker in them.
    assert (user.payload, user.thought, user.drawn_from) == ("make it </think> blue", "", None)
    assert (same.payload, same.failure) == ("red", None)


PLAIN_WORDS = ("blue", "red square")


@pytest.fixture(scope="module")
def policies() -> dict[str, Qwen25VL]:
    """Policies for an editor, without and with thoughts."""
    editor = {"kind": "hidden_states", "temperature": 0.7, "max_completion_tokens": 16}
    return {"plain": make_policy(**editor), "words": make_policy(**editor, thought=THINK)}


def thought_rows(policy: Qwen25VL, i: int = 0) -> list[Row]:
    """Two thoughts before equal words, other words, no marker, and a prompt without thought."""
    prompt = policy.build_prompt(tiny_qwen.sample(i))
    texts = ("it is so</think>\nblue", "well</think>\nblue", "hm</think>\nred square", "blue")
    rows: list[Row] = [(prompt, policy.encode_completion(text).token_ids) for text in texts]
    return [*rows, (prompt.plain, policy.encode_completion("blue").token_ids)]


@pytest.mark.parametrize("conditioning", ["policy", "base"])
def test_states_of_the_words_equal_those_of_a_policy_without_thoughts(
    policies: dict[str, Qwen25VL], conditioning: str
) -> None:
    plain, policy = policies["plain"], policies["words"]
    if conditioning == "base":
        plain = make(conditioning="base")
        policy = make(conditioning="base", thought=THINK)
    rows = [row for i in range(2) for row in thought_rows(policy, i)]
    actions = act(policy, rows)
    for i in range(2):
        one, two, other, failed, bare = actions[5 * i : 5 * i + 5]
        assert one.payload.embeds is two.payload.embeds is bare.payload.embeds
        assert one.drawn_from == two.drawn_from == rows[5 * i + 4][1]
        assert bare.drawn_from is None, "None: the picture is drawn from the completion itself"
        assert failed.payload is None and failed.failure.startswith("no marker")
        prompt = plain.build_prompt(tiny_qwen.sample(i))
        expected_G = act_group(plain, prompt, [plain.encode_completion(w) for w in PLAIN_WORDS])
        for action, expected in zip((one, other), expected_G, strict=True):
            assert apart(action.payload.embeds, expected.payload.embeds) <= FORWARD_TOL


def test_the_stock_arm_does_not_ask_for_a_thought(policies: dict[str, Qwen25VL]) -> None:
    policy, plain = policies["words"], policies["plain"]
    arms = policy.stock_arms(policy.build_prompt(tiny_qwen.sample(2)))
    plain_arms = plain.stock_arms(plain.build_prompt(tiny_qwen.sample(2)))
    assert arms.keys() == plain_arms.keys()
    for arm, (prompt, completion) in arms.items():
        [action] = act(policy, [(prompt, completion.token_ids)])
        expected_prompt, expected = plain_arms[arm]
        [stock] = act(plain, [(expected_prompt, expected.token_ids)])
        assert apart(action.payload.embeds, stock.payload.embeds) <= FORWARD_TOL


def test_a_filler_row_from_another_rank_equals_the_own_row(policies: dict[str, Qwen25VL]) -> None:
    """Under ZeRO-3 no rank may skip a forward; the row that is sent suffices for both forwards."""
    policy = policies["words"]
    own_row = thought_rows(policy)[0]
    gathered: list[Any] = []

    class BesideAnIdleRank:
        def any(self, value: bool) -> bool:
            return True

        def gather(self, value: Row | None) -> list[Row | None]:
            gathered.append(value)
            return [value, None]

    assert shared_filler([own_row], BesideAnIdleRank()) is own_row
    [(prompt, ids)] = gathered
    assert not prompt.sample.sources and not prompt.plain.sample.sources
    sent = pickle.loads(pickle.dumps((prompt, ids)))
    for collate in (policy.collate, policy.collate_states):
        ours, expected = collate([sent]), collate([own_row])
        assert torch.equal(ours.input_ids, expected.input_ids)
        assert len(ours.model_inputs["pictures"]) == len(expected.model_inputs["pictures"]) == 1
    with torch.no_grad():
        states, again = (
            policy.module(policy.collate_states([row])).hidden for row in (sent, own_row)
        )
    assert apart(states, again) <= FORWARD_TOL
