"""Emu3 prompts and completions as token ids, its tokenizers, and the config checks."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_emu3
import tiny_policy

from rl.api.image_grammar import forced_tokens
from rl.api.types import Sample
from rl.policies import emu3
from rl.policies.emu3 import Emu3Prompts, find_vocabulary

EOL, EOF, BOS, EOS = "<|extra_200|>", "<|extra_201|>", "<|extra_203|>", "<|extra_204|>"
IMAGE, START, END = "<|image token|>", "<|image start|>", "<|image end|>"
CODES = np.array([[5, 0, 63], [1, 2, 3]], dtype=np.int32)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_emu3.make_tokenizer()


def make(tokenizer, prefill="", max_prompt_tokens=2048) -> Emu3Prompts:
    return Emu3Prompts(tokenizer, prefill, max_prompt_tokens)


def visual(code: int) -> str:
    return f"<|visual token {code:06d}|>"


def tokens_of(tokenizer, ids) -> list[str]:
    return tokenizer.convert_ids_to_tokens(list(ids))


PICTURE = [
    *[START, "2", "*", "3", IMAGE],
    *[visual(5), visual(0), visual(63), EOL],
    *[visual(1), visual(2), visual(3), EOL],
    *[EOF, END],
]
"""The tokens of `CODES`."""


# Prompts


def test_the_tokens_of_a_prompt(tokenizer):
    """The prompt is BOS, the picture, the instruction and the prefill."""
    prompt = make(tokenizer, prefill=START).prompt(Sample("s", "blue sky", source_codes=CODES))
    words = tokenizer("blue sky", add_special_tokens=False).input_ids
    expected = [BOS, *PICTURE, *tokens_of(tokenizer, words), START]
    assert tokens_of(tokenizer, prompt.token_ids) == expected
    assert prompt.images == ()
    assert prompt.grid == (2, 3)


def test_a_picture_of_32_by_32_codes_is_1065_tokens(tokenizer):
    """1 + 5 + 1 + 32 rows of 33 + 2."""
    prompts = make(tokenizer)
    assert len(prompts.picture_ids(tiny_emu3.codes(0, 32, 32))) == 1 + 5 + 1 + 32 * 33 + 2 == 1065
    assert len(prompts.prompt(tiny_emu3.sample(0, "a", 32, 32)).token_ids) == 1 + 1065 + 1


def test_the_prefill_may_contain_the_size_of_the_source(tokenizer):
    prompt = make(tokenizer, prefill=START + "{height}*{width}").prompt(
        Sample("s", "blue", source_codes=CODES)
    )
    assert tokens_of(tokenizer, prompt.token_ids[-4:]) == [START, "2", "*", "3"]


@pytest.mark.parametrize("instruction", [f"say {END}{IMAGE}", f"{visual(3)} please", f"stop {EOS}"])
def test_users_cannot_write_special_tokens(tokenizer, instruction):
    prompts = make(tokenizer, prefill=START)
    expected = prompts.prompt(Sample("s", "blue", source_codes=CODES)).token_ids
    ids = prompts.prompt(Sample("s", instruction, source_codes=CODES)).token_ids
    specials = set(tokenizer.added_tokens_decoder)
    assert [i for i in ids if i in specials] == [i for i in expected if i in specials]
    assert instruction in tokenizer.decode(ids)


def test_an_unusable_sample_is_named_in_the_error(tokenizer):
    prompts = make(tokenizer, max_prompt_tokens=20)
    with pytest.raises(ValueError, match=r"'lost' has no source_codes.*rl prepare"):
        prompts.prompt(Sample("lost", "blue"))
    with pytest.raises(ValueError, match=r"'bad'.* from 0 to 63.*shape \(1, 1\), codes 64\.\.64"):
        prompts.prompt(Sample("bad", "blue", source_codes=np.array([[64]])))
    with pytest.raises(ValueError, match=r"'long' has 3\d tokens \(3\d of them for pictures\)"):
        prompts.prompt(Sample("long", "a", source_codes=np.ones((4, 5))))


# Completions


@pytest.mark.parametrize(
    ("prefill", "num_in_prefill"),
    [("", 0), (tiny_emu3.THINK, 0), (START, 1), (START + "{height}*{width}", 4)],
)
def test_a_picture_completion_continues_the_prefill(tokenizer, prefill, num_in_prefill):
    prompts = make(tokenizer, prefill=prefill)
    ids = prompts.picture_completion(CODES)
    assert tokens_of(tokenizer, ids) == [*PICTURE[num_in_prefill:], EOS]
    thought = prompts.picture_completion(CODES, thought=" hm")
    assert thought[-len(ids) :] == ids and tokenizer.decode(thought[: -len(ids)]) == " hm"


def test_a_picture_completion_follows_the_grammar(tokenizer):
    """Only the ends of the two rows, the frame, the picture and the sequence are forced."""
    prompts = make(tokenizer)
    ids = prompts.picture_completion(CODES)
    forced = forced_tokens(ids, (2, 3), prompts.vocabulary)
    assert [t for t, f in zip(tokens_of(tokenizer, ids), forced, strict=True) if f] == [
        *[EOL, EOL, EOF, END, EOS]
    ]


def read(tokenizer, text: str):
    prompts = make(tokenizer, prefill=START)
    prompt = prompts.prompt(Sample("s", "blue", source_codes=CODES))
    ids = tuple(tokenizer(text, add_special_tokens=False).input_ids)
    return prompts.action(prompt, ids)


ROW = visual(1) + visual(2) + visual(3)


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("", "empty"),
        (EOS, "empty"),
        ("only words" + EOS, "no image token"),
        (
            IMAGE + ROW + EOL + visual(1) + visual(2) + EOL + EOF + END + EOS,
            "grid: not 2 rows of 3",
        ),
        (IMAGE + (ROW + visual(1) + EOL) * 2 + EOF + END + EOS, "grid: "),
        (IMAGE + ROW + "blue" + EOL + ROW + EOL + EOF + END, "grid: "),
        (IMAGE, "cut off: the completion ends in row 1 of 2"),
        (IMAGE + ROW + EOL + visual(1), "cut off: the completion ends in row 2 of 2"),
    ],
)
def test_a_completion_without_a_valid_picture_fails_with_the_reason(tokenizer, text, failure):
    action = read(tokenizer, text)
    assert action.payload is None
    assert action.failure.startswith(failure), action.failure


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("".join([*PICTURE[1:], EOS]), "[image 2x3]"),
        ("".join([" a sky of 2*3 ", *PICTURE, " done", EOS]), "a sky of 2*3 [image 2x3] done"),
        *(
            ("".join(PICTURE[:12]) + tail, "[image 2x3]")
            for tail in ("", EOL, EOL + EOF, EOL + EOF + END)
        ),
    ],
)
def test_codes_are_read_from_a_completion(tokenizer, text, words):
    """Words around a picture are kept; one that is cut off after its last code is complete."""
    action = read(tokenizer, text)
    assert action.failure is None and action.text == words
    assert action.payload.dtype == np.int32 and np.array_equal(action.payload, CODES)


# Tokenizers


def config_of(folder: str, **section) -> emu3.Config:
    return emu3.Config(type="emu3", model_path=folder, **section)


def test_a_published_folder_is_read_without_its_code(tmp_path: Path, tokenizer):
    """The tiktoken file and the list of vision tokens give the ids of `tokenizer.json`."""
    read_back = emu3.load_tokenizer(config_of(tiny_emu3.save_published_folder(tmp_path)))
    assert read_back.get_vocab() == tokenizer.get_vocab()
    texts = [
        "make the  sky\n\nblue 2024*7",
        "e\u0301t\u00e9 \u4e2d\u6587 \U0001f600",
        tiny_emu3.THINK + START,
    ]
    for text in texts:
        ids = read_back(text, add_special_tokens=False).input_ids
        assert ids == tokenizer(text, add_special_tokens=False).input_ids
    read_back.save_pretrained(tmp_path / "saved")
    again = emu3.load_tokenizer(config_of(str(tmp_path / "saved")))
    assert again(texts[2]).input_ids == read_back(texts[2]).input_ids


def test_other_tokenizers_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"tokenizer.json nor emu3.tiktoken"):
        emu3.load_tokenizer(config_of(str(tmp_path)))
    lacking = tiny_emu3.make_bpe()
    with pytest.raises(ValueError, match=r"it lacks <\|extra_203\|>, .*visual token 000000"):
        find_vocabulary(lacking)


@pytest.mark.parametrize("extra", ["<|tail|>", visual(99)])
def test_visual_tokens_must_end_the_vocabulary_without_gaps(extra):
    tokenizer = tiny_emu3.make_tokenizer()
    tokenizer.add_tokens([extra], special_tokens=True)
    with pytest.raises(ValueError, match=r"id 592 should be '<\|visual token 000064\|>'"):
        find_vocabulary(tokenizer)


# The section


def problems(tmp_path: Path, **section) -> list[str]:
    run = SimpleNamespace(run_dir=tmp_path / "run")
    return list(emu3.Emu3.problems(config_of(str(tmp_path), **section), run))


def test_contradictory_config_keys_are_problems(tmp_path: Path):
    assert problems(tmp_path) == []
    assert "image token" in problems(tmp_path, assistant_prefill=START + IMAGE)[0]
    assert "lora: null" in problems(tmp_path, adapter_path=str(tmp_path))[0]


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_rope_scaling_of_a_published_config_is_kept(tmp_path, key):
    folder = Path(tiny_emu3.save_published_folder(tmp_path))
    published = json.loads((folder / "config.json").read_text())
    scaled = {**published, "rope_theta": 5e5, "rope_scaling": {key: "linear", "factor": 2.0}}
    (folder / "config.json").write_text(json.dumps(scaled))
    config = emu3.read_model_config(folder)
    expected = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    assert expected.items() <= config.rope_parameters.items() and config.attention_dropout == 0


def test_a_sample_whose_picture_exceeds_the_completion_is_refused():
    """7 rows of 7 codes take 1 + 3 ('7*7') + 1 + 7 x 8 + 2 + 1 (stop) tokens; the first is in the
    prefill, so 63 of 64 are used and an eighth row does not fit."""
    policy = tiny_policy.make("emu3")
    assert policy.build_prompt(tiny_emu3.sample(0, height=7, width=7)).grid == (7, 7)
    with pytest.raises(ValueError, match=r"8 x 7 codes.* 71 tokens.*max_completion_tokens = 64"):
        policy.build_prompt(tiny_emu3.sample(0, height=8, width=7))
