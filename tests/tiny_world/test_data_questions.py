"""Questions of the tiny world have checkable answers that the policy never sees."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tiny_qwen

from rl.api.data import RowRules
from rl.api.types import Sample
from rl.build import resolve
from rl.check.compatibility import compatibility_problems
from rl.config.schema import load_config
from rl.policies.prompting import chat_template
from rl.policies.qwen_vl_prompts import QwenPrompts
from tiny_world import questions
from tiny_world.data import shape_questions
from tiny_world.data.synthetic import SyntheticConfig
from tiny_world.scenes import BACKGROUNDS_RGB, RGB

ROOT = Path(__file__).parents[2]
SECRET = "zyxwvu"


def prompts_of(samples: list[Sample]) -> list[Any]:
    prompts = QwenPrompts(
        tiny_qwen.make_tokenizer(),
        tiny_qwen.make_image_processor(),
        chat_template("Think, then answer."),
        max_prompt_tokens=512,
    )
    built = [prompts.prompt(sample, sample.instruction) for sample in samples]
    texts = [prompts.tokenizer.decode(list(prompt.token_ids)) for prompt in built]
    assert not any(SECRET in text for text in texts), texts
    return built


def test_the_answer_leaves_no_trace_in_the_prompt() -> None:
    question = tiny_qwen.sample(0, "How many dots?")
    plain, answered = prompts_of(
        [question, replace(question, hidden={"answer": SECRET}, reference=SECRET, category=SECRET)]
    )
    assert plain.token_ids == answered.token_ids
    assert [image.tobytes() for image in plain.images] == [i.tobytes() for i in answered.images]
    assert plain.model_inputs.keys() == answered.model_inputs.keys()
    for name, tensor in plain.model_inputs.items():
        assert (np.asarray(tensor) == np.asarray(answered.model_inputs[name])).all(), name


# The synthetic set


def read_colours(pixels: np.ndarray) -> list[str]:
    """Colours of the palette that cover a shape, not only the pixels of a blended edge."""
    return [name for name, rgb in RGB.items() if (pixels == rgb).all(-1).sum() > 60]


def test_answers_agree_with_the_pictures() -> None:
    config = SyntheticConfig(type="shape_questions", num_samples=120, seed=5)
    source = shape_questions.ShapeQuestions(config, RowRules())
    answers: dict[str, set[str]] = {kind: set() for kind in questions.KINDS}
    for sample in map(source.__getitem__, range(len(source))):
        pixels, answer = np.array(sample.source), sample.hidden["answer"]
        assert pixels.shape == (64, 64, 3) and tuple(pixels[0, 0]) in BACKGROUNDS_RGB
        if sample.category == "count":
            assert int(answer) == len(read_colours(pixels))
        elif sample.category == "colour":
            assert answer in read_colours(pixels)
        pattern = f"<think>.*</think><answer>{answer}</answer>"
        assert re.fullmatch(pattern, sample.reference, re.DOTALL)
        answers[sample.category].add(answer)
    assert answers["count"] == {"1", "2", "3", "4"}
    assert len(answers["colour"]) == 8 and len(answers["sum"]) > 6


def test_the_tiny_config_has_the_system_prompt_of_the_policys_training() -> None:
    config = load_config(ROOT / "configs" / "tiny_reasoning.jsonnet")
    assert config.policy["system_prompt"] == questions.SYSTEM_PROMPT


def test_a_reward_that_needs_an_answer_is_refused_without_one(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonnet"
    tiny = ROOT / "configs" / "tiny_reasoning.jsonnet"
    changes = "{ data+: { train: [{ type: 'tiny_world.data.shapes' }] } }"
    path.write_text(f"(import '{tiny}') + {changes}")
    problems = compatibility_problems(resolve(load_config(path)))
    assert any("needs each sample's 'answer'" in problem for problem in problems), problems
