"""Imports for the campaign's runs, done once before they fork; it starts no thread."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import benchmarks.faults.judge_score
import benchmarks.faults.tiny_run  # noqa: F401
import rl.data.sources
import rl.engines.transformers
import rl.policies.qwen_vl
import rl.ranks.worker
import rl.renderers.none
import rl.run.metric_table  # noqa: F401

get_checkpoint_conversion_mapping("qwen2_5_vl")
