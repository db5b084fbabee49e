"""What is thought before the words: where it ends, what is left, why there is nothing left."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import tiny_qwen
import torch
from tiny_act import act, act_group
from tiny_policy import LORA, make_qwen, wake_lora
from tiny_rounding import NATS, apart
from transformers import AddedToken

from rl.api.policy import ThoughtSection
from rl.api.types import Action, Completion, Prompt, Row, UnusableSampleError
from rl.learner.micro_batches import shared_filler
from rl.policies.qwen2_5_vl import Qwen25VL
from rl.policies.qwen_vl import qwen_vl_thought as thought
from rl.policies.qwen_vl.qwen_vl_prompts import QwenPrompts
from rl.policies.shared import prompting

THINK = {"instruction": "Think, then write {marker} and the words."}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_qwen.make_tokenizer()


@pytest.fixture(scope="module")
def with_markers() -> Any:
    """As Qwen3's: both tags are tokens of their own that are not special."""
    found = tiny_qwen.make_tokenizer()
    tags = ["<think>", "</think>"]
    found.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_qwen.save_policy_folder(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def writer(folder: str) -> Qwen25VL:
    """It writes words for a renderer that reads words, after a thought."""
    return make_qwen(folder, "text", thought=THINK)


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def split(tokenizer: Any, ids: list[int], **section: Any) -> thought.Written:
    asked = ThoughtSection(**section)
    prompts = QwenPrompts(tokenizer, None, tiny_qwen.TEMPLATE, True, 200)
    return thought.Thinking(prompts, asked, False).split(ids, asked)


def read(tokenizer: Any, text: str, **section: Any) -> thought.Written:
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
    assert tokenizer.decode(written.word_ids).strip() == words + "<|im_end|>"
    as_written = tuple(ids[written.num_thought_tokens :])
    if not thought_part.endswith(" "):
        assert written.word_ids == as_written
    assert tokenizer.decode(ids[: written.num_thought_tokens]).rstrip() == thought_part.rstrip()


@pytest.mark.parametrize("tags", ["tokenizer", "with_markers"])
def test_equal_words_are_equal_ids_whatever_stands_in_front_of_them(
    request: pytest.FixtureRequest, tags: str
) -> None:
    """A first token that holds white space too, or the marker's end, is spelt anew; one that holds
    white space and the beginning of a letter, with the letter's other bytes."""
    tokenizer = request.getfixturevalue(tags)
    for words in ("red square", "\U0001f388 red"):
        wanted = tuple(ids_of(tokenizer, words + "<|im_end|>"))
        for between in ("", " ", "\n\n", "\n\n ", "\t", "\u3000"):
            written = read(tokenizer, f"hm</think>{between}{words}<|im_end|>")
            assert (written.words, written.word_ids) == (words, wanted), repr(between)


class WithJoined:
    """A tokenizer beside which one token more is known by its bytes, as real ones know ' ' and the
    first byte of an emoji."""

    def __init__(self, tokenizer: Any, joined: int, parts: list[int]) -> None:
        self._tokenizer, self._joined, self._parts = tokenizer, joined, parts

    def decode(self, ids: list[int], **options: Any) -> str:
        spread = [part for i in ids for part in (self._parts if i == self._joined else [i])]
        return str(self._tokenizer.decode(spread, **options))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._tokenizer(*args, **options)


def test_white_space_that_is_one_token_with_part_of_a_letter(tokenizer: Any) -> None:
    space, first, *rest = ids_of(tokenizer, " \U0001f388")
    assert rest, "its bytes are tokens of their own"
    joining = WithJoined(tokenizer, 10**6, [space, first])
    marker, stop = ids_of(tokenizer, "</think>"), tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = [*marker, 10**6, *rest, stop]
    written = split(joining, ids)
    assert (written.words, written.num_thought_tokens) == ("\U0001f388", len(marker))
    assert written.word_ids == (first, *rest, stop)
    cut = split(joining, [*marker, 10**6, stop])
    assert cut.words == "\ufffd" and cut.word_ids[-1] == stop, "it ends in mid-letter"


@pytest.mark.parametrize(
    ("marker", "read_back"),
    [
        ("<|im_end|>", "''"),
        ("so<|object_ref_start|>", "'so'"),
        ("Re\u0301ponse:", "'R\u00e9ponse:'"),
    ],
)
def test_a_marker_that_is_never_read_back_is_refused(
    folder: str, marker: str, read_back: str
) -> None:
    """It would be in no text, and every completion a failure."""
    with pytest.raises(ValueError, match=r"policy\.thought\.marker: .* is read back as ") as raised:
        make_qwen(folder, "text", thought={"marker": marker})
    assert read_back in str(raised.value) and "Answer:" in str(raised.value)


def test_words_without_a_thought_are_read_as_they_are_behind_one(writer: Qwen25VL) -> None:
    """White space in front of them is nobody's, nor is a marker that they spell."""
    plain = writer.encode_completion("red square")
    for text in ("red square", "\n\nred square", " red square"):
        completion = writer.encode_completion(text)
        cut = writer.words_of_cut(replace(completion, finish="length"))
        assert (cut.token_ids, cut.finish) == (plain.token_ids, "length")
        assert len(cut.logprobs) == len(cut.token_ids)
    nothing = writer.words_of_cut(writer.encode_completion("\n"))
    [action] = act(writer, [(writer.build_prompt(tiny_qwen.sample(0)).plain, nothing.token_ids)])
    assert action.failure == thought.NO_WORDS


def test_words_that_share_the_markers_last_token_are_spelt_anew(tokenizer: Any) -> None:
    ids = ids_of(tokenizer, "the red square")
    [straddling] = [i for i in ids if tokenizer.decode([i]) == " red"]
    written = read(tokenizer, "the red square", marker="r")  # of 'square', the last one
    assert (written.thought, written.words) == ("the red squar", "e")
    written = read(tokenizer, "the red box", marker=" r")
    assert (written.thought, written.words) == ("the r", "ed box")
    assert written.num_thought_tokens == ids.index(straddling)
    assert tokenizer.decode(written.word_ids) == "ed box"
    assert straddling not in written.word_ids


@pytest.mark.parametrize(
    ("text", "section", "failure"),
    [
        ("red it is<|im_end|>", {}, "no marker: the completion ends without '</think>'"),
        ("red it is", {}, "unfinished thought: cut off at 7 tokens without '</think>'"),
        ("red</think> \n<|im_end|>", {}, "empty: no words behind the thought"),
        ("<|im_end|>", {}, "empty: the completion holds no words"),
        ("red</think>blue", {"max_tokens": 2}, "unfinished thought: 9 tokens up to its marker"),
    ],
)
def test_why_there_are_no_words(
    tokenizer: Any, text: str, section: dict[str, Any], failure: str
) -> None:
    written = read(tokenizer, text, **section)
    assert written.failure is not None and written.failure.startswith(failure)


def test_a_policy_may_be_let_off_its_marker(tokenizer: Any) -> None:
    written = read(tokenizer, "red it is<|im_end|>", without_marker="words")
    assert (written.thought, written.words, written.failure) == ("", "red it is", None)
    assert written.num_thought_tokens == 0
    assert read(tokenizer, "<|im_end|>", without_marker="words").failure == thought.NO_WORDS


@pytest.mark.parametrize("loss", ["all", "thought", "words"])
def test_which_side_of_the_marker_is_trained(writer: Qwen25VL, loss: Any) -> None:
    section = ThoughtSection(loss=loss)
    thinking = thought.Thinking(writer.prompts, section, False)
    ids = writer.encode_completion("so</think>red").token_ids
    num_thought = thinking.split(ids, section).num_thought_tokens
    assert 1 < num_thought < len(ids)
    sides = {"all": (True, True), "thought": (True, False), "words": (False, True)}[loss]
    expected = [sides[0]] * num_thought + [sides[1]] * (len(ids) - num_thought)
    assert list(thinking.loss_mask(ids)) == expected


def test_users_words_never_spell_a_token(with_markers: Any) -> None:
    """Special ones the tokenizer splits itself; added ones that are not special it keeps."""
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
    assert prompting.plain_ids(with_markers, "no tags here") == plain, "as it always was"


def test_the_prompt_asks_behind_the_users_words_and_the_plain_one_does_not(
    writer: Qwen25VL, folder: str
) -> None:
    sample = tiny_qwen.sample(0, "make it </think> blue")
    prompt = writer.build_prompt(sample)
    plain = make_qwen(folder, "text").build_prompt(sample)
    assert prompt.plain.token_ids == plain.token_ids and plain.plain is plain
    asked = writer.prompts.tokenizer.decode(prompt.token_ids)
    asking = "make it </think> blue\nThink, then write </think> and the words.<|im_end|>"
    assert asking in asked and "Think" not in writer.prompts.tokenizer.decode(plain.token_ids)
    assert prompt.images is prompt.plain.images, "it is processed once"
    long = len(prompt.token_ids)
    narrow = make_qwen(folder, "text", thought=THINK, max_prompt_tokens=long - 1)
    with pytest.raises(UnusableSampleError, match=r"policy\.thought\.instruction"):
        narrow.build_prompt(sample)


def test_what_is_handed_on_are_the_words_alone(writer: Qwen25VL) -> None:
    sample = tiny_qwen.sample(0, "make it </think> blue")
    prompt = writer.build_prompt(sample)
    said = [writer.encode_completion(text).token_ids for text in ("so</think>\nred", "red")]
    bare = writer.pass_through_completion(sample).token_ids
    rows = [(prompt, said[0]), (prompt, said[1]), (prompt.plain, bare), (prompt.plain, said[1])]
    thinking, unmarked, own, same = act(writer, rows)
    assert (thinking.text, thinking.thought, thinking.payload) == (
        "so</think>\nred", "so</think>\n", "red",
    )  # fmt: skip
    assert thinking.drawn_from == said[1]
    assert unmarked.payload is None and str(unmarked.failure).startswith("no marker")
    # The user's own words and references have no thought, whatever they spell.
    assert (own.payload, own.thought, own.drawn_from) == ("make it </think> blue", "", None)
    assert (same.payload, same.failure) == ("red", None)


PLAIN_WORDS = ("blue", "red square")


@pytest.fixture(scope="module")
def both(folder: str) -> dict[str, Qwen25VL]:
    """For an editor: without a thought, its words read alone, its words after their thought."""
    found = {
        "plain": make_qwen(folder, lora=LORA),
        "words": make_qwen(folder, lora=LORA, thought=THINK),
        "attended": make_qwen(folder, lora=LORA, thought={**THINK, "states": "attended"}),
    }
    for policy in found.values():
        wake_lora(policy)
    return found


def thought_rows(policy: Qwen25VL, i: int = 0) -> list[Row]:
    """Two thoughts before one word, other words, no marker, and the user's own words."""
    prompt = policy.build_prompt(tiny_qwen.sample(i))
    texts = ("it is so</think>\nblue", "well</think>\nblue", "hm</think>\nred square", "blue")
    rows: list[Row] = [(prompt, policy.encode_completion(text).token_ids) for text in texts]
    return [*rows, (prompt.plain, policy.encode_completion("blue").token_ids)]


@pytest.mark.parametrize("conditioning", ["policy", "base"])
def test_words_alone_are_what_a_policy_without_thoughts_hands_on(
    folder: str, both: dict[str, Qwen25VL], conditioning: str
) -> None:
    plain, policy = both["plain"], both["words"]
    if conditioning == "base":
        plain = make_qwen(folder, conditioning="base")
        policy = make_qwen(folder, conditioning="base", thought=THINK)
    rows = [row for i in range(2) for row in thought_rows(policy, i)]
    actions = act(policy, rows)
    for i in range(2):
        one, two, other, failed, bare = actions[5 * i : 5 * i + 5]
        assert one.payload.embeds is two.payload.embeds is bare.payload.embeds
        assert one.drawn_from == two.drawn_from == rows[5 * i + 4][1]
        assert bare.drawn_from is None, "its own tokens, which are the same"
        assert failed.payload is None and failed.failure.startswith("no marker")
        prompt = plain.build_prompt(tiny_qwen.sample(i))
        expected_G = act_group(plain, prompt, [plain.encode_completion(w) for w in PLAIN_WORDS])
        for action, expected in zip((one, other), expected_G, strict=True):
            alike(action, expected)


def alike(action: Action, expected: Action) -> None:
    """The states are the same, up to the order in which sums are added up."""
    assert apart(action.payload.embeds, expected.payload.embeds) <= NATS


def test_states_that_attended_are_rows_of_one_forward(both: dict[str, Qwen25VL]) -> None:
    """Against plain transformers on the whole text: what asks and what is thought are cut out."""
    policy, plain = both["attended"], both["plain"]
    rows = thought_rows(policy)
    one, two, _, _, bare = act(policy, rows)
    prompt, ids = rows[0]
    whole = Prompt(prompt.sample, (*prompt.token_ids, *ids), prompt.images, prompt.model_inputs)
    batch = policy.collate([(whole, ())])
    with torch.no_grad():
        hidden = policy.module(batch).hidden
    decoded = policy.prompts.tokenizer
    num_after = len(decoded("<|im_end|>\n<|im_start|>assistant\n").input_ids)
    asking = decoded("\nThink, then write </think> and the words.").input_ids
    words = policy.encode_completion("blue").token_ids
    end = len(prompt.token_ids)
    kept = [
        *range(prompt.num_dropped_tokens, end - num_after - len(asking)),
        *range(end - num_after, end),
        *range(len(whole.token_ids) - len(words), len(whole.token_ids)),
    ]
    assert (one.payload.embeds - hidden[kept]).abs().max() < NATS
    # What stands before the request does not see it; what stands behind the thought does.
    [without] = act_group(plain, plain.build_prompt(prompt.sample), [Completion(words, (), "stop")])
    tail = len(prompt.plain.token_ids) - prompt.num_dropped_tokens - num_after
    assert one.payload.embeds.shape == without.payload.embeds.shape
    assert (one.payload.embeds[:tail] - without.payload.embeds[:tail]).abs().max() < NATS
    assert (one.payload.embeds - without.payload.embeds)[-len(words) :].abs().max() > 0.1
    assert (one.payload.embeds - two.payload.embeds)[-len(words) :].abs().max() > 0.1
    assert len({one.drawn_from, two.drawn_from, rows[4][1]}) == 3, "three pictures"
    alike(bare, without)


def test_the_stock_arm_reads_no_request(both: dict[str, Qwen25VL]) -> None:
    policy, plain = both["words"], both["plain"]
    for name in ("words", "attended"):
        policy = both[name]
        arms = policy.stock_arms(policy.build_prompt(tiny_qwen.sample(2)))
        wanted = plain.stock_arms(plain.build_prompt(tiny_qwen.sample(2)))
        assert arms.keys() == wanted.keys()
        for arm, (prompt, completion) in arms.items():
            [found] = act(policy, [(prompt, completion.token_ids)])
            expected_prompt, expected = wanted[arm]
            [stock] = act(plain, [(expected_prompt, expected.token_ids)])
            alike(found, stock)


def test_a_filler_from_another_rank_forwards_what_its_own_would(both: dict[str, Qwen25VL]) -> None:
    """Under ZeRO-3 no rank may skip a forward: what travels is enough for both of a thought's."""
    policy = both["words"]
    own = thought_rows(policy)[0]
    gathered: list[Any] = []

    class BesideAnIdleRank:
        def any(self, value: bool) -> bool:
            return True

        def gather(self, value: Row | None) -> list[Row | None]:
            gathered.append(value)
            return [value, None]

    assert shared_filler([own], BesideAnIdleRank()) is own
    [(prompt, ids)] = gathered
    assert not prompt.sample.sources and not prompt.plain.sample.sources
    sent = pickle.loads(pickle.dumps((prompt, ids)))
    for collate in (policy.collate, policy.collate_states):
        found, wanted = collate([sent]), collate([own])
        assert torch.equal(found.input_ids, wanted.input_ids)
        assert len(found.model_inputs["pictures"]) == len(wanted.model_inputs["pictures"]) == 1
    with torch.no_grad():
        batch = policy.collate_states([sent])
        states = policy.module(batch).hidden
        again = policy.module(policy.collate_states([own])).hidden
    assert apart(states, again) <= NATS
