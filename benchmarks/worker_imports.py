"""Imports for `contest.py`'s workers, done once before they fork, as importing takes 30 s."""

import importlib
import os
import sys
from contextlib import suppress

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
sys.modules["vllm"] = None  # type: ignore[assignment] # unused; TRL would import it
for _name in (
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    "diffusers.pipelines.qwenimage.pipeline_qwenimage_edit",
    "peft",
    "deepspeed",
    "datasets",
    "benchmarks.our_worker",
    "benchmarks.trl_worker",
    "trl.trainer.grpo_trainer",
):
    with suppress(ImportError):  # TRL is not installed in every environment
        importlib.import_module(_name)
del sys.modules["vllm"]  # so that other processes that fork from here can import it
