"""The imports of a contest's workers, which fork off behind them: half a minute of CPU once."""

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
