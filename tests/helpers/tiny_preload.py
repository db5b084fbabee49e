"""Imports that forked test processes share (`tiny_ranks`); they start no Python thread."""

import rl.train  # noqa: F401, I001 (first: it makes the others importable)

import deepspeed  # noqa: F401
import peft  # noqa: F401
import safetensors.torch  # noqa: F401
import torch.distributed  # noqa: F401
from diffusers import (  # noqa: F401
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageTransformer2DModel,
)
from transformers import (  # noqa: F401
    AutoConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessorPil,
)
