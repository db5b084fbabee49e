"""vLLM serves a published Emu3, whose config and tokenizer it cannot read itself."""

from __future__ import annotations

import pytest
import tiny_emu3
from tiny_act import act_group
from tiny_engines import max_dlogp
from tiny_policy import TEMPERATURE, make_emu3, move, trainable
from tiny_rounding import FORWARD_TOL

from rl.api.engine import EngineSetup
from rl.api.types import SamplingParams
from rl.engines import vllm as vllm_engine

pytestmark = pytest.mark.slow


def test_vllm_and_the_trainer_agree_on_the_log_probs_of_a_published_emu3(tmp_path):
    policy = make_emu3(tiny_emu3.save_published_folder(tmp_path, fond_of_pictures=True))
    engine = vllm_engine.VllmEngine(vllm_engine.Config(type="vllm"), EngineSetup(policy, "cpu"))
    try:
        move(policy, 0.02)
        engine.load_weights(policy.export_weights(trainable(policy), 1))
        grids = [(3, 2), (4, 4), (1, 1)]
        samples = [tiny_emu3.sample(i, height=h, width=w) for i, (h, w) in enumerate(grids)]
        prompts = [policy.build_prompt(sample) for sample in samples]
        params = SamplingParams(TEMPERATURE, 1.0, -1, max_tokens=50, num_completions=6)
        groups = engine.generate(prompts, params, [0, 100, 200])
    finally:
        engine.close()
    for prompt, group in zip(prompts, groups, strict=True):
        actions = act_group(policy, prompt, group)
        pictures = [action.payload for action in actions if action.failure is None]
        assert pictures and all(codes.shape == prompt.grid for codes in pictures)
    assert max_dlogp(policy, prompts, groups) < FORWARD_TOL
