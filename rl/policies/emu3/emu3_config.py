"""The keys of `policy: { type: 'emu3' }`."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import Field

from rl.api.policy import LoraSection
from rl.config.schema import MAX_TOKENS, Section
from rl.policies.shared.policy_base import TrainedPolicyConfig

Steps = Annotated[int, Field(ge=0)]
Cycle = Annotated[int, Field(ge=1)]


class Trained(NamedTuple):
    """Which tokens carry loss in an iteration."""

    text: bool
    visual: bool


class TokenSchedule(Section):
    """Keys of a policy's section; with both switches off every token trains, always."""

    train_text_tokens_only: bool = False
    """Train text alone in the first `text_only_steps` iterations of every `text_only_cycle_steps`,
    visual tokens alone in the others."""
    text_only_cycle_steps: Cycle = 10
    """Length of that cycle, iterations."""
    text_only_steps: Steps = 10
    """Of these, how many train text."""
    train_vision_tokens_only: bool = False
    """Train visual tokens alone in the first `vision_only_steps` iterations of every
    `vision_only_cycle_steps`, everything in the others."""
    vision_only_cycle_steps: Cycle = 10
    """Length of that cycle, iterations."""
    vision_only_steps: Steps = 10
    """Of these, how many train visual tokens alone."""

    def trained(self, iteration: int) -> Trained:
        """`iteration`: 0-based, over the whole run. With both switches on: what both train."""
        text = visual = True
        if self.train_text_tokens_only:
            words = iteration % self.text_only_cycle_steps < self.text_only_steps
            text, visual = words, not words
        if self.train_vision_tokens_only:
            text &= iteration % self.vision_only_cycle_steps >= self.vision_only_steps
        return Trained(text, visual)

    def schedule_problems(self) -> list[str]:
        problems = [
            f"{kind}_only_steps: {steps} iterations do not fit in a cycle of {cycle} "
            f"({kind}_only_cycle_steps); for always, make them equal"
            for kind, steps, cycle in (
                ("text", self.text_only_steps, self.text_only_cycle_steps),
                ("vision", self.vision_only_steps, self.vision_only_cycle_steps),
            )
            if steps > cycle
        ]
        # Every cycle begins in iteration 0, so that is where two cycles meet if they ever do.
        if not any(self.trained(0)):
            problems.append(
                "train_text_tokens_only, train_vision_tokens_only: together they train nothing in "
                "iteration 0; keep one"
            )
        return problems


class Config(TokenSchedule, TrainedPolicyConfig):
    """The policy section."""

    model_path: str
    """Folder or hub id of the weights: BAAI/Emu3-Gen, BAAI/Emu3-Stage1, or tuned from them."""
    tokenizer_path: str = ""
    """Folder or hub id of the tokenizer; '' = model_path."""
    assistant_prefill: str = "<|image start|>"
    """What every completion continues. '<|image start|>': a picture at once. " Let's think step by
    step. <|start thinking|>": words first. '': as the model likes. Special tokens spelt here are
    special; `{height}` and `{width}` stand for the source's rows and columns of codes."""
    constrained: bool = True
    """True: sampling is held to the source's grid, and words and codes have a softmax each. False:
    free sampling, one softmax over everything."""
    lora: LoraSection | None = None
    """null = full fine-tuning."""
    max_prompt_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = 1536
    """Longest prompt, picture included (32 x 32 codes are 1,065 tokens); a longer one stops the
    run, naming its sample."""
