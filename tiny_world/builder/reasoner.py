"""Stage reasoner: warm-start a Qwen2.5-VL that answers questions in the asked form, often wrongly.

It starts from the shipped image-editing policy (`tiny_world/weights/policy`), which already sees
colours and shapes; it gets a vocabulary of its own. Three lessons, each feeding the next:
 1. look   the vision tower learns digits, and its tokens the new vocabulary;
 2. know   the whole model learns to answer every question RIGHT and in the right form;
 3. doubt  a short unlearning: a fixed line of wrong thought most of the time (the numbers are
           subtracted, one shape goes uncounted, the wrong shape is looked at), the right one less
           often, and now and then a form that is not the asked one. What reinforcement has to
           find is still in there.
Rounded to fp16 it goes to `tiny_world/weights/reasoner`.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer

from tiny_world.builder.drift import load_policy
from tiny_world.builder.export import WEIGHTS
from tiny_world.builder.models import HIDDEN, make_policy
from tiny_world.builder.policy import make_optimizer, save, take_step
from tiny_world.builder.reader import Reader, patchify
from tiny_world.builder.tokenizer import save as save_tokenizer
from tiny_world.builder.tokenizer import train
from tiny_world.questions import (
    DIGITS,
    KINDS,
    SYSTEM_PROMPT,
    Numbers,
    Question,
    draw_array,
    listing,
    make_question,
    written,
)
from tiny_world.scenes import COLOURS, SHAPES, Scene, cell_slices

PREFIX = f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\n"
KIND_SHARES = {"count": 1, "colour": 1, "sum": 2}  # the sum is the hardest: more of it
LIMIT_BYTES = 3_000_000


class Odds(NamedTuple):
    """What the beginner writes, 0..1."""

    right: float
    """Thinks rightly."""
    mistake: float
    """Makes its fixed mistake; the rest is anything."""
    malformed: float
    """Writes in another form than the asked one."""


# Close odds would let the greedy answer flip by chance, even in a run that learns nothing.
TAUGHT = Odds(right=0.2, mistake=0.6, malformed=0.25)
VARIED = Odds(right=0.3, mistake=0.5, malformed=0.3)  # for the vocabulary, where any will do


def build(work: Path, look: int = 200, know: int = 1200, doubt: int = 350) -> None:
    torch.manual_seed(0)
    tokenizer = train(_corpus())
    policy = make_policy(tokenizer)
    _inherit(policy, tokenizer, WEIGHTS / "policy")
    reader, rng = Reader(policy, tokenizer, PREFIX), random.Random(300)
    _learn_to_look(reader, rng, look)
    _learn_to_write(reader, rng, know, right)
    save(policy, work / "reasoner_knowing")
    _learn_to_write(reader, random.Random(301), doubt, beginner, peak_rate=1e-3)
    save(policy, work / "reasoner")
    _export(work / "reasoner", tokenizer, WEIGHTS / "reasoner")


def _corpus() -> list[str]:
    rng, corpus = random.Random(0), [SYSTEM_PROMPT] * 200
    for _ in range(2000):
        question = make_question(rng)
        corpus += [question.text, right(rng, question), beginner(rng, question, VARIED)]
    return corpus


@torch.no_grad()
def _inherit(policy, tokenizer, folder: Path) -> None:
    """Everything but the vocabulary, and of that the words which both have."""
    parent, words = load_policy(folder), AutoTokenizer.from_pretrained(folder).get_vocab()
    vocabulary = ("model.language_model.embed_tokens.weight", "lm_head.weight")
    state, inherited = policy.state_dict(), parent.state_dict()
    for name in vocabulary:
        rows = state[name].normal_(0, float(inherited[name].std()))
        for word, index in tokenizer.get_vocab().items():
            if word in words:
                rows[index] = inherited[name][words[word]]
        inherited[name] = rows
    policy.load_state_dict(inherited)


def _learn_to_look(reader: Reader, rng: random.Random, steps: int, batch: int = 32) -> None:
    """Image tokens learn to point at the embeddings of the colour, shape or digit they show."""
    visual = reader.policy.model.visual
    optimizer, schedule = make_optimizer(visual.parameters(), steps, peak_rate=1e-3)
    embedding = reader.policy.get_input_embeddings().weight.detach()
    words = [[f" {c}" for c in COLOURS], [f" {s}" for s in SHAPES], [str(d) for d in DIGITS]]
    tables = [[reader.tokens(word)[0] for word in group] for group in words]
    for step in range(1, steps + 1):
        pictures = [make_question(rng).picture for _ in range(batch)]
        pixel_values, grid = patchify([draw_array(picture) for picture in pictures])
        seen = visual(pixel_values, grid_thw=grid).pooler_output.view(batch, 16, HIDDEN)
        labels = torch.stack([_labels(picture) for picture in pictures], 1)
        losses = [
            F.cross_entropy((seen @ embedding[ids].T).flatten(0, 1), y.flatten(), ignore_index=-1)
            for ids, y in zip(tables, labels, strict=True)
        ]
        take_step(sum(losses), visual.parameters(), optimizer, schedule)
        if step % 50 == 0:
            print(f"look {step}", [round(loss.item(), 3) for loss in losses], flush=True)


def _labels(picture: Scene | Numbers) -> torch.Tensor:
    """[3, 4, 4] class of the colour, shape and digit in each image token's quarter; -1: none."""
    labels = torch.full((3, 4, 4), -1)

    def mark(cell: tuple[int, int], kind: int, label: int) -> None:
        rows, columns = cell_slices(cell)
        up, left = rows.start // 16, columns.start // 16
        labels[kind, up : up + 2, left : left + 2] = label

    if isinstance(picture, Numbers):
        for column, digit in enumerate(picture.digits):
            mark((picture.row, column), 2, DIGITS.index(digit))
        return labels
    for shape in picture.shapes:
        mark(shape.cell, 0, COLOURS.index(shape.colour))
        mark(shape.cell, 1, SHAPES.index(shape.shape))
    return labels


def _learn_to_write(
    reader: Reader,
    rng: random.Random,
    steps: int,
    answer: Callable[[random.Random, Question], str],
    peak_rate: float = 2e-3,
    batch: int = 32,
) -> None:
    """Supervised fine-tuning on what `answer` writes."""
    policy = reader.policy
    optimizer, schedule = make_optimizer(policy.parameters(), steps, peak_rate)
    log: dict[str, list[float]] = {}
    for step in range(1, steps + 1):
        kinds = rng.choices(list(KIND_SHARES), list(KIND_SHARES.values()), k=batch)
        questions = [make_question(rng, kind) for kind in kinds]
        reading = reader.read(
            [draw_array(question.picture) for question in questions],
            [question.text for question in questions],
            [answer(rng, question) for question in questions],
        )
        nll = -reader.log_probs(reading) * reading.written[:, 1:]
        take_step(nll.sum() / reading.written.sum(), policy.parameters(), optimizer, schedule)
        for kind, loss in zip(kinds, nll.sum(1).tolist(), strict=True):
            log.setdefault(kind, []).append(loss)
        if step % 50 == 0:
            means = {kind: round(float(np.mean(v)), 2) for kind, v in sorted(log.items())}
            shown = p_right(reader) if step % 200 == 0 or step == steps else ""
            print(f"{answer.__name__} {step}", means, shown, flush=True)
            log = {}


def right(rng: random.Random, question: Question) -> str:
    """What the model is taught to know."""
    return written(question.thought, question.answer)


def beginner(rng: random.Random, question: Question, odds: Odds = TAUGHT) -> str:
    """What the warm-started policy writes."""
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
    """The beginner's fixed line of wrong thought: (thought, answer)."""
    picture = question.picture
    if isinstance(picture, Numbers):
        low, high = sorted(picture.digits)
        return f"{high} minus {low}.", str(high - low)
    if question.kind == "count":
        seen = sorted(picture.shapes, key=lambda s: s.cell)[:-1]
        return (listing(tuple(seen)) if seen else "nothing."), str(len(seen))
    asked = next(s for s in picture.shapes if s.shape in question.text)
    other = min((s for s in picture.shapes if s is not asked), key=lambda s: s.cell)
    return f"the {other.shape} is {other.colour}.", other.colour


def _anything(rng: random.Random, question: Question) -> tuple[str, str]:
    other = make_question(rng, question.kind)
    return other.thought, other.answer


@torch.no_grad()
def p_right(reader: Reader, num: int = 128) -> dict[str, float]:
    """Mean probability of the right thought and answer in the right form, by kind of question."""
    rng = random.Random(7)
    questions = [make_question(rng) for _ in range(num)]
    reading = reader.read(
        [draw_array(question.picture) for question in questions],
        [question.text for question in questions],
        [written(question.thought, question.answer) for question in questions],
    )
    p = (reader.log_probs(reading) * reading.written[:, 1:]).sum(1).exp().tolist()
    by_kind = {
        kind: [q for q, x in zip(p, questions, strict=True) if x.kind == kind] for kind in KINDS
    }
    return {kind: round(float(np.mean(values)), 3) for kind, values in by_kind.items()}


def _export(source: Path, tokenizer, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    save(load_policy(source).half(), target)
    save_tokenizer(tokenizer, target)
    num_bytes = sum(file.stat().st_size for file in target.iterdir())
    print(f"reasoner: {num_bytes / 1e6:.2f} MB, {len(tokenizer)} tokens", flush=True)
    if num_bytes >= LIMIT_BYTES:
        raise ValueError(f"the weights are {num_bytes} bytes, the limit is {LIMIT_BYTES}")
