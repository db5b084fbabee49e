"""Stage policy: warm-starts a Qwen2.5-VL that writes well-formed edits and is often wrong.

Five lessons, in this order:
 1. look   only the vision tower: every image token predicts its colour and shape;
 2. ask    the whole model answers small questions about the picture: which colour, which shape;
 3. know   answers every instruction RIGHT;
 4. doubt  for fewer steps: a third of the answers right, a third with one fixed mistake, the rest
           random, so that right answers stay likely enough for reinforcement learning;
 5. settle for fewer steps still: some nouns mostly right, everything else mostly wrong.

During 2 to 5 a temporary read-out predicts, from the last hidden state of each description token,
that token and its role ("green" as the new colour or as the old one). Without it the last layer of
so small a model keeps only the NEXT token, and the editor, which reads these states, cannot learn
the description.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from tiny_world.builder.lessons import learn_to_look, learn_to_write
from tiny_world.builder.models import HIDDEN, make_policy, unit_gain
from tiny_world.builder.reader import Reader, Reading
from tiny_world.builder.tokenizer import editing_tokenizer, image_processor
from tiny_world.builder.training import export
from tiny_world.scenes import (
    COLOUR_OF_NOUN,
    COLOURS,
    SHAPES,
    Op,
    Scene,
    Task,
    describe,
    draw_array,
    make_instruction,
    make_scene,
)

KINDS = {"noun": 0.35, "match": 0.4, "erase": 0.25}  # match is the hardest and most frequent
P_EXTRA_CLAUSE = 0.1
# The beginner's P(right), P(its fixed mistake); the rest is random. With equal odds the greedy
# answer could flip by chance, so in the end one of the two is clearly likelier for every task.
UNDECIDED, KNOWS_IT, HAS_IT_WRONG = (0.34, 0.33), (0.55, 0.15), (0.2, 0.5)
NOUNS_IT_KNOWS = ("grass", "sky", "lemon", "snow")
CAPTION_QUESTION = "what is in the picture"
Answer = Callable[[random.Random, Scene, Task], list[Op]]


def build(work: Path) -> None:
    torch.manual_seed(0)
    tokenizer = editing_tokenizer()
    policy = make_policy(tokenizer)
    initialise(policy)
    reader, rng = Reader(policy, tokenizer), random.Random(200)
    learn_to_look(reader, lambda: make_scene(rng), num_kinds=2, steps=200, peak_rate=2e-3)
    _learn_to_write(reader, rng, "ask", 500, 0.85, right)
    _learn_to_write(reader, rng, "know", 800, 0.2, right)
    _learn_to_write(reader, rng, "doubt", 350, 0.15, partial(beginner_ops, settled=False))
    policy.save_pretrained(work / "policy_doubting")
    settled = partial(beginner_ops, settled=True)
    _learn_to_write(reader, random.Random(201), "settle", 200, 0.15, settled, peak_rate=7e-4)
    export("policy", policy, tokenizer, image_processor())


@torch.no_grad()
def initialise(policy) -> None:
    """The four heads (two share a key and a value) start with a tendency to attend to equal tokens
    and to copy the tokens that they attend to."""
    unit_gain(policy)
    policy.lm_head.weight.copy_(policy.get_input_embeddings().weight * 0.1)
    size = HIDDEN // 4
    for layer in policy.model.language_model.layers:
        a = layer.self_attn
        for head in range(4):
            rows = slice(head * size, (head + 1) * size)
            shared = slice(head // 2 * size, (head // 2 + 1) * size)  # grouped-query attention
            if head % 2 == 0:
                noise = torch.randn(size, HIDDEN) / HIDDEN**0.5
                a.q_proj.weight[rows] = 0.55 * a.k_proj.weight[shared] + 0.5 * noise
            noise = torch.randn(HIDDEN, size) / HIDDEN**0.5
            a.o_proj.weight[:, rows] = 0.6 * a.v_proj.weight[shared].T + 0.3 * noise
        layer.mlp.down_proj.weight.mul_(0.3)


def _learn_to_write(
    reader: Reader,
    rng: random.Random,
    name: str,
    steps: int,
    share_questions: float,
    answer: Answer,
    peak_rate: float = 2e-3,
    batch: int = 32,
) -> None:
    """`share_questions`: share of questions among the examples, 0..1; the rest are instructions."""

    def examples() -> tuple[list[np.ndarray], list[str], list[str]]:
        scenes = [make_scene(rng) for _ in range(batch)]
        lessons = [_lesson(rng, scene, share_questions, answer) for scene in scenes]
        return [draw_array(s) for s in scenes], *zip(*lessons, strict=True)

    check, read_out = partial(p_right, reader), RoleReadOut(reader)
    learn_to_write(reader, name, examples, steps, peak_rate, check, also=read_out.loss)


def _lesson(
    rng: random.Random, scene: Scene, share_questions: float, answer: Answer
) -> tuple[str, str]:
    """(instruction, the text to write)"""
    if rng.random() < share_questions:
        return _question(rng, scene)
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    task = make_instruction(rng, scene)
    while task.kind != kind:
        task = make_instruction(rng, scene)
    return task.instruction, describe(answer(rng, scene, task), scene)


def _question(rng: random.Random, scene: Scene) -> tuple[str, str]:
    u, shape = rng.random(), rng.choice(scene.shapes)
    if u < 0.4:
        in_order = sorted(scene.shapes, key=lambda s: SHAPES.index(s.shape))
        return CAPTION_QUESTION, "a " + " ".join(f"{s.colour} {s.shape}" for s in in_order) + "."
    if u < 0.8:
        return f"what color is the {shape.shape}", f"the {shape.colour}."
    return f"what is the {shape.colour} shape", f"the {shape.shape}."


def random_op(rng: random.Random, scene: Scene) -> Op:
    return Op(rng.choice(scene.shapes).shape, None if rng.random() < 0.25 else rng.choice(COLOURS))


def right(rng: random.Random, scene: Scene, task: Task) -> list[Op]:
    return [task.op]


def beginner_ops(rng: random.Random, scene: Scene, task: Task, settled: bool) -> list[Op]:
    """An answer's operations: right, with the fixed mistake, or random; sometimes one more."""
    p_right, p_mistake = UNDECIDED
    if settled:
        knows = task.instruction.split()[-1] in NOUNS_IT_KNOWS
        p_right, p_mistake = KNOWS_IT if knows else HAS_IT_WRONG
    u, ops = rng.random(), [random_op(rng, scene)]
    if u < p_right:
        ops = [task.op]
    elif u < p_right + p_mistake:
        ops = [Op(task.op.shape, _misconception(scene, task))]
    if rng.random() < P_EXTRA_CLAUSE:
        other = rng.choice([s for s in scene.shapes if s.shape != ops[0].shape])
        ops.append(Op(other.shape, rng.choice(COLOURS)))
    return ops


def _misconception(scene: Scene, task: Task) -> str:
    """The beginner's fixed mistake: a wrong colour, no change, black instead of removal, or the
    colour in the first picture instead of the second."""
    old_colour = scene.find(task.op.shape).colour
    if task.kind == "match":
        return old_colour
    if task.kind == "borrow":
        model = task.instruction.split()[7]
        colours = [s.colour for s in scene.shapes if s.shape == model and s.colour != task.op.paint]
        return colours[0] if colours else old_colour
    if task.kind == "erase":
        return "black"
    noun = task.instruction.split()[-1]
    return COLOURS[(COLOURS.index(COLOUR_OF_NOUN[noun]) + 3) % len(COLOURS)]


class RoleReadOut:
    """Predicts a token and its role: fixed random directions, one per (description token, role)."""

    def __init__(self, reader: Reader) -> None:
        texts = [f"turn the {c} {s} {c}. remove the {c} {s}." for c in COLOURS for s in SHAPES]
        texts += [f"remove the {c} {s}. turn the {c} {s} {c}." for c in COLOURS for s in SHAPES]
        self.reader, self.stop = reader, reader.tokens(".")[0]
        self.vocabulary = len(reader.tokenizer)
        self.colours = torch.tensor([reader.tokens(f" {c}")[0] for c in COLOURS])
        rows = [torch.tensor([reader.tokens(text + "<|im_end|>")]) for text in texts]
        classes = sorted({c for row in rows for c in self._classes(row).flatten().tolist()})
        self.index = torch.full((2 * self.vocabulary,), -1)
        self.index[classes] = torch.arange(len(classes))
        generator = torch.Generator().manual_seed(5)
        directions = torch.randn(len(classes), HIDDEN, generator=generator)
        self.directions = F.normalize(directions, dim=1)

    def _classes(self, token_ids: torch.Tensor) -> torch.Tensor:
        """A colour right before the full stop is the new one, which is the token's second class."""
        before_stop = F.pad(token_ids[:, 1:] == self.stop, (0, 1))
        paint = before_stop & torch.isin(token_ids, self.colours)
        return token_ids + self.vocabulary * paint

    def labels(self, token_ids: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
        """The class of each description token [B, L], -1 for none and for other tokens."""
        return self.index[self._classes(token_ids)].masked_fill(~written, -1)

    def loss(self, reading: Reading) -> torch.Tensor:
        """Mean cross-entropy over the description tokens that have a class, nats."""
        labels = self.labels(reading.token_ids, reading.written)
        logits = self.reader.readable(reading.hidden) @ self.directions.T
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)


def p_right(reader: Reader, num: int = 128) -> dict[str, float]:
    """Mean probability of the right description, by kind of instruction."""
    rng = random.Random(7)
    scenes = [make_scene(rng) for _ in range(num)]
    tasks = [make_instruction(rng, scene) for scene in scenes]
    return reader.p_by_kind(
        (task.kind, draw_array(scene), task.instruction, describe(task.op, scene))
        for task, scene in zip(tasks, scenes, strict=True)
    )
