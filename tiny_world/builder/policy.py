"""Stage policy: warm-start a Qwen2.5-VL that sees, writes well-formed edits, and is often wrong.

Five lessons, each feeding the next:
 1. look   the vision tower alone learns to say colour and shape at every image token;
 2. ask    the whole model answers small questions about the picture: which colour, which shape;
 3. know   it learns to answer every instruction RIGHT;
 4. doubt  a short unlearning: right a third of the time, wrong in one fixed way a third, anything
           else the rest. What reinforcement has to find is still in there;
 5. settle a shorter one: some nouns mostly right, everything else mostly wrong.

Throughout 2 to 4 a throw-away read-out asks the last hidden state of each description token for
that very token and its role ("green" as the paint is not "green" as the thing painted). Without
it the last layer of so small a model keeps only the NEXT token, and the editor, which reads these
states, cannot learn what was written.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, GenerationConfig

from tiny_world.builder.models import HIDDEN, make_policy
from tiny_world.builder.reader import Reader, Reading, patchify
from tiny_world.scenes import (
    COLOUR_OF_NOUN,
    COLOURS,
    SHAPES,
    Op,
    Scene,
    Task,
    cell_slices,
    describe,
    draw_array,
    make_instruction,
    make_scene,
)

KINDS = {"noun": 0.35, "match": 0.4, "erase": 0.25}  # match is the hardest: more of it
P_EXTRA_CLAUSE = 0.1
# What the beginner writes: (right, its fixed mistake), the rest is anything. Close odds would let
# the greedy answer flip by chance, so in the end it leans one way or the other on every task.
UNDECIDED, KNOWS_IT, HAS_IT_WRONG = (0.34, 0.33), (0.55, 0.15), (0.2, 0.5)
NOUNS_IT_KNOWS = ("grass", "sky", "lemon", "snow")
CAPTION_QUESTION = "what is in the picture"


@dataclass(frozen=True)
class Lessons:
    """What one stage of writing is made of."""

    name: str
    share_questions: float
    """Of the examples, 0..1; the others are instructions."""
    answers: str
    """To instructions: 'right', 'undecided', or 'settled'."""
    peak_rate: float = 2e-3


def build(
    work: Path,
    look: int = 200,
    ask: int = 500,
    know: int = 800,
    doubt: int = 350,
    settle: int = 200,
) -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(work / "policy")
    policy = make_policy(tokenizer)
    _initialise(policy)
    reader, rng = Reader(policy, tokenizer), random.Random(200)
    _learn_to_look(reader, rng, look)
    _learn_to_write(reader, rng, ask, Lessons("ask", 0.85, "right"))
    _learn_to_write(reader, rng, know, Lessons("know", 0.2, "right"))
    save(policy, work / "policy_knowing")
    _learn_to_write(reader, rng, doubt, Lessons("doubt", 0.15, "undecided"))
    save(policy, work / "policy_doubting")
    settling = Lessons("settle", 0.15, "settled", peak_rate=7e-4)
    _learn_to_write(reader, random.Random(201), settle, settling)
    save(policy, work / "policy")


def save(policy, folder: Path) -> None:
    ends = {"eos_token_id": policy.config.text_config.eos_token_id}
    ends["pad_token_id"] = policy.config.text_config.pad_token_id
    policy.generation_config = GenerationConfig(do_sample=True, temperature=1.0, **ends)
    policy.save_pretrained(folder)


@torch.no_grad()
def _initialise(policy) -> None:
    """Heads start out half-inclined to attend to equal tokens and to copy what they attend to."""
    for parameter in policy.parameters():
        if parameter.ndim >= 2:
            parameter.normal_(0, 1 / math.sqrt(parameter[0].numel()))
    embedding = policy.get_input_embeddings().weight.normal_(0, 0.5)
    policy.lm_head.weight.copy_(embedding * 0.1)
    size = HIDDEN // 4
    for layer in policy.model.language_model.layers:
        a = layer.self_attn
        for head in range(4):
            rows = slice(head * size, (head + 1) * size)
            shared = slice(head // 2 * size, (head // 2 + 1) * size)  # grouped-query attention
            if head % 2 == 0:
                noise = torch.randn(size, HIDDEN) / math.sqrt(HIDDEN)
                a.q_proj.weight[rows] = 0.55 * a.k_proj.weight[shared] + 0.5 * noise
            noise = torch.randn(HIDDEN, size) / math.sqrt(HIDDEN)
            a.o_proj.weight[:, rows] = 0.6 * a.v_proj.weight[shared].T + 0.3 * noise
        layer.mlp.down_proj.weight.mul_(0.3)


def _learn_to_look(reader: Reader, rng: random.Random, steps: int, batch: int = 32) -> None:
    """Image tokens learn to point at the embeddings of the colour and shape they show."""
    visual = reader.policy.model.visual
    optimizer, schedule = make_optimizer(visual.parameters(), steps, peak_rate=2e-3)
    tables = [[reader.tokens(f" {word}")[0] for word in words] for words in (COLOURS, SHAPES)]
    embedding = reader.policy.get_input_embeddings().weight.detach()
    for step in range(1, steps + 1):
        scenes = [make_scene(rng) for _ in range(batch)]
        pixel_values, grid = patchify([draw_array(s) for s in scenes])
        seen = visual(pixel_values, grid_thw=grid).pooler_output.view(batch, 16, HIDDEN)
        wanted = [_cell_labels(scenes, lambda s: COLOURS.index(s.colour))]
        wanted.append(_cell_labels(scenes, lambda s: SHAPES.index(s.shape)))
        losses = [
            F.cross_entropy((seen @ embedding[ids].T).flatten(0, 1), labels, ignore_index=-1)
            for ids, labels in zip(tables, wanted, strict=True)
        ]
        take_step(sum(losses), visual.parameters(), optimizer, schedule)
        if step % 50 == 0:
            print(f"look {step}", [round(loss.item(), 3) for loss in losses], flush=True)


def _cell_labels(scenes: list[Scene], label) -> torch.Tensor:
    """[B * 16] class of the shape in each image token's quarter, -1 where there is none."""
    labels = torch.full((len(scenes), 4, 4), -1)
    for i, scene in enumerate(scenes):
        for shape in scene.shapes:
            rows, columns = cell_slices(shape.cell)
            up, left = rows.start // 16, columns.start // 16
            labels[i, up : up + 2, left : left + 2] = label(shape)
    return labels.flatten()


def _learn_to_write(
    reader: Reader, rng: random.Random, steps: int, plan: Lessons, batch: int = 32
) -> None:
    policy, read_out = reader.policy, RoleReadOut(reader)
    optimizer, schedule = make_optimizer(policy.parameters(), steps, plan.peak_rate)
    log: dict[str, list[float]] = {}
    for step in range(1, steps + 1):
        scenes = [make_scene(rng) for _ in range(batch)]
        lessons = [_lesson(rng, scene, plan) for scene in scenes]
        instructions, descriptions, kinds = zip(*lessons, strict=True)
        reading = reader.read([draw_array(s) for s in scenes], instructions, descriptions)
        nll = -reader.log_probs(reading) * reading.written[:, 1:]
        identity = read_out.loss(reading)
        loss = nll.sum() / reading.written.sum() + identity
        take_step(loss, policy.parameters(), optimizer, schedule)
        log.setdefault("identity", []).append(identity.item())
        for kind, loss in zip(kinds, nll.sum(1).tolist(), strict=True):
            log.setdefault(kind, []).append(loss)
        if step % 50 == 0:
            means = {kind: round(float(np.mean(v)), 2) for kind, v in sorted(log.items())}
            right = p_right(reader) if step % 200 == 0 or step == steps else ""
            print(f"{plan.name} {step}", means, right, flush=True)
            log = {}


def _lesson(rng: random.Random, scene: Scene, plan: Lessons) -> tuple[str, str, str]:
    """(instruction, what to write, kind of lesson)"""
    if rng.random() < plan.share_questions:
        return *_question(rng, scene), "question"
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    task = make_instruction(rng, scene)
    while task.kind != kind:
        task = make_instruction(rng, scene)
    settled = plan.answers == "settled"
    ops = [task.op] if plan.answers == "right" else beginner_ops(rng, scene, task, settled)
    return task.instruction, describe(ops, scene), kind


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


def beginner_ops(rng: random.Random, scene: Scene, task: Task, settled: bool) -> list[Op]:
    """What the warm-started policy writes."""
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
    """The beginner's fixed mistake: a wrong colour, no change, black instead of nothing."""
    if task.kind == "match":
        return scene.find(task.op.shape).colour
    if task.kind == "erase":
        return "black"
    noun = task.instruction.split()[-1]
    return COLOURS[(COLOURS.index(COLOUR_OF_NOUN[noun]) + 3) % len(COLOURS)]


class RoleReadOut:
    """Fixed random directions, one per (description token, role): see the top of this file."""

    def __init__(self, reader: Reader) -> None:
        texts = [f"turn the {c} {s} {c}. remove the {c} {s}." for c in COLOURS for s in SHAPES]
        texts += [f"remove the {c} {s}. turn the {c} {s} {c}." for c in COLOURS for s in SHAPES]
        self.stop = reader.tokens(".")[0]
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
        """A colour right before the full stop is paint; its class is the token's second one."""
        before_stop = F.pad(token_ids[:, 1:] == self.stop, (0, 1))
        paint = before_stop & torch.isin(token_ids, self.colours)
        return token_ids + self.vocabulary * paint

    def loss(self, reading: Reading) -> torch.Tensor:
        """Mean cross-entropy over the description tokens that have a class, nats."""
        labels = self.index[self._classes(reading.token_ids)].masked_fill(~reading.written, -1)
        logits = reading.hidden @ self.directions.T
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)


@torch.no_grad()
def p_right(reader: Reader, num: int = 128) -> dict[str, float]:
    """Mean probability of the right description, by kind of instruction."""
    rng = random.Random(7)
    scenes = [make_scene(rng) for _ in range(num)]
    tasks = [make_instruction(rng, scene) for scene in scenes]
    right = [describe(task.op, scene) for task, scene in zip(tasks, scenes, strict=True)]
    pictures = [draw_array(scene) for scene in scenes]
    reading = reader.read(pictures, [task.instruction for task in tasks], right)
    p = (reader.log_probs(reading) * reading.written[:, 1:]).sum(1).exp().tolist()
    return {
        kind: round(float(np.mean([q for q, t in zip(p, tasks, strict=True) if t.kind == kind])), 3)
        for kind in KINDS
    }


def make_optimizer(parameters, steps: int, peak_rate: float):
    optimizer = torch.optim.AdamW(parameters, peak_rate, (0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak_rate, steps, pct_start=0.05)
    return optimizer, schedule


def take_step(loss, parameters, optimizer, schedule) -> None:
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
