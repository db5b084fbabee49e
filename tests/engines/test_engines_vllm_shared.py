"""One copy of a LoRA policy's frozen weights for the trainer and the real vLLM, on a CPU.

vLLM's CPU build repacks the matrices of linear layers and drops the originals, so that nothing can
be shared; its GPU build keeps them. Here the CPU multiplies by them with `F.linear`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_qwen
import torch
from tiny_engines import max_dlogp
from tiny_learner import make_config, make_sequences, train
from tiny_policy import make_qwen
from tiny_rounding import NATS
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
    """As on a GPU: the forward multiplies by the parameter itself."""
    layer.cpu_linear = torch.nn.functional.linear


def start(policy: Any, **section: Any) -> vllm_engine.VllmEngine:
    config = vllm_engine.Config(type="vllm", kv_cache_memory_mb=64, max_num_seqs=16, **section)
    return vllm_engine.VllmEngine(config, EngineSetup(policy, "cpu"))


def in_worker(engine: vllm_engine.VllmEngine, function: Any, *args: Any) -> Any:
    [result] = engine._llm.collective_rpc(function, args=args)
    return result


def num_bytes(*modules: Any) -> int:
    """Memory of all parameters of the modules, shared memory once."""
    storages = [p.untyped_storage() for module in modules for p in module.parameters()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.fixture
def policy(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    folder = tiny_qwen.save_policy_folder(tmp_path)
    return make_qwen(folder, dtype=request.param, temperature=1.0, max_completion_tokens=12)


@pytest.fixture
def engine(policy: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[vllm_engine.VllmEngine]:
    monkeypatch.setattr(vllm_layers, "dispatch_cpu_unquantized_gemm", keep_matrices)
    engine = start(policy)
    yield engine
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "tolerance"), [("float32", NATS), ("bfloat16", 0.2)], indirect=["policy"]
)
def test_one_copy_of_the_weights_serves_trainer_and_engine(
    policy: Any, engine: vllm_engine.VllmEngine, tolerance: float
) -> None:
    learner = Learner(policy, make_config(), Dist(), 4)
    sequences = make_sequences(policy)
    rows = [(each.prompt, each.token_ids) for each in sequences]
    prompts_P = [policy.build_prompt(tiny_qwen.sample(i, width=64 * (i + 1))) for i in range(3)]
    model = in_worker(engine, lambda worker: worker.model_runner.get_model())
    frozen = policy.frozen_weights()
    sums = in_worker(engine, engine_weights.parameter_sums)
    start_state = learner.state()

    def after_sync() -> float:
        """Largest |engine - trainer|, nats, with the base weights unchanged and the adapter read
        back."""
        dtype = policy.config.dtype
        weight_sync.sync(engine, learner, prompts_P[0], dtype, 1.0, max_tokens=12)
        assert in_worker(engine, engine_weights.parameter_difference, sums) == ""
        completions_PG = engine.generate(prompts_P, PARAMS, [1, 2, 3])
        difference = max_dlogp(policy, prompts_P, completions_PG)
        print(f"|engine - trainer| <= {difference:.2g} nats")
        assert difference <= tolerance
        return difference

    before, unshared = learner.logprobs(rows), after_sync()
    apart = num_bytes(policy.module, model)

    engine._share(frozen)

    assert learner.logprobs(rows) == before, "bit for bit"
    together = num_bytes(policy.module, model)
    print(f"\n{len(frozen)} tensors; both models: {apart} -> {together} bytes")
    assert apart - together == sum(weight.nbytes for weight in frozen.values())
    assert after_sync() == unshared
    train(learner, sequences, 0, 1)  # a step of AdamW
    assert learner.logprobs(rows) != before
    after_sync()
    learner.load_state(*start_state)  # as a resumed run does
    assert learner.logprobs(rows) == before and after_sync() == unshared
