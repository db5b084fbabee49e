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
from test_learner_zero import ADAM_EPS
from test_learner_zero3_ranks import many_pieces
from tiny_policy import Graded, relative_difference, run_ranks, snapshot, update
from tiny_rounding import NATS, STEPPED

from rl.api.policy import PolicySetup
from rl.learner.learner import Learner
from rl.policies.emu3 import plug as emu3
from rl.ranks.dist import Dist

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_emu3.save_policy_folder(tmp_path_factory.mktemp("policy"))


def learner_of(folder: str, dist: Dist, full: bool, **optimizer: Any) -> Learner:
    """LoRA with a reference, or a full fine-tune, which trains the head itself."""
    settings = {"max_tokens_per_micro_batch": 200, "adam_eps": ADAM_EPS, **optimizer}
    config = tiny_policy.make_config({} if full else {"kl_coeff": 0.1}, **settings)
    section = {"lora": None if full else {"r": 4, "alpha": 8}, "dtype": "float32"}
    policy = emu3.Emu3(
        emu3.Config(type="emu3", model_path=folder, **section),
        PolicySetup("image_tokens", max_completion_tokens=32, gradient_checkpointing=True),
    )
    if not full:
        tiny_policy.wake_lora(policy)
    return Learner(policy, config, dist, tiny_policy.NUM_ITERATIONS)


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
        learner = learner_of(folder, dist, full, backend="deepspeed", zero_stage=3)
        head, calls = learner._policy.module.base_model.lm_head, []
        head.register_forward_hook(lambda _module, _args, output: calls.append(output.shape))
        mine = sequences_of(learner._policy, dist.rank == 0, dist.rank)
        for iteration in range(2):
            update(learner, mine, iteration)
        rows = [(s.prompt, s.token_ids) for s in mine]
        return {"weights": snapshot(learner), "calls": calls, "logprobs": learner.logprobs(rows)}


@pytest.mark.parametrize("full", [False, True])
def test_pictures_on_one_rank_and_words_on_the_other(
    folder: str, tmp_path: Path, full: bool
) -> None:
    ranks = run_ranks(train_apart, 2, tmp_path, folder=folder, full=full)
    plain = learner_of(folder, Dist(), full)
    shares = [sequences_of(plain._policy, rank == 0, rank) for rank in range(2)]
    for iteration in range(2):
        update(plain, [*shares[0], *shares[1]], iteration)
    expected = plain.logprobs([(s.prompt, s.token_ids) for share in shares for s in share])
    assert relative_difference(ranks[0]["weights"], ranks[1]["weights"]) == 0
    assert relative_difference(ranks[0]["weights"], snapshot(plain)) <= STEPPED
    for ours, theirs in zip(ranks[0]["logprobs"] + ranks[1]["logprobs"], expected, strict=True):
        assert ours == pytest.approx(theirs, abs=NATS)
    # As many projections on both, slice by slice; words need none of the visual slice's.
    widths = [[shape[-1] for shape in rank["calls"]] for rank in ranks]
    assert widths[0] == widths[1] and set(widths[0]) == {528, 64}
    assert not any(rows for rows, width in ranks[1]["calls"] if width == 64)
