"""The lines of a model card that say how its model is used."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from rl.record.card_facts import at, base_of, is_of_hub
from rl.record.markdown import text

Form = Literal["adapter", "model", "text-encoder"]
"""A PEFT adapter; a whole model with tokenizer; the encoder's folder of a diffusers pipeline."""
PIPELINES = {
    "qwen_image_edit": "QwenImageEditPipeline",
    "qwen_image_edit_plus": "QwenImageEditPlusPipeline",
    "qwen_image_21": "QwenImage21Pipeline",
}
"""Renderer -> diffusers' class of it."""
MODEL_CLASSES = {"emu3": "Emu3ForCausalLM", "qwen3_vl": "Qwen3VLForConditionalGeneration"}
"""Policy -> transformers' class of it, where it is no Qwen2.5-VL."""


def use(config: Mapping[str, Any], form: Form) -> list[str]:
    """Lines of Markdown; the only foreign words in its code are hub ids."""
    base, renderer = base_of(config), str(at(config, "renderer.type"))
    here = base if is_of_hub(base) else "<the base>"
    place = f'"{here}"'
    if at(config, "policy.init_text_encoder_from"):
        place += ', subfolder="text_encoder"'
    policy = str(at(config, "policy.type"))
    model_class = MODEL_CLASSES.get(policy, "Qwen2_5_VLForConditionalGeneration")
    lines = ["## Use", ""]
    if form == "text-encoder":
        pipeline = PIPELINES.get(renderer, "DiffusionPipeline")
        editor = at(config, "renderer.model_path")
        editor = editor if is_of_hub(editor) else "<the editor>"
        python = [
            "import torch",
            f"from diffusers import {pipeline}",
            f"from transformers import {model_class}",
            "",
            f'encoder = {model_class}.from_pretrained("<this folder>", dtype=torch.bfloat16)',
            f'pipeline = {pipeline}.from_pretrained("{editor}", text_encoder=encoder)',
        ]
        lines += ["```python", *python, "```", "", _STOCK_PIPELINE, ""]
    elif form == "adapter":
        python = [
            "from peft import PeftModel",
            f"from transformers import {model_class}",
            "",
            f"base = {model_class}.from_pretrained({place})",
            'model = PeftModel.from_pretrained(base, "<this folder>")',
        ]
        lines += [
            "Trained further from here: `policy.adapter_path: '<this folder>'`. The tokenizer"
            + ("" if model_class == "Emu3ForCausalLM" else " and the image processor")
            + " are the base's own"
            + _words(config)
            + ".",
            "",
            "```python",
            *python,
            "```",
            "",
        ]
    else:
        python = [
            f"from transformers import AutoTokenizer, {model_class}",
            "",
            f'model = {model_class}.from_pretrained("<this folder>")',
            'tokenizer = AutoTokenizer.from_pretrained("<this folder>")',
        ]
        lines += ["```python", *python, "```", ""]
    return lines + _command(config, renderer)


_STOCK_PIPELINE = (
    "A stock pipeline hands this encoder the words that its user typed. In training the renderer "
    "read something else: the hidden states of the description that the policy itself wrote, "
    "after the user's words. So what is measured below is not what this folder alone gives. `rl "
    "edit` writes the description and renders from its states."
)


def _words(config: Mapping[str, Any]) -> str:
    """Where they lie, when not with the base."""
    words = at(config, "policy.model_path")
    apart = at(config, "policy.init_text_encoder_from")
    return f" (of {text(words)})" if apart and is_of_hub(words) else ""


def _command(config: Mapping[str, Any], renderer: str) -> list[str]:
    """What runs it as it was trained."""
    run = str(config.get("run_name", ""))
    run = f"runs/{run}" if re.fullmatch(r"[\w.-]+", run) else "<its run folder>"
    commands = {
        **dict.fromkeys(
            (*PIPELINES, "emu3_vq"), f'rl edit --run {run} photo.jpg "make the sky red"'
        ),
        "sd3": f'rl enhance --adapter {run} "a cat made of rain"',
    }
    if renderer not in commands:
        return []
    return [
        "As it was trained, with the project that trained it:",
        "",
        f"    {commands[renderer]}",
        "",
    ]
