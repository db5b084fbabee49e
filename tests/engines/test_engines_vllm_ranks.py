"""Two ranks of one process group, with one vLLM each, sample different prompts and both finish."""

import pytest
from tiny_ranks import run_ranks
from tiny_rounding import FORWARD_TOL


def draw_with_an_adapted_emu3(folder: str) -> dict[str, object]:
    """Samples one rank's prompts under an adapter that is synced and read back twice."""
    import tiny_image_writer as tiny
    import torch
    from tiny_engines import max_dlogp

    from rl.api.engine import EngineSetup
    from rl.api.types import SamplingParams
    from rl.engines import vllm as vllm_engine
    from rl.ranks.dist import Dist

    dist = Dist.from_env("cpu")
    policy = tiny.build_policy(folder, lora={"r": 4, "alpha": 6})
    config = vllm_engine.Config(type="vllm", max_num_seqs=16)
    engine = vllm_engine.VllmEngine(config, EngineSetup(policy, dist.device, dist.world_size))
    params = SamplingParams(1.0, top_p=1.0, top_k=-1, max_tokens=60, num_completions=6)
    prompts_P = tiny.build_prompts(policy)[: 2 + 2 * dist.rank]
    trainable = {n: p for n, p in policy.module.named_parameters() if p.requires_grad}
    differences, synced = [], []
    for version in range(2):
        with torch.no_grad():
            for parameter in trainable.values():
                parameter.add_(0.05)
        weights = policy.export_weights(trainable, version)
        engine.load_weights(weights)
        synced.append(engine.held_fingerprint() == weights.fingerprint)
        seeds = [100 * p + version for p in range(len(prompts_P))]
        completions_PG = engine.generate(prompts_P, params, seeds)
        differences.append(max_dlogp(policy, prompts_P, completions_PG))
    rows = [
        (prompt, completion)
        for prompt, group in zip(prompts_P, completions_PG, strict=True)
        for completion in group
    ]
    follows_grid = [
        completion.forced
        == tiny.expected_forced(completion.token_ids, prompt.grid, policy.image_vocabulary)
        for prompt, completion in rows
    ]
    engine.close()
    total = dist.sum_(torch.tensor([1.0]))  # the trainer's group outlives the engine
    dist.close()
    return {
        "max_dlogp": max(differences),
        "total": float(total),
        "synced": all(synced),
        "follows_grid": all(follows_grid),
        "pictures": sum(completion.finish == "stop" for _, completion in rows),
        "first": completions_PG[0][0].token_ids,
    }


@pytest.mark.slow
def test_two_ranks_with_an_adapter_keep_pictures_in_their_grids(tmp_path):
    import tiny_image_writer

    folder = tiny_image_writer.save_writer_folder(tmp_path / "policy")
    for rank in (ranks := run_ranks(draw_with_an_adapted_emu3, 2, folder)):
        assert rank["max_dlogp"] <= FORWARD_TOL and rank["total"] == 2.0
        assert rank["synced"] and rank["follows_grid"] and rank["pictures"] >= 3
    assert ranks[0]["first"] == ranks[1]["first"], "one seed, one prompt, one adapter"
