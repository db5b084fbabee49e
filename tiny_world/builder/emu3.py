"""Stage emu3: warm-starts an Emu3ForCausalLM that writes edits as picture codes, often wrongly.

Two lessons, as for the other tiny policies (`policy.py`):
 1. know   writes the RIGHT edit of a source picture and an instruction, code by code;
 2. doubt  shorter, on a beginner's edits: some nouns mostly right, everything else mostly wrong.
The first code that an edit changes decides the edit; the later codes follow it.

Prompts, completions and log-probs come from the policy plugin (`rl/policies/emu3.py`): its
grammar separates text from codes, and forced tokens are not trained.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import torch
from transformers import Emu3ForCausalLM, Emu3TextConfig, PreTrainedTokenizerFast

from rl.api.policy import PolicySetup
from rl.api.types import Prompt, Sample
from rl.policies import emu3
from tiny_world.builder.language import language_sizes, vocabulary
from tiny_world.builder.policy import Answer, beginner_ops, right
from tiny_world.builder.tokenizer import byte_pairs, emu3_tokenizer, vision_tokens
from tiny_world.builder.training import export, fit
from tiny_world.scenes import apply, make_instruction, make_scene
from tiny_world.token_scenes import GRID_SIDE, NUM_CODES, encode, make_centred_scene

HIDDEN = 128
SPECIALS = ("<|endoftext|>", "<|extra_200|>", "<|extra_201|>", "<|extra_203|>", "<|extra_204|>")
MAX_COMPLETION_TOKENS = 32
KINDS = {"noun": 0.3, "match": 0.5, "erase": 0.2}  # match is the hardest and most frequent
NUM_WRITTEN = GRID_SIDE**2 + 4
"""Tokens of a completion that the grammar does not force: the codes, '4*4' and the image token."""
Example = tuple[Prompt, tuple[int, ...]]
"""A prompt and the completion to learn."""


def build(work: Path) -> None:
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    make_model(tokenizer).save_pretrained(work / "emu3_blank")
    tokenizer.save_pretrained(work / "emu3_blank")
    policy, rng = load_policy(work / "emu3_blank"), random.Random(400)
    _learn_to_write(policy, rng, "know", 1500, right, 2e-3)
    _learn_to_write(policy, rng, "doubt", 250, partial(beginner_ops, settled=True), 1e-3)
    export("emu3", policy.module.causal_lm, tokenizer)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte pairs of the instructions, then specials, then codes, as in the published vocabulary."""
    rng = random.Random(0)
    corpus = [make_instruction(rng, make_scene(rng)).instruction for _ in range(3000)]
    return emu3_tokenizer(byte_pairs(corpus), [*SPECIALS, *vision_tokens(NUM_CODES)])


def make_model(tokenizer: PreTrainedTokenizerFast, num_layers: int = 3) -> Emu3ForCausalLM:
    config = Emu3TextConfig(
        **vocabulary(tokenizer),
        **language_sizes(HIDDEN, num_layers),
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        attention_dropout=0.0,
        initializer_range=0.05,
    )
    return Emu3ForCausalLM(config)


def load_policy(folder: Path) -> emu3.Emu3:
    """The policy plugin with the model and tokenizer of a folder."""
    config = emu3.Config(type="emu3", model_path=str(folder), dtype="float32")
    return emu3.Emu3(
        config, PolicySetup("image_tokens", max_completion_tokens=MAX_COMPLETION_TOKENS)
    )


def _learn_to_write(
    policy: emu3.Emu3,
    rng: random.Random,
    name: str,
    steps: int,
    answer: Answer,
    peak_rate: float,
    batch: int = 48,
) -> None:
    """Supervised fine-tuning."""

    def loss_of(step: int) -> torch.Tensor:
        kinds = rng.choices(list(KINDS), list(KINDS.values()), k=batch)
        rows = [example(policy, rng, kind, answer) for kind in kinds]
        nll_B = -policy.module(policy.collate(rows)).logprobs.sum(1)
        return nll_B.mean() / NUM_WRITTEN

    check = partial(p_right, policy)
    fit(name, policy.module.parameters(), steps, peak_rate, loss_of, check, check_every=200)


def example(policy: emu3.Emu3, rng: random.Random, kind: str, answer: Answer) -> Example:
    while True:
        scene = make_centred_scene(rng)
        task = make_instruction(rng, scene)
        if task.kind == kind:
            break
    edited = scene
    for op in answer(rng, scene, task):
        edited = apply(edited, op)
    prompt = policy.build_prompt(Sample("", task.instruction, source_codes=encode(scene)))
    return prompt, policy.prompts.picture_completion(encode(edited))


@torch.no_grad()
def p_right(policy: emu3.Emu3, num_per_kind: int = 48) -> dict[str, float]:
    """Mean probability of the right picture, by kind of instruction."""
    rng, means = random.Random(7), {}
    for kind in KINDS:
        rows = [example(policy, rng, kind, right) for _ in range(num_per_kind)]
        p = policy.module(policy.collate(rows)).logprobs.sum(1).exp()
        means[kind] = round(p.mean().item(), 3)
    return means
