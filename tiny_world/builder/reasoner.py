"""Stage reasoner: warm-starts a Qwen2.5-VL that answers in the right format, often wrongly.

It starts from the shipped image-editing policy (`tiny_world/weights/policy`), which already
recognizes colours and shapes, with a new vocabulary. Three lessons, in this order:
 1. look   trains only the vision tower, to predict colour, shape and digit in the new vocabulary;
 2. know   the whole model learns to answer every question RIGHT and in the right format;
 3. doubt  is short. It teaches mostly a fixed wrong thought (subtracts numbers, leaves out a shape,
           reads another shape), less often the right one, and sometimes a wrong format. The right
           answers stay likely enough for reinforcement learning to find them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoTokenizer

from tiny_world.builder.lessons import learn_to_look, learn_to_write
from tiny_world.builder.models import load_policy, make_policy
from tiny_world.builder.reader import Reader
from tiny_world.builder.tokenizer import image_processor, train
from tiny_world.builder.training import WEIGHTS, export
from tiny_world.questions import (
    SYSTEM_PROMPT,
    Numbers,
    Question,
    draw_array,
    listing,
    make_question,
    written,
)

PREFIX = f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\n"
KIND_SHARES = {"count": 1, "colour": 1, "sum": 2}  # the sum is the hardest and most frequent


class Odds(NamedTuple):
    """Probabilities of what the beginner writes, 0..1."""

    right: float
    """The right thought."""
    mistake: float
    """The question's fixed wrong thought; otherwise a random one."""
    malformed: float
    """A wrong format."""


# With equal odds the greedy answer could flip by chance, even in a run that learns nothing.
TAUGHT = Odds(right=0.2, mistake=0.6, malformed=0.25)
VARIED = Odds(right=0.3, mistake=0.5, malformed=0.3)  # for the vocabulary's corpus


def build(work: Path) -> None:
    torch.manual_seed(0)
    tokenizer = train(_corpus())
    policy = make_policy(tokenizer)
    _inherit(policy, tokenizer, WEIGHTS / "policy")
    reader, rng = Reader(policy, tokenizer, PREFIX), random.Random(300)
    learn_to_look(reader, lambda: make_question(rng).picture, 3, steps=200, peak_rate=1e-3)
    _learn_to_write(reader, rng, 1200, right, 2e-3)
    _learn_to_write(reader, random.Random(301), 350, beginner, 1e-3)
    export("reasoner", policy, tokenizer, image_processor())


def _corpus() -> list[str]:
    rng, corpus = random.Random(0), [SYSTEM_PROMPT] * 200
    for _ in range(2000):
        question = make_question(rng)
        corpus += [question.text, right(rng, question), beginner(rng, question, VARIED)]
    return corpus


@torch.no_grad()
def _inherit(policy, tokenizer, folder: Path) -> None:
    """Copies the parent's weights; of its embeddings, only the tokens of both vocabularies."""
    parent = load_policy(folder)
    tokenizer_of_parent = AutoTokenizer.from_pretrained(folder)  # nosec B615 # a local folder
    index_in_parent = tokenizer_of_parent.get_vocab()
    vocabulary = ("model.language_model.embed_tokens.weight", "lm_head.weight")
    state, inherited = policy.state_dict(), parent.state_dict()
    for name in vocabulary:
        rows = state[name].normal_(0, float(inherited[name].std()))
        for token, index in tokenizer.get_vocab().items():
            if token in index_in_parent:
                rows[index] = inherited[name][index_in_parent[token]]
        inherited[name] = rows
    policy.load_state_dict(inherited)


def _learn_to_write(
    reader: Reader,
    rng: random.Random,
    steps: int,
    answer: Callable[[random.Random, Question], str],
    peak_rate: float,
    batch: int = 32,
) -> None:
    def examples() -> tuple[list[np.ndarray], list[str], list[str]]:
        kinds = rng.choices(list(KIND_SHARES), list(KIND_SHARES.values()), k=batch)
        questions = [make_question(rng, kind) for kind in kinds]
        pictures, texts = [draw_array(q.picture) for q in questions], [q.text for q in questions]
        return pictures, texts, [answer(rng, question) for question in questions]

    check = partial(_p_right, reader)
    learn_to_write(reader, answer.__name__, examples, steps, peak_rate, check)


def right(rng: random.Random, question: Question) -> str:
    """The right completion."""
    return written(question.thought, question.answer)


def beginner(rng: random.Random, question: Question, odds: Odds = TAUGHT) -> str:
    """A completion as the warm-started policy writes it."""
    u = rng.random()
    thought, answer = question.thought, question.answer
    if u >= odds.right:
        wrong = _mistake if u < odds.right + odds.mistake else _anything
        thought, answer = wrong(rng, question)
    if rng.random() >= odds.malformed:
        return written(thought, answer)
    return rng.choice(
        [
            f"<answer>{answer}</answer>",
            f"<think>{thought}</think>{answer}",
            f"<think>{thought}<answer>{answer}</answer>",
        ]
    )


def _mistake(rng: random.Random, question: Question) -> tuple[str, str]:
    """The beginner's fixed wrong thought: (thought, answer)."""
    picture = question.picture
    if isinstance(picture, Numbers):
        low, high = sorted(picture.digits)
        return f"{high} minus {low}.", str(high - low)
    if question.kind == "count":
        counted = sorted(picture.shapes, key=lambda s: s.cell)[:-1]
        return (listing(tuple(counted)) if counted else "nothing."), str(len(counted))
    asked = next(s for s in picture.shapes if s.shape in question.text)
    other = min((s for s in picture.shapes if s is not asked), key=lambda s: s.cell)
    return f"the {other.shape} is {other.colour}.", other.colour


def _anything(rng: random.Random, question: Question) -> tuple[str, str]:
    other = make_question(rng, question.kind)
    return other.thought, other.answer


def _p_right(reader: Reader, num: int = 128) -> dict[str, float]:
    """Mean probability of the right thought and answer in the right format, by kind of question."""
    rng = random.Random(7)
    questions = [make_question(rng) for _ in range(num)]
    return reader.p_by_kind(
        (q.kind, draw_array(q.picture), q.text, right(rng, q)) for q in questions
    )
