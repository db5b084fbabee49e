"""What a worker of a contest imports, once for all of them: they fork off where this was read.

Half a minute of CPU each otherwise, a dozen times in the shortest of runs.
"""

import importlib
import os
import sys
from contextlib import suppress

import rl  # noqa: F401 (makes what follows importable)

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
sys.modules["vllm"] = None  # type: ignore[assignment] # nothing samples; TRL would import it
for _name in (
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    "diffusers.pipelines.qwenimage.pipeline_qwenimage_edit",
    "peft",
    "deepspeed",
    "datasets",
    "benchmarks.our_side",
    "benchmarks.trl_side",
    "trl.trainer.grpo_trainer",
):
    with suppress(ImportError):  # the peer is not there in every environment
        importlib.import_module(_name)
del sys.modules["vllm"]  # others may fork off here that want it
