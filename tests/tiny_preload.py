"""What every loop and most ranks of the tests import (`tiny_ranks`); it starts no Python thread."""

from rl.ranks.wheels import mend_mismatched_wheels

mend_mismatched_wheels()

import deepspeed  # noqa: E402, F401
import peft  # noqa: E402, F401
import safetensors.torch  # noqa: E402, F401
import torch.distributed  # noqa: E402, F401
from diffusers import (  # noqa: E402, F401
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageTransformer2DModel,
)
from transformers import (  # noqa: E402, F401
    AutoConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessorPil,
)

import rl.train  # noqa: E402, F401
