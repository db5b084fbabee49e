"""The keys of `policy: { type: 'emu3' }`; loads an Emu3 in transformers' or in BAAI's format."""

from __future__ import annotations

import base64
import json
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from rl.api.policy import LoraSection
from rl.config.schema import MAX_TOKENS
from rl.policies.shared import model_loading
from rl.policies.shared.policy_base import TrainedPolicyConfig
from rl.progress import weights_counted

TEXT_SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *(f"<|extra_{i}|>" for i in range(205)),
)
"""Special tokens whose ids are between the byte pairs' and those of `VISION_FILE`."""
TIKTOKEN_FILE, VISION_FILE = "emu3.tiktoken", "emu3_vision_tokens.txt"
TOKENIZER_FILES = (("tokenizer.json", TIKTOKEN_FILE),)
TEXT_MODEL, PUBLISHED_MODEL = "emu3_text_model", "Emu3"
"""`model_type` of transformers' and of BAAI's configs."""

Steps = Annotated[int, Field(ge=0)]
Cycle = Annotated[int, Field(ge=1)]


class Config(TrainedPolicyConfig):
    """The policy section."""

    model_path: str
    """Folder or hub id of the weights: BAAI/Emu3-Gen, BAAI/Emu3-Stage1, or tuned from them."""
    tokenizer_path: str = ""
    """Folder or hub id of the tokenizer; '' = model_path."""
    assistant_prefill: str = "<|image start|>"
    """Text before every completion. '<|image start|>': a picture at once. " Let's think step by
    step. <|start thinking|>": words first. '': the model decides. Special tokens written here are
    special; `{height}` and `{width}` stand for the source's rows and columns of codes."""
    constrained: bool = True
    """True: sampling is constrained to the source's grid, with separate softmaxes for words and
    codes. False: free sampling, one softmax over everything."""
    lora: LoraSection | None = None
    """null = full fine-tuning."""
    max_prompt_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = 1536
    """Longest prompt, picture included (32 x 32 codes are 1,065 tokens); a longer one stops the
    run, naming its sample."""
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

    def trained(self, iteration: int) -> tuple[bool, bool]:
        """(whether text tokens, whether visual tokens are trained) in `iteration`, which counts
        from 0 over the whole run. Both switches off: both are; both on: what both of them train."""
        text = visual = True
        if self.train_text_tokens_only:
            trains_text = iteration % self.text_only_cycle_steps < self.text_only_steps
            text, visual = trains_text, not trains_text
        if self.train_vision_tokens_only:
            text &= iteration % self.vision_only_cycle_steps >= self.vision_only_steps
        return text, visual


def load_tokenizer(config: Config) -> Any:
    """Load `tokenizer.json` or BAAI's tiktoken vocabulary. Raises ValueError without either."""
    from transformers import PreTrainedTokenizerFast

    path = config.tokenizer_path or config.model_path
    revision = None if config.tokenizer_path else config.revision
    folder = model_loading.local_folder(path, revision, model_loading.TEXT_FILES)
    if (folder / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast.from_pretrained(folder)  # nosec B615 # a local folder
    if (folder / TIKTOKEN_FILE).is_file() and (folder / VISION_FILE).is_file():
        return PreTrainedTokenizerFast(
            tokenizer_object=_read_tiktoken(folder),
            bos_token="<|extra_203|>",
            eos_token="<|extra_204|>",
            pad_token="<|endoftext|>",
            clean_up_tokenization_spaces=False,
        )
    raise ValueError(
        f"policy.tokenizer_path: {path!r} holds neither tokenizer.json nor {TIKTOKEN_FILE} with "
        f"{VISION_FILE}; name the repository the model was trained with (BAAI/Emu3-Stage1)"
    )


def _read_tiktoken(folder: Path) -> Any:
    """A `tokenizers` tokenizer: byte-level BPE with Qwen's split pattern. Ids are in the order byte
    pairs, `TEXT_SPECIALS`, vision tokens."""
    from tokenizers import normalizers
    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    class Converter(TikTokenConverter):
        """tiktoken's own reader caches by path, and would miss that a file has changed."""

        @staticmethod
        def load_tiktoken_bpe(path: str) -> dict[bytes, int]:
            lines = (line.split() for line in Path(path).read_bytes().split(b"\n"))
            return {base64.b64decode(token): int(rank) for token, rank in filter(None, lines)}

    vision = (folder / VISION_FILE).read_bytes().decode().split("\n")
    tokenizer = Converter(
        vocab_file=str(folder / TIKTOKEN_FILE),
        pattern=PRETOKENIZE_REGEX,
        extra_special_tokens=[*TEXT_SPECIALS, *(line.strip() for line in vision if line.strip())],
    ).converted()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def read_model_config(folder: Path) -> Any:
    """`Emu3TextConfig` of a model folder in either format, with dropout 0, because sampling runs
    without dropout. Raises ValueError if `config.json` is of another model."""
    from transformers import Emu3TextConfig

    stored = json.loads((folder / "config.json").read_text())
    model_type = stored.get("model_type")
    if model_type not in (TEXT_MODEL, PUBLISHED_MODEL):
        raise ValueError(
            f"policy.model_path: {folder} holds a {model_type!r}, not an Emu3 language model: "
            f"{TEXT_MODEL!r}, or {PUBLISHED_MODEL!r} as in BAAI/Emu3-Gen and BAAI/Emu3-Stage1"
        )
    names = {"rope_scaling", "rope_theta", *(field.name for field in fields(Emu3TextConfig))}
    config = Emu3TextConfig.from_dict({k: v for k, v in stored.items() if k in names})
    config.architectures = ["Emu3ForCausalLM"]
    config.attention_dropout = 0.0
    return config


def load_model(config: Config) -> Any:
    """`Emu3ForCausalLM` on the CPU, in the configured dtype, without an adapter. Both formats have
    the same weight names.

    Raises ValueError when the files lack weights.
    """
    import torch
    from transformers import Emu3ForCausalLM

    from rl.policies.shared.packed_attention import register

    folder = model_folder(config)
    with weights_counted():
        model, report = Emu3ForCausalLM.from_pretrained(  # nosec B615 # a local folder
            folder,
            config=read_model_config(folder),
            dtype=getattr(torch, config.dtype),
            attn_implementation=register(),
            use_safetensors=True,
            output_loading_info=True,
        )
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ValueError(
            f"policy.model_path: {config.model_path!r} lacks {len(missing)} weights of an Emu3 "
            f"({missing[0]}, ...)"
        )
    return model


def model_folder(config: Config) -> Path:
    """The folder of weights and text files, downloaded if needed."""
    patterns = [*model_loading.TEXT_FILES, "*.safetensors"]
    return model_loading.local_folder(config.model_path, config.revision, patterns)
