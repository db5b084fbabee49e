"""Two ranks, one process group, one vLLM each: they sample different prompts and both end.

Once with a Qwen2.5-VL, once with an adapted Emu3 whose pictures are held to their grids.
"""

import pytest
from tiny_ranks import run_ranks
from tiny_rounding import NATS


def sample_train_and_sync(folder: str) -> dict[str, object]:
    """What one rank does in an iteration; the number of prompts differs between the ranks."""
    import tiny_qwen
    import torch
    from tiny_engines import max_dlogp

    from rl.api.engine import EngineSetup
    from rl.api.policy import PolicySetup
    from rl.api.types import SamplingParams
    from rl.engines.vllm import vllm as vllm_engine
    from rl.policies import qwen2_5_vl
    from rl.ranks.dist import Dist

    dist = Dist.from_env("cpu")
    policy = qwen2_5_vl.Qwen25VL(
        qwen2_5_vl.Config(type="", model_path=folder, dtype="float32", max_prompt_tokens=128),
        PolicySetup("hidden_states", template=tiny_qwen.TEMPLATE, max_completion_tokens=8),
    )
    config = vllm_engine.Config(type="vllm", kv_cache_memory_mb=64, max_num_seqs=8)
    engine = vllm_engine.VllmEngine(config, EngineSetup(policy, dist.device, dist.world_size))
    params = SamplingParams(1.0, top_p=1.0, top_k=-1, max_tokens=8, num_completions=2)
    prompts_P = [policy.build_prompt(tiny_qwen.sample(i)) for i in range(1 + 2 * dist.rank)]
    trainable = {n: p for n, p in policy.module.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for parameter in trainable.values():
            parameter.add_(0.05)
    weights = policy.export_weights(trainable, 1)
    engine.load_weights(weights)
    completions_PG = engine.generate(prompts_P, params, list(range(0, 10 * len(prompts_P), 10)))
    difference = max_dlogp(policy, prompts_P, completions_PG)
    engine.close()
    total = dist.sum_(torch.tensor([1.0]))  # the trainer's group outlives the engine
    dist.close()
    return {
        "max_dlogp": difference,
        "first": completions_PG[0][0].token_ids,
        "prompts": len(completions_PG),
        "total": float(total),
    }


@pytest.mark.slow
def test_two_ranks_sample_on_their_own_and_their_group_survives(tmp_path):
    import tiny_qwen

    folder = tiny_qwen.save_policy_folder(tmp_path / "policy")
    first, second = run_ranks(sample_train_and_sync, 2, folder)
    assert (first["prompts"], second["prompts"]) == (1, 3)
    assert first["total"] == second["total"] == 2.0
    assert first["first"] == second["first"], "one seed, one prompt, one adapter"
    assert max(first["max_dlogp"], second["max_dlogp"]) <= NATS


def draw_with_an_adapted_emu3(folder: str) -> dict[str, object]:
    """One rank's prompts under an adapter, which arrives twice and is read back twice."""
    import tiny_image_writer as tiny
    import torch
    from tiny_engines import max_dlogp

    from rl.api.engine import EngineSetup
    from rl.api.types import SamplingParams
    from rl.engines.vllm import vllm as vllm_engine
    from rl.ranks.dist import Dist

    dist = Dist.from_env("cpu")
    policy = tiny.build_policy(folder, lora={"r": 4, "alpha": 6})
    config = vllm_engine.Config(type="vllm", kv_cache_memory_mb=64, max_num_seqs=16)
    engine = vllm_engine.VllmEngine(config, EngineSetup(policy, dist.device, dist.world_size))
    params = SamplingParams(1.0, top_p=1.0, top_k=-1, max_tokens=60, num_completions=6)
    prompts_P = tiny.build_prompts(policy)[: 2 + 2 * dist.rank]
    trainable = {n: p for n, p in policy.module.named_parameters() if p.requires_grad}
    differences, held = [], []
    for version in range(2):
        with torch.no_grad():
            for parameter in trainable.values():
                parameter.add_(0.05)
        weights = policy.export_weights(trainable, version)
        engine.load_weights(weights)
        held.append(engine.held_fingerprint() == weights.fingerprint)
        seeds = [100 * p + version for p in range(len(prompts_P))]
        completions_PG = engine.generate(prompts_P, params, seeds)
        differences.append(max_dlogp(policy, prompts_P, completions_PG))
    rows = [
        (prompt, completion)
        for prompt, group in zip(prompts_P, completions_PG, strict=True)
        for completion in group
    ]
    right = [
        completion.forced
        == tiny.expected_forced(completion.token_ids, prompt.grid, policy.image_vocabulary)
        for prompt, completion in rows
    ]
    engine.close()
    dist.close()
    return {
        "max_dlogp": max(differences),
        "held": all(held),
        "right": all(right),
        "pictures": sum(completion.finish == "stop" for _, completion in rows),
        "first": completions_PG[0][0].token_ids,
    }


@pytest.mark.slow
def test_two_ranks_hold_pictures_to_their_grids_under_an_adapter(tmp_path):
    import tiny_image_writer

    folder = tiny_image_writer.save_writer_folder(tmp_path / "policy")
    for rank in (ranks := run_ranks(draw_with_an_adapted_emu3, 2, folder)):
        assert rank["max_dlogp"] <= NATS
        assert rank["held"] and rank["right"] and rank["pictures"] >= 3
    assert ranks[0]["first"] == ranks[1]["first"], "one seed, one prompt, one adapter"
