"""Imports for `contest.py`'s workers, done once before they fork, as they take half a minute."""

import importlib
import os
import sys
from contextlib import suppress

import rl  # noqa: F401 (makes the imports below possible)

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
sys.modules["vllm"] = None  # type: ignore[assignment] # unused; TRL would import it
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
    with suppress(ImportError):  # TRL is not installed in every environment
        importlib.import_module(_name)
del sys.modules["vllm"]  # other processes that fork here may import it
