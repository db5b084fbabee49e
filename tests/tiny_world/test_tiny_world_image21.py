"""The tiny Qwen-Image-2.1 weights work in the real classes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from diffusers import AutoencoderKLQwenImage21, QwenImage21Transformer2DModel
from tiny_config import WEIGHTS
from transformers import AutoTokenizer

from tiny_world.builder.image21_editor import Exam, read
from tiny_world.builder.image21_models import load_policy
from tiny_world.builder.image21_policy import p_right
from tiny_world.builder.image21_reader import PicturesReader
from tiny_world.builder.image21_tokenizer import editing_tokenizer

FOLDER = WEIGHTS / "image21"
MIN_MARK_OF_RIGHT_WORDS = 8.0
MAX_MARK_OF_WRONG_WORDS = 2.0


@pytest.fixture(scope="module")
def shipped():
    """(`PicturesReader` of the shipped policy, held-out `Exam`, transformer)"""
    reader = PicturesReader(load_policy(FOLDER / "policy"), editing_tokenizer())
    kw = {"torch_dtype": torch.float32}
    vae = AutoencoderKLQwenImage21.from_pretrained(FOLDER / "vae", **kw)
    transformer = QwenImage21Transformer2DModel.from_pretrained(FOLDER / "transformer", **kw)
    exam = Exam(partial(read, reader), reader.image_id, vae, num=24, seed=11)
    return reader, exam, transformer


@pytest.mark.slow
def test_the_shipped_tokenizer_equals_the_builders(shipped):
    shipped_tokenizer = AutoTokenizer.from_pretrained(FOLDER / "policy")
    assert shipped_tokenizer.get_vocab() == shipped[0].tokenizer.get_vocab()


@pytest.mark.slow
def test_the_untrained_policy_gives_the_right_answer_sometimes(shipped):
    p_by_kind = p_right(shipped[0])
    assert set(p_by_kind) == {"noun", "match", "erase", "borrow"}
    assert all(0.1 < p < 0.5 for p in p_by_kind.values()), p_by_kind


@pytest.mark.slow
def test_the_editor_follows_descriptions_with_one_picture_and_with_two(shipped):
    _, exam, transformer = shipped
    marks = exam.marks(transformer)
    assert min(marks["right_1"], marks["right_2"]) > MIN_MARK_OF_RIGHT_WORDS, marks
    assert marks["wrong"] < MAX_MARK_OF_WRONG_WORDS, marks
