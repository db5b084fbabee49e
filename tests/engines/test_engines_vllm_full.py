"""vLLM without an adapter in it: full fine-tuning, on a base that an editor's text encoder gives
(tied embeddings), and a LoRA that is merged.

Its own file: one engine is closed before another starts, in the same process.
"""

import pytest
import tiny_policy
import tiny_qwen
import torch
from tiny_engines import max_dlogp
from tiny_rounding import NATS

from rl.api.engine import EngineSetup
from rl.api.policy import PolicySetup
from rl.api.types import SamplingParams
from rl.engines.vllm import plug as vllm_engine
from rl.policies.qwen2_5_vl import plug as qwen2_5_vl

PARAMS = SamplingParams(1.0, top_p=1.0, top_k=-1, max_tokens=12, num_completions=4)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tiny_qwen.save_policy_folder(tmp_path_factory.mktemp("policy"))
    editor = tmp_path_factory.mktemp("editor")
    text_encoder = tiny_qwen.make_model(tiny_qwen.make_tokenizer(), seed=7, tied=True)
    text_encoder.save_pretrained(editor / "text_encoder")
    config = qwen2_5_vl.Config(
        type="",
        model_path=folder,
        init_text_encoder_from=str(editor),
        dtype="float32",
        lora=None,
        max_prompt_tokens=128,
    )
    return qwen2_5_vl.Qwen25VL(
        config, PolicySetup("hidden_states", template=tiny_qwen.TEMPLATE, max_completion_tokens=12)
    )


@pytest.fixture(scope="module")
def engine(policy):
    found = torch.distributed.is_initialized()
    if not found:  # as DeepSpeed makes it for one process
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    group = torch.distributed.GroupMember.WORLD
    config = vllm_engine.Config(type="vllm", kv_cache_memory_mb=64, max_num_seqs=16)
    engine = vllm_engine.VllmEngine(config, EngineSetup(policy, "cpu", sharded=True))
    yield engine
    engine.close()
    assert torch.distributed.GroupMember.WORLD is group is not None, "it is not the engine's"
    if not found:
        torch.distributed.destroy_process_group()


def test_full_weights_arrive_after_every_update(engine, policy):
    """The tower is frozen and not sent; the tied head is sent, because vLLM keeps its own. As where
    the trainer's weights are sharded, the engine looks at the pictures itself."""
    prompts_P = [policy.build_prompt(tiny_qwen.sample(i, width=64 * (i + 1))) for i in range(2)]
    trainable = {n: p for n, p in policy.module.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trainable.values(), lr=1e-3)

    for iteration in range(3):
        completions_PG = engine.generate(prompts_P, PARAMS, [10 * iteration, 1000])
        assert max_dlogp(policy, prompts_P, completions_PG) <= NATS
        rows = [(prompts_P[0], completion.token_ids) for completion in completions_PG[0]]
        policy.module(policy.collate(rows)).logprobs.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert max_dlogp(policy, prompts_P, completions_PG) > 1e-2, "the check can fail"
        engine.load_weights(policy.export_weights(trainable, iteration))
        assert engine.held_fingerprint() is None


@pytest.mark.slow
def test_a_merged_adapter_arrives_after_every_update(tmp_path):
    """q and v alone: vLLM fuses them with k, and a part of a fused matrix alone corrupts it."""
    folder = tiny_qwen.save_policy_folder(tmp_path)
    lora = {"r": 4, "alpha": 6, "target_modules": ["q_proj", "v_proj"]}
    policy = tiny_policy.make_policy(folder, lora=lora, max_prompt_tokens=128)
    config = vllm_engine.Config(
        type="vllm", kv_cache_memory_mb=64, max_num_seqs=16, adapter="merged"
    )
    with pytest.raises(ValueError, match="ZeRO-3"):
        vllm_engine.VllmEngine(config, EngineSetup(policy, "cpu", sharded=True))
    engine = vllm_engine.VllmEngine(config, EngineSetup(policy, "cpu"))
    prompts_P = [policy.build_prompt(tiny_qwen.sample(i, width=64 * (i + 1))) for i in range(2)]
    trainable = {n: p for n, p in policy.module.named_parameters() if p.requires_grad}
    for iteration in range(3):
        engine.load_weights(policy.export_weights(trainable, iteration))
        completions_PG = engine.generate(prompts_P, PARAMS, [10 * iteration, 1000])
        assert max_dlogp(policy, prompts_P, completions_PG) <= NATS
        with torch.no_grad():
            for parameter in trainable.values():
                parameter.add_(0.05)
        assert max_dlogp(policy, prompts_P, completions_PG) > 1e-2, "the check can fail"
    engine.close()
