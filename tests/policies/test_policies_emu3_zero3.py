"""Emu3 under ZeRO-3: the head is gathered for each slice of the vocabulary, in step.

One rank writes pictures, the other words alone: slices of quite different lengths. Results are held
against one process that shards nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_emu3
import tiny_policy
from tiny_learner import (
    ADAM_EPS,
    NUM_ITERATIONS,
    Graded,
    assert_as_one_process,
    make_config,
    many_pieces,
    run_ranks,
    snapshot,
    update,
)

from rl.api.policy import PolicySetup
from rl.learner.learner import Learner
from rl.policies.emu3 import plug as emu3
from rl.ranks.dist import Dist

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_emu3.save_policy_folder(tmp_path_factory.mktemp("policy"))


def policy_of(folder: str, full: bool) -> emu3.Emu3:
    section = {"lora": None if full else {"r": 4, "alpha": 8}, "dtype": "float32"}
    policy = emu3.Emu3(
        emu3.Config(type="emu3", model_path=folder, **section),
        PolicySetup("image_tokens", max_completion_tokens=32, gradient_checkpointing=True),
    )
    tiny_policy.wake_lora(policy)
    return policy


def learner_of(policy: emu3.Emu3, dist: Dist, full: bool, **optimizer: Any) -> Learner:
    """LoRA with a reference, or a full fine-tune, which trains the head itself."""
    settings = {"max_tokens_per_micro_batch": 200, "adam_eps": ADAM_EPS, **optimizer}
    config = make_config({} if full else {"kl_coeff": 0.1}, **settings)
    return Learner(policy, config, dist, NUM_ITERATIONS)


def sequences_of(policy: Any, pictures: bool, seed: int) -> list[Graded]:
    """A group of three: pictures of 16 codes, or a word each."""
    prompt = policy.build_prompt(tiny_emu3.sample(seed))
    sequences = []
    for member, advantage in enumerate((1.0, -0.5, -0.5)):
        ids = policy.encode_completion("blue").token_ids
        if pictures:
            ids = policy.prompts.picture_completion(tiny_emu3.codes(10 * seed + member))
        mask, sampled = (True,) * len(ids), (-4.0,) * len(ids)
        sequences.append(Graded(prompt, ids, mask, advantage, sampled))
    return sequences


def train_apart(dist: Dist, out: Path, folder: str, full: bool) -> dict[str, Any]:
    with many_pieces():
        policy = policy_of(folder, full)
        learner = learner_of(policy, dist, full, backend="deepspeed", zero_stage=3)
        head, calls = policy.module.base_model.lm_head, []
        head.register_forward_hook(lambda _module, _args, output: calls.append(output.shape))
        mine = sequences_of(policy, dist.rank == 0, dist.rank)
        for iteration in range(2):
            update(learner, mine, iteration)
        rows = [(s.prompt, s.token_ids) for s in mine]
        return {"weights": snapshot(learner), "calls": calls, "logprobs": learner.logprobs(rows)}


@pytest.mark.parametrize("full", [False, True])
def test_pictures_on_one_rank_and_words_on_the_other(
    folder: str, tmp_path: Path, full: bool
) -> None:
    ranks = run_ranks(train_apart, 2, tmp_path, folder=folder, full=full)
    policy = policy_of(folder, full)
    plain = learner_of(policy, Dist(), full)
    shares = [sequences_of(policy, rank == 0, rank) for rank in range(2)]
    assert_as_one_process(ranks, plain, shares)
    # As many projections on both, slice by slice; words need none of the visual slice's.
    widths = [[shape[-1] for shape in rank["calls"]] for rank in ranks]
    assert widths[0] == widths[1] and set(widths[0]) == {528, 64}
    assert not any(rows for rows, width in ranks[1]["calls"] if width == 64)
