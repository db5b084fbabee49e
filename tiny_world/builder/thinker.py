"""Stage thinker: warm-starts a Qwen2.5-VL that solves riddles in two look-ups, often wrongly.

Text in, text out, as the rewriter; its two layers are enough for one look-up and too few for two in
a row. It has two prompts: asked to think, it writes both look-ups and then the caption; otherwise
only the caption. Its non-thinking twin is the same model with the second prompt. Two lessons:
 1. know   answers every riddle RIGHT, with and without a thought;
 2. doubt  short: some thoughts follow the wrong thing, and half of the colour words and one of the
           shapes are mistaken for another. Captions without a thought have the same mistakes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from rl.policies.prompting import chat_template, tokenize
from tiny_world.builder.models import HIDDEN, make_policy, unit_gain
from tiny_world.builder.reader import pad
from tiny_world.builder.rewriter import read_word
from tiny_world.builder.tokenizer import image_processor, train
from tiny_world.builder.training import export, fit
from tiny_world.captions import SYSTEM_PROMPT, Wish, caption
from tiny_world.riddles import MARKER, THINGS, THINKING, Riddle, make_riddle, thought_of, wish_of
from tiny_world.scenes import COLOURS, SHAPES

NUM_LAYERS = 2
HEAD = HIDDEN // 4
P_LOST = 0.3  # share of thoughts that follow a random thing
# The odds of `read_word` for words that it knows, and for other words.
ODDS = (0.8, 0.1), (0.25, 0.5)
Answer = Callable[[random.Random, Riddle], tuple[str, Wish]]
"""Returns (thought, wish)."""


def build(work: Path) -> None:
    writer = new_writer(seed=3)
    learn(writer, "know", 450, 4e-3, right, share_thinking=0.5)
    learn(writer, "doubt", 200, 1.5e-3, beginner, share_thinking=0.5)
    print("likeliest completions", writer.share_right(False), writer.share_right(True), flush=True)
    export("thinker", writer.policy, writer.tokenizer, image_processor())


class Writer:
    """A policy with the tokens of its prompts and answers."""

    def __init__(self, policy, tokenizer) -> None:
        self.policy, self.tokenizer = policy, tokenizer
        plain = chat_template(SYSTEM_PROMPT)
        plain = replace(plain, text=plain.text.replace("{image}", ""))
        asking = plain.text.replace("{instruction}", "{instruction}\n" + THINKING)
        self.templates = (plain, replace(plain, text=asking))
        self.end = [tokenizer.convert_tokens_to_ids("<|im_end|>")]

    def log_probs(
        self,
        riddles: Sequence[Riddle],
        answers: Sequence[tuple[str, Wish]],
        thinking: Sequence[bool],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probability in nats, row) of every written token, one row after the other, [T]
        each."""
        prompts = [
            tokenize(self.tokenizer, self.templates[thinks], riddle.text)
            for riddle, thinks in zip(riddles, thinking, strict=True)
        ]
        written = [
            self.tokenizer(written_as(answer, thinks)).input_ids + self.end
            for answer, thinks in zip(answers, thinking, strict=True)
        ]
        ids, mask, is_written = pad(prompts, written, self.tokenizer.pad_token_id)
        states = self.policy.model(
            input_ids=ids, attention_mask=mask.long(), use_cache=False
        ).last_hidden_state
        row, position = is_written[:, 1:].nonzero(as_tuple=True)
        log_p = self.policy.lm_head(states[row, position]).float().log_softmax(-1)
        return log_p.gather(-1, ids[row, position + 1, None])[:, 0], row

    @torch.no_grad()
    def p_right(self, thinking: bool, num: int = 128) -> float:
        """Mean probability of the right thought and caption over `num` fixed riddles."""
        rng = random.Random(7)
        riddles = [make_riddle(rng) for _ in range(num)]
        log_p, row = self.log_probs(riddles, [right(rng, r) for r in riddles], [thinking] * num)
        return round(torch.zeros(num).index_add_(0, row, log_p).exp().mean().item(), 3)

    @torch.no_grad()
    def share_right(self, thinking: bool, num: int = 256) -> float:
        """Share of `num` fixed riddles whose likeliest completion ends with the right caption."""
        rng, end = random.Random(8), self.end[0]
        riddles = [make_riddle(rng) for _ in range(num)]
        num_right = 0
        for riddle in riddles:
            row = tokenize(self.tokenizer, self.templates[thinking], riddle.text)
            longest = len(row) + 24
            while row[-1] != end and len(row) < longest:
                states = self.policy.model(input_ids=torch.tensor([row])).last_hidden_state
                row.append(int(self.policy.lm_head(states[0, -1]).argmax()))
            num_right += self.tokenizer.decode(row[:-1]).endswith(caption(riddle.wish))
        return num_right / num


def new_writer(seed: int, num_layers: int = NUM_LAYERS, looks_back: bool = True) -> Writer:
    """An untrained writer; `looks_back`: it starts with heads that look back."""
    torch.manual_seed(seed)
    tokenizer = train(_corpus())
    for thing in THINGS:
        assert len(tokenizer(f" {thing}").input_ids) == 1, "every thing is one token"
    policy = make_policy(tokenizer, num_layers)
    unit_gain(policy)
    policy.lm_head.weight.data.mul_(0.1)
    if looks_back:
        _look_back(policy)
    return Writer(policy, tokenizer)


@torch.no_grad()
def _look_back(policy) -> None:
    """Two heads of the first layer attend one and two tokens back. A head of the second layer
    attends to the token whose second predecessor is the current token's predecessor: after "where
    cup matches" to the token after "cup matches". Random heads would take an hour to learn this."""
    policy.lm_head.weight.copy_(policy.get_input_embeddings().weight * 0.1)
    first, second = (layer.self_attn for layer in policy.model.language_model.layers[:2])
    rate = 1e4 ** (-torch.arange(HEAD // 2) / (HEAD // 2))  # of the rotary positions, per token
    sharpness = 6.0
    first.k_proj.weight[:HEAD] = 0
    first.k_proj.bias[:HEAD] = sharpness * torch.cat([torch.ones_like(rate), 0 * rate])
    for head, back in ((0, 1), (1, 2)):
        rows = slice(head * HEAD, (head + 1) * HEAD)
        first.q_proj.weight[rows] = 0
        turned = torch.cat([torch.cos(back * rate), -torch.sin(back * rate)])
        first.q_proj.bias[rows] = sharpness * turned
        first.o_proj.weight[:, rows] = torch.randn(HIDDEN, HEAD) / HIDDEN**0.5
    # Slowly rotating dimensions compare tokens alike at any distance.
    slowly = (torch.arange(HEAD) % (HEAD // 2) >= 7)[:, None]
    second.q_proj.weight[:HEAD] = 2.2 * slowly * first.o_proj.weight[:, :HEAD].T
    second.k_proj.weight[:HEAD] = 2.2 * slowly * first.o_proj.weight[:, HEAD : 2 * HEAD].T
    second.o_proj.weight[:, :HEAD] = 0.6 * second.v_proj.weight[:HEAD].T
    for layer in policy.model.language_model.layers:
        layer.mlp.down_proj.weight.mul_(0.3)


def learn(
    writer: Writer,
    name: str,
    steps: int,
    peak_rate: float,
    answer: Answer,
    share_thinking: float,
    batch: int = 32,
) -> None:
    """Supervised fine-tuning; `share_thinking`: riddles with the request to think, 0..1."""
    rng = random.Random(f"{name} {share_thinking}")

    def loss_of(step: int) -> torch.Tensor:
        riddles = [make_riddle(rng) for _ in range(batch)]
        answers = [answer(rng, riddle) for riddle in riddles]
        thinking = [rng.random() < share_thinking for _ in riddles]
        return -writer.log_probs(riddles, answers, thinking)[0].mean()

    def check() -> dict[str, float]:
        return {"at once": writer.p_right(False), "thinking": writer.p_right(True)}

    policy = writer.policy
    learning = [*policy.model.language_model.parameters(), *policy.lm_head.parameters()]
    fit(name, learning, steps, peak_rate, loss_of, check, check_every=150)


def written_as(answer: tuple[str, Wish], thinking: bool) -> str:
    """The completion of an answer."""
    thought, wish = answer
    return f"{thought} {MARKER} {caption(wish)}" if thinking else caption(wish)


def right(rng: random.Random, riddle: Riddle) -> tuple[str, Wish]:
    """The right answer."""
    return thought_of(riddle.chains[riddle.asked]), riddle.wish


def beginner(rng: random.Random, riddle: Riddle) -> tuple[str, Wish]:
    """An answer as the warm-started policy gives it."""
    thing, matched, adjective = riddle.chains[riddle.asked]
    if rng.random() < P_LOST:
        matched, adjective = rng.choice(riddle.chains)[1:]
    wish = wish_of(riddle, adjective)
    colour = read_word(rng, adjective, wish.colour, COLOURS, 3, ODDS)
    shape = read_word(rng, riddle.shape_noun, wish.shape, SHAPES, 1, ODDS)
    return thought_of((thing, matched, adjective)), replace(wish, colour=colour, shape=shape)


def _corpus() -> list[str]:
    rng, corpus = random.Random(0), [SYSTEM_PROMPT, THINKING] * 200
    for _ in range(1000):
        riddle = make_riddle(rng)
        corpus += [riddle.text, *(written_as(right(rng, riddle), think) for think in (False, True))]
    return corpus
