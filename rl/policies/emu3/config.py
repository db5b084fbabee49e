"""The keys of `policy: { type: 'emu3' }`. Read by all files of this folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rl.policies.shared.lora import LoraSection
from rl.policies.shared.training_cycle import TokenSchedule

if TYPE_CHECKING:
    pass


class Config(TokenSchedule):
    """The policy section."""

    type: str
    """'emu3'."""
    model_path: str
    """Folder or hub id of the weights: BAAI/Emu3-Gen, BAAI/Emu3-Stage1, or tuned from them."""
    revision: str | None = None
    """Hub revision of model_path; null = newest."""
    tokenizer_path: str = ""
    """Folder or hub id of the tokenizer; '' = model_path."""
    assistant_prefill: str = "<|image start|>"
    """What every completion continues. '<|image start|>': a picture at once. " Let's think step by
    step. <|start thinking|>": words first. '': as the model likes. Special tokens spelt here are
    special; `{height}` and `{width}` stand for the source's rows and columns of codes."""
    constrained: bool = True
    """True: sampling is held to the source's grid, and words and codes have a softmax each. False:
    free sampling, one softmax over everything."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Of the weights in memory; log-probs are float32 always."""
    device: str = "auto"
    """'auto' = this rank's device; else 'cpu', 'cuda:1', ..."""
    max_memory_gb: Annotated[float, Field(gt=0)] | None = None
    """Most GPU memory trainer and sampler may take together, GB (1e9 bytes); null = no limit."""
    lora: LoraSection | None = None
    """null = full fine-tuning."""
    adapter_path: str = ""
    """PEFT adapter folder to start from ('' = a fresh one); must fit `lora`."""
    attn_implementation: Literal["auto", "sdpa", "varlen"] = "auto"
    """Attention kernel of the trainer's packed rows: 'varlen' (flash attention, half precision on
    CUDA), 'sdpa' (everywhere), 'auto' = 'varlen' where it runs."""
    max_prompt_tokens: Annotated[int, Field(ge=1)] = 1536
    """Longest prompt, picture included (32 x 32 codes are 1,065 tokens); a longer one stops the
    run, naming its sample."""
