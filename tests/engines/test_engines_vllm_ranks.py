"""Two ranks of one process group, with one vLLM each, sample different prompts and both finish."""

from typing import Any

import pytest
from tiny_learner import run_ranks
from tiny_policy import saved


def draw_with_an_adapted_emu3(dist: Any, folder: str) -> dict[str, object]:
    """Samples one rank's prompts under an adapter that is synced and read back twice."""
    import tiny_image_writer as tiny
    import torch
    from tiny_engines import assert_follows, pairs, sampling, started
    from tiny_policy import make

    policy = make(folder, lora={"r": 4, "alpha": 6})
    prompts_P = tiny.build_prompts(policy)[: 2 + 2 * dist.rank]
    with started(policy, world_size=dist.world_size) as engine:
        params = sampling(0.7, max_tokens=60, num_completions=6)
        completions_PG = assert_follows(engine, policy, prompts_P, params, scale=0.05)
    rows = pairs(prompts_P, completions_PG)
    for prompt, completion in rows:
        ids, vocabulary = completion.token_ids, policy.image_vocabulary
        assert completion.forced == tiny.expected_forced(ids, prompt.grid, vocabulary)
    total = dist.sum_(torch.tensor([1.0]))  # the trainer's group outlives the engine
    return {
        "total": float(total),
        "pictures": sum(completion.finish == "stop" for _, completion in rows),
        "first": completions_PG[0][0].token_ids,
    }


@pytest.mark.slow
def test_two_ranks_with_an_adapter_keep_pictures_in_their_grids(tmp_path):
    folder = saved("emu3", fond_of_pictures=True)
    ranks = run_ranks(draw_with_an_adapted_emu3, 2, tmp_path, folder=folder)
    for rank in ranks:
        assert rank["total"] == 2.0 and rank["pictures"] >= 3
    assert ranks[0]["first"] == ranks[1]["first"], "one seed, one prompt, one adapter"
