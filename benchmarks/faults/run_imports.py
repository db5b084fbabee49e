"""Imported once before the runs of a campaign fork; starts no thread, so that forking is safe."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import benchmarks.faults.asked
import benchmarks.faults.tiny_run  # noqa: F401
import rl.data.edit_jsonl
import rl.engines.transformers
import rl.policies.qwen2_5_vl
import rl.ranks.worker
import rl.renderers.none
import rl.run.metric_table  # noqa: F401

get_checkpoint_conversion_mapping("qwen2_5_vl")
