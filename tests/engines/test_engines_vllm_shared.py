"""One copy of a LoRA policy's frozen weights for the trainer and the real vLLM, on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_qwen
import torch
from tiny_engines import max_dlogp
from tiny_learner import make_config, make_sequences, train
from tiny_policy import make_qwen
from tiny_rounding import FORWARD_TOL
from vllm.model_executor.layers import utils as vllm_layers

from rl.api.engine import EngineSetup
from rl.api.types import SamplingParams
from rl.engines.vllm import engine_weights
from rl.engines.vllm import vllm as vllm_engine
from rl.learner import weight_sync
from rl.learner.learner import Learner
from rl.ranks.dist import Dist

PARAMS = SamplingParams(1.0, top_p=1.0, top_k=-1, max_tokens=12, num_completions=4)


def keep_matrices(layer: Any, remove_weight: bool) -> None:
    """As on a GPU, the layer multiplies by its parameter: vLLM's CPU build would repack and drop
    it, and nothing could be shared."""
    layer.cpu_linear = torch.nn.functional.linear


def num_bytes(*modules: Any) -> int:
    """Memory of all parameters of the modules, shared memory once."""
    storages = [p.untyped_storage() for module in modules for p in module.parameters()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", FORWARD_TOL), ("bfloat16", 0.2)])
def test_one_copy_of_the_weights_serves_trainer_and_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, tolerance: float
) -> None:
    folder = tiny_qwen.save_policy_folder(tmp_path)
    policy = make_qwen(folder, dtype=dtype, temperature=1.0, max_completion_tokens=12)
    monkeypatch.setattr(vllm_layers, "dispatch_cpu_unquantized_gemm", keep_matrices)
    config = vllm_engine.Config(type="vllm", kv_cache_memory_mb=64, max_num_seqs=16)
    engine = vllm_engine.VllmEngine(config, EngineSetup(policy, "cpu"))
    [model] = engine._llm.collective_rpc(lambda worker: worker.model_runner.get_model())
    [sums] = engine._llm.collective_rpc(engine_weights.parameter_sums)
    learner, sequences = Learner(policy, make_config(), Dist(), 4), make_sequences(policy)
    rows = [(each.prompt, each.token_ids) for each in sequences]
    prompts_P = [policy.build_prompt(tiny_qwen.sample(i, width=64 * (i + 1))) for i in range(3)]
    frozen = policy.frozen_weights()

    def sync() -> None:
        """The adapter arrives, the base is as loaded, and both sides compute the same."""
        weight_sync.sync(engine, learner, prompts_P[0], dtype, 1.0, max_tokens=12)
        compare, args = engine_weights.parameter_difference, (sums,)
        assert engine._llm.collective_rpc(compare, args=args) == [""]
        completions_PG = engine.generate(prompts_P, PARAMS, [1, 2, 3])
        difference = max_dlogp(policy, prompts_P, completions_PG)
        print(f"{dtype}: |engine - trainer| <= {difference:.2g} nats")
        assert difference <= tolerance

    sync()
    start_state, before = learner.state(), learner.logprobs(rows)
    apart = num_bytes(policy.module, model)
    engine._share(frozen)
    assert learner.logprobs(rows) == before, "bit for bit"
    together = num_bytes(policy.module, model)
    print(f"{len(frozen)} tensors; both models: {apart} -> {together} bytes")
    assert apart - together == sum(weight.nbytes for weight in frozen.values())
    train(learner, sequences, 0, 1)  # a step of AdamW
    assert learner.logprobs(rows) != before
    sync()
    learner.load_state(*start_state)  # as a resumed run does
    assert learner.logprobs(rows) == before
    sync()
    engine.close()
