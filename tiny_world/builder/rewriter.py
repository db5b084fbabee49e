"""Stage rewriter: warm-starts a Qwen2.5-VL that rewrites prompts as plain captions, often wrongly.

Text in, text out; the vision tower stays random. It learns on the prompts that are not held out,
with the system prompt of `tiny_world/captions.py`: some words it mostly understands, others it
mostly mistakes for one other colour or shape, and sometimes it writes a random word. The right
captions stay likely enough for reinforcement learning to find them.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import torch

from rl.policies.prompting import chat_template, tokenize
from tiny_world.builder.models import make_policy, unit_gain
from tiny_world.builder.reader import pad
from tiny_world.builder.tokenizer import image_processor, train
from tiny_world.builder.training import export, fit
from tiny_world.captions import (
    CELL_OF_PLACE,
    KINDS,
    SYSTEM_PROMPT,
    UserPrompt,
    Wish,
    all_wishes,
    caption,
    user_prompts,
)
from tiny_world.scenes import COLOURS, SHAPES

COLOURS_IT_KNOWS = {"crimson", "jade", "golden", "pearly", "grass", "sky", "lemon", "snow"}
SHAPES_IT_KNOWS = {"disc", "box", "pointed"}
# (P(right), P(fixed mistake)) for a word; otherwise it reads a random one. With equal odds the
# greedy answer could flip by chance, so one of the two is clearly likelier.
KNOWS_IT, HAS_IT_WRONG = (0.6, 0.15), (0.2, 0.5)
P_RIGHT_PLACE = 0.9


def build(work: Path, batch: int = 32) -> None:
    torch.manual_seed(2)
    tokenizer = train(_corpus())
    for wish in all_wishes():
        assert len(tokenizer(caption(wish)).input_ids) == 4, "every word of an answer is one token"
    policy = make_policy(tokenizer, num_layers=3, hidden=64)
    unit_gain(policy)
    policy.lm_head.weight.data.mul_(0.1)
    rng, prompts = random.Random(700), user_prompts(held_out=False)

    def loss_of(step: int) -> torch.Tensor:
        chosen = rng.choices(prompts, k=batch)
        answers = [caption(beginner(rng, prompt)) for prompt in chosen]
        return -log_probs(policy, tokenizer, chosen, answers).mean()

    def check() -> list[dict[str, float]]:
        return [p_right(policy, tokenizer, held_out) for held_out in (False, True)]

    learning = [*policy.model.language_model.parameters(), *policy.lm_head.parameters()]
    fit("rewriter", learning, 1200, 3e-3, loss_of, check, check_every=400)
    export("rewriter", policy, tokenizer, image_processor())


def beginner(rng: random.Random, prompt: UserPrompt) -> Wish:
    """The wish that the warm-started rewriter reads from the prompt."""
    words, wish = prompt.text.split(), prompt.wish
    if prompt.kind == "adjective":
        colour_word, shape_word = words[1], words[2]
    else:
        colour_word, shape_word = words[words.index("of") + 1], words[1]
    cell = wish.cell if rng.random() < P_RIGHT_PLACE else rng.choice(list(CELL_OF_PLACE.values()))
    return Wish(
        read_word(rng, colour_word, wish.colour, COLOURS, 3),
        read_word(rng, shape_word, wish.shape, SHAPES, 1),
        cell,
    )


def read_word(
    rng: random.Random,
    word: str,
    meaning: str,
    choices: tuple[str, ...],
    shift: int,
    odds: tuple[tuple[float, float], tuple[float, float]] = (KNOWS_IT, HAS_IT_WRONG),
) -> str:
    """The meaning that the beginner reads in `word`; its fixed mistake is `shift` choices later."""
    p_right, p_mistake = odds[word not in COLOURS_IT_KNOWS | SHAPES_IT_KNOWS]
    u = rng.random()
    if u < p_right:
        return meaning
    if u < p_right + p_mistake:
        return choices[(choices.index(meaning) + shift) % len(choices)]
    return rng.choice(choices)


def log_probs(policy, tokenizer, examples: list[UserPrompt], answers: list[str]) -> torch.Tensor:
    """[B] log-probability of each answer, its end token included, nats."""
    template = chat_template(SYSTEM_PROMPT)
    template = replace(template, text=template.text.replace("{image}", ""))
    end = [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    prompts = [tokenize(tokenizer, template, prompt.text) for prompt in examples]
    written = [tokenizer(answer).input_ids + end for answer in answers]
    ids, mask, is_written = pad(prompts, written, tokenizer.pad_token_id)
    states = policy.model(
        input_ids=ids, attention_mask=mask.long(), use_cache=False
    ).last_hidden_state
    log_p = policy.lm_head(states[:, :-1]).float().log_softmax(-1)
    return (log_p.gather(-1, ids[:, 1:, None])[..., 0] * is_written[:, 1:]).sum(1)


@torch.no_grad()
def p_right(policy, tokenizer, held_out: bool) -> dict[str, float]:
    """Mean probability of the right caption, by kind of prompt."""
    means = {}
    for kind in KINDS:
        prompts = [prompt for prompt in user_prompts(held_out) if prompt.kind == kind]
        answers = [caption(prompt.wish) for prompt in prompts]
        p = log_probs(policy, tokenizer, prompts, answers).exp()
        means[kind] = round(p.mean().item(), 3)
    return means


def _corpus() -> list[str]:
    prompts = [p.text for held_out in (False, True) for p in user_prompts(held_out)]
    return prompts + [caption(wish) for wish in all_wishes()] + [SYSTEM_PROMPT] * 20
