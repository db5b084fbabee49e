"""Questions with an answer to check, from files and from a seed; the policy never sees it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_edits
import tiny_qwen
from PIL import Image

from rl.api.data import RowRules
from rl.api.types import Sample
from rl.build import resolve
from rl.check.compatibility import compatibility_problems
from rl.config.schema import load_config
from rl.data import edit_jsonl, hf_dataset
from rl.policies.qwen_vl.qwen_vl_prompts import QwenPrompts
from rl.policies.shared.prompting import chat_template
from tiny_world import questions
from tiny_world.data import shape_questions
from tiny_world.data.synthetic import MadeConfig
from tiny_world.scenes import BACKGROUNDS_RGB, RGB

ROOT = Path(__file__).parents[2]
COLUMNS = {
    "instruction": "problem",
    "source": "image",
    "source_optional": True,
    "hidden": {"answer": "solution"},
}
SECRET = "zyxwvu"


@pytest.mark.parametrize("plug", [edit_jsonl.EditJsonl, hf_dataset.HfDataset])
def test_a_file_of_questions_with_and_without_a_picture(
    plug: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    picture = str(tmp_path / "dots.png")
    Image.new("RGB", (40, 30), "red").save(picture)
    rows: list[Any] = [
        {"problem": "How many dots?", "image": picture, "solution": "7"},
        {"problem": "What is 2 + 2?", "image": None, "solution": "<answer> 4 </answer>"},
        {"problem": "What is 3 + 2?", "solution": "5"},
    ]
    if plug is edit_jsonl.EditJsonl:
        path = tiny_edits.write_jsonl(tmp_path / "train.jsonl", rows)
    else:
        path = str(tmp_path / "train.parquet")
        table = datasets.Dataset.from_list(rows).cast_column("image", datasets.Image())
        table.to_parquet(path)
    config = plug.Config(path=path, columns=COLUMNS)
    assert list(plug.problems(config, RowRules())) == []
    assert plug.provides(config) == {"hidden:answer"}, "not every sample has a picture"
    source = plug(config, RowRules())
    samples = [source[i] for i in range(3)]
    assert [sample.instruction for sample in samples] == [row["problem"] for row in rows]
    assert [sample.hidden["answer"] for sample in samples] == [row["solution"] for row in rows]
    assert [len(sample.sources) for sample in samples] == [1, 0, 0]


def prompts_of(samples: list[Sample]) -> list[Any]:
    prompts = QwenPrompts(
        tiny_qwen.make_tokenizer(),
        tiny_qwen.make_image_processor(),
        chat_template("Think, then answer."),
        needs_picture=False,
        max_prompt_tokens=512,
    )
    built = [prompts.prompt(sample, sample.instruction) for sample in samples]
    texts = [prompts.tokenizer.decode(list(prompt.token_ids)) for prompt in built]
    assert not any(SECRET in text for text in texts), texts
    return built


@pytest.mark.parametrize("pictured", [True, False])
def test_the_answer_leaves_no_trace_in_the_prompt(pictured: bool) -> None:
    asked = tiny_qwen.sample(0, "How many dots?")
    asked = asked if pictured else replace(asked, sources=())
    bare, answered = prompts_of(
        [asked, replace(asked, hidden={"answer": SECRET}, reference=SECRET, category=SECRET)]
    )
    assert bare.token_ids == answered.token_ids
    assert [image.tobytes() for image in bare.images] == [i.tobytes() for i in answered.images]
    assert len(bare.images) == int(pictured)
    assert bare.model_inputs.keys() == answered.model_inputs.keys()
    for name, tensor in bare.model_inputs.items():
        assert (np.asarray(tensor) == np.asarray(answered.model_inputs[name])).all(), name


# The synthetic set

GLYPHS = """
###  .#.  ###  ###  #.#  ###
#.#  ##.  ..#  ..#  #.#  #..
#.#  .#.  ###  ###  ###  ###
#.#  .#.  #..  ..#  ..#  ..#
###  ###  ###  ###  ..#  ###
"""


def read_digit(pixels: np.ndarray) -> int:
    """[64, 32, 3] with one inked digit -> which one, by the table above."""
    background = pixels[0, 0]
    inked = (pixels != background).any(-1)
    rows, columns = inked.any(1).nonzero()[0], inked.any(0).nonzero()[0]
    box = inked[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    assert box.shape == (20, 12)
    drawn = ["".join(".#"[int(dot)] for dot in row) for row in box[2::4, 2::4]]
    table = [line.split() for line in GLYPHS.split("\n") if line]
    return [[line[digit] for line in table] for digit in range(6)].index(drawn)


def read_colours(pixels: np.ndarray) -> list[str]:
    """Names of the palette's colours that fill more than an edge."""
    return [name for name, rgb in RGB.items() if (pixels == rgb).all(-1).sum() > 60]


def test_answers_are_what_the_pictures_show() -> None:
    config = MadeConfig(type="shape_questions", num_samples=120, seed=5)
    source = shape_questions.ShapeQuestions(config, RowRules())
    answers: dict[str, set[str]] = {kind: set() for kind in questions.KINDS}
    for sample in map(source.__getitem__, range(len(source))):
        pixels, answer = np.array(sample.source), sample.hidden["answer"]
        assert pixels.shape == (64, 64, 3) and tuple(pixels[0, 0]) in BACKGROUNDS_RGB
        if sample.category == "count":
            assert int(answer) == len(read_colours(pixels))
        elif sample.category == "colour":
            assert answer in read_colours(pixels)
        else:
            assert int(answer) == read_digit(pixels[:, :32]) + read_digit(pixels[:, 32:])
        pattern = f"<think>.*</think><answer>{answer}</answer>"
        assert re.fullmatch(pattern, sample.reference, re.DOTALL)
        answers[sample.category].add(answer)
    assert answers["count"] == {"1", "2", "3", "4"}
    assert len(answers["colour"]) == 8 and len(answers["sum"]) > 6


def test_the_tiny_config_asks_in_the_words_the_policy_was_taught_under() -> None:
    config = load_config(ROOT / "configs" / "tiny_reasoning.jsonnet")
    assert config.policy["system_prompt"] == questions.SYSTEM_PROMPT


def test_a_reward_that_needs_an_answer_is_refused_without_one(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonnet"
    tiny = ROOT / "configs" / "tiny_reasoning.jsonnet"
    changes = "{ data+: { train: [{ type: 'tiny_world.data.shapes' }] } }"
    path.write_text(f"(import '{tiny}') + {changes}")
    problems = compatibility_problems(resolve(load_config(path)))
    assert any("needs each sample's 'answer'" in problem for problem in problems), problems
