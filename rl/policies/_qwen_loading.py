"""Weights, tokenizer and image processor of a Qwen2.5-VL, from folders or hub ids.

What: whether they are there, loading, LoRA wrapping, and the one folder an outside sampler needs.
What not: prompts, the forward. Called by `qwen2_5_vl.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.config import missing_model
from rl.system.wheels import mend_mismatched_wheels

if TYPE_CHECKING:
    from rl.policies.qwen2_5_vl import Config

LANGUAGE_ONLY = r".*language_model\..*\.({names})"
"""The vision tower also has layers called gate_proj, up_proj and down_proj."""
TEXT_FILES = ("*.json", "*.jinja", "*.txt", "*.model")


def validate(config: Config) -> list[str]:
    """What is wrong across fields, each with its key and remedy; [] when all is well."""
    problems = missing_model("model_path", config.model_path)
    if config.init_text_encoder_from:
        problems += missing_model("init_text_encoder_from", config.init_text_encoder_from)
    if config.adapter_path and not Path(config.adapter_path, "adapter_config.json").is_file():
        problems.append(f"adapter_path: {config.adapter_path!r} holds no adapter_config.json")
    if config.adapter_path and config.lora is None:
        problems.append("adapter_path: full fine-tuning (lora: null) trains no adapter; drop one")
    return problems


def load_tokenizer(config: Config) -> Any:
    """The policy's tokenizer. Raises OSError (transformers) naming what is missing."""
    mend_mismatched_wheels()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(config.model_path, revision=config.revision)


def load_image_processor(config: Config) -> Any:
    """The PIL image processor: no torchvision, and one set of pixels on every machine."""
    mend_mismatched_wheels()
    from transformers import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil.from_pretrained(
        config.model_path, revision=config.revision
    )
    if config.image_min_pixels is not None:
        processor.size["shortest_edge"] = config.image_min_pixels
    if config.image_max_pixels is not None:
        processor.size["longest_edge"] = config.image_max_pixels
    return processor


def load_model(config: Config) -> Any:
    """`Qwen2_5_VLForConditionalGeneration` on the CPU, in the configured dtype, not yet adapted."""
    mend_mismatched_wheels()
    import torch
    from transformers import Qwen2_5_VLForConditionalGeneration
    from transformers.utils import logging

    source: dict[str, Any] = {"revision": config.revision}
    path = config.model_path
    if config.init_text_encoder_from:
        path = config.init_text_encoder_from
        source = {"subfolder": config.text_encoder_subfolder}
    # Of the bars only that of a download stays: the hub's own.
    previous = logging.set_tqdm_hook(
        lambda make, args, options: make(*args, **{**options, "disable": True})
    )
    try:
        return Qwen2_5_VLForConditionalGeneration.from_pretrained(
            path,
            dtype=getattr(torch, config.dtype),
            attn_implementation=config.attn_implementation,
            **source,
        )
    finally:
        logging.set_tqdm_hook(previous)


def adapt(model: Any, config: Config) -> Any:
    """The model with a trainable LoRA, or itself with what is to be trained marked so.

    Raises ValueError when `adapter_path` holds another shape than `lora` asks for.
    """
    if config.lora is None:
        model.requires_grad_(True)
        model.model.visual.requires_grad_(not config.freeze_vision_tower)
        return model
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model

    if config.adapter_path:
        adapted = PeftModel.from_pretrained(model, config.adapter_path, is_trainable=True)
        found = adapted.peft_config["default"]
        if (found.r, found.lora_alpha) != (config.lora.r, config.lora.alpha):
            raise ValueError(
                f"policy.adapter_path {config.adapter_path} has r={found.r} alpha="
                f"{found.lora_alpha}, policy.lora asks for r={config.lora.r} "
                f"alpha={config.lora.alpha}: make them equal"
            )
        return adapted
    names = list(config.lora.target_modules)
    language_only = LANGUAGE_ONLY.format(names="|".join(names))
    lora = LoraConfig(
        r=config.lora.r,
        lora_alpha=config.lora.alpha,
        lora_dropout=config.lora.dropout,
        target_modules=language_only if config.freeze_vision_tower else names,
    )
    with torch.random.fork_rng(devices=[]):
        # Every rank starts from the same adapter, whatever it drew before.
        torch.manual_seed(config.lora.init_seed)
        return get_peft_model(model, lora)


def sampler_folder(config: Config, overlay: Path) -> str:
    """What a sampler loads: the model path itself, or, when the weights come from an editor, a
    folder of links that joins those weights to the policy's tokenizer and processor files.

    `overlay` is filled only in the second case; the caller owns it.
    """
    if not config.init_text_encoder_from:
        pinned = config.revision is not None
        return str(_local(config.model_path, config.revision)) if pinned else config.model_path
    overlay.mkdir(parents=True, exist_ok=True)
    subfolder = config.text_encoder_subfolder
    weights = _local(config.init_text_encoder_from, None, [f"{subfolder}/*"]) / subfolder
    texts = _local(config.model_path, config.revision, list(TEXT_FILES))
    _link(weights, overlay)
    _link(texts, overlay, skip=("safetensors", ".bin"))
    return str(overlay)


def _link(folder: Path, overlay: Path, skip: tuple[str, ...] = ()) -> None:
    """Link every file whose name holds none of `skip`, unless the overlay has one of that name."""
    for file in folder.iterdir():
        link = overlay / file.name
        if file.is_file() and not link.exists() and not any(part in file.name for part in skip):
            link.symlink_to(file.resolve())


def _local(path: str, revision: str | None = None, patterns: list[str] | None = None) -> Path:
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, revision=revision, allow_patterns=patterns))
