"""Questions of the tiny world have checkable answers that the policy never sees."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny_qwen
import torch
from tiny_config import REPO
from tiny_messages import holds

from rl.api.data import RowRules
from rl.api.types import Sample
from rl.build import resolve
from rl.check.compatibility import compatibility_problems
from rl.config.schema import load_config
from rl.policies.prompting import chat_template
from rl.policies.qwen_vl_prompts import QwenPrompts
from tiny_world import captions, questions
from tiny_world.data import shape_questions
from tiny_world.data.synthetic import SyntheticConfig
from tiny_world.scenes import BACKGROUNDS_RGB, RGB

SECRET = "zyxwvu"


def prompt_of(sample: Sample) -> Any:
    prompts = QwenPrompts(
        tiny_qwen.make_tokenizer(),
        tiny_qwen.make_image_processor(),
        chat_template("Think, then answer."),
        max_prompt_tokens=512,
    )
    prompt = prompts.prompt(sample, sample.instruction)
    assert SECRET not in prompts.tokenizer.decode(list(prompt.token_ids))
    return prompt


def test_the_answer_leaves_no_trace_in_the_prompt() -> None:
    question = tiny_qwen.sample(0, "How many dots?")
    secrets = {"hidden": {"answer": SECRET}, "reference": SECRET, "category": SECRET}
    plain, answered = prompt_of(question), prompt_of(replace(question, **secrets))
    assert plain.token_ids == answered.token_ids
    assert [image.tobytes() for image in plain.images] == [i.tobytes() for i in answered.images]
    assert plain.model_inputs.keys() == answered.model_inputs.keys()
    for name, tensor in plain.model_inputs.items():
        assert torch.equal(tensor, answered.model_inputs[name]), name


# The synthetic set


def test_answers_agree_with_the_pictures() -> None:
    config = SyntheticConfig(type="shape_questions", num_samples=120, seed=5)
    source = shape_questions.ShapeQuestions(config, RowRules())
    answers: dict[str, set[str]] = {kind: set() for kind in questions.KINDS}
    for sample in map(source.__getitem__, range(len(source))):
        pixels, answer = np.array(sample.source), sample.hidden["answer"]
        assert pixels.shape == (64, 64, 3) and tuple(pixels[0, 0]) in BACKGROUNDS_RGB
        # Colours that cover a shape, not only the pixels of a blended edge.
        shown = [name for name, rgb in RGB.items() if (pixels == rgb).all(-1).sum() > 60]
        if sample.category == "count":
            assert int(answer) == len(shown)
        elif sample.category == "colour":
            assert answer in shown
        pattern = f"<think>.*</think><answer>{answer}</answer>"
        assert re.fullmatch(pattern, sample.reference, re.DOTALL)
        answers[sample.category].add(answer)
    assert answers["count"] == {"1", "2", "3", "4"}
    assert len(answers["colour"]) == 8 and len(answers["sum"]) > 6


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        ("tiny_reasoning", questions.SYSTEM_PROMPT),
        ("tiny_prompts", captions.SYSTEM_PROMPT),
        ("tiny_thinking", captions.SYSTEM_PROMPT),
    ],
)
def test_the_tiny_config_has_the_system_prompt_of_the_policys_training(
    name: str, prompt: str
) -> None:
    assert load_config(REPO / f"configs/{name}.jsonnet").policy["system_prompt"] == prompt


def test_a_reward_that_needs_an_answer_is_refused_without_one() -> None:
    unanswered = "data.train=[{type: 'tiny_world.data.shapes'}]"
    config = load_config(REPO / "configs/tiny_reasoning.jsonnet", [unanswered])
    assert holds(compatibility_problems(resolve(config)), "needs each sample's 'answer'")
