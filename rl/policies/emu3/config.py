"""The keys of `policy: { type: 'emu3' }`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rl.api.policy import LoraSection
from rl.policies.shared.policy import TrainedPolicyConfig
from rl.policies.shared.training_cycle import TokenSchedule


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
    max_prompt_tokens: Annotated[int, Field(ge=1)] = 1536
    """Longest prompt, picture included (32 x 32 codes are 1,065 tokens); a longer one stops the
    run, naming its sample."""
