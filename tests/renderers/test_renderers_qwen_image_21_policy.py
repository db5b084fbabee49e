"""Qwen3-VL as the policy of Qwen-Image-2.1: its states equal those of the stock pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_qwen_image_21 as tiny
import torch
from tiny_models import save
from tiny_pictures import render_floats
from tiny_qwen_image_21 import references
from tiny_rounding import FORWARD_TOL, PICTURE_TOL, apart

from rl.api.policy import PolicySetup
from rl.api.types import Action, RenderJob, Sample, UnusableSampleError
from rl.policies.qwen_vl import Config, Qwen3VL
from rl.renderers.qwen_image_21 import QwenImage21


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Qwen3VL:
    folder = tmp_path_factory.mktemp("policy")
    encoder, processor = tiny.make_encoder()
    save(folder, encoder, processor.tokenizer, processor.image_processor)
    template = QwenImage21.prompt_template(tiny.Config(**tiny.TINY, max_pictures=3))
    return Qwen3VL(
        Config(type="qwen3_vl", model_path=str(folder), dtype="float32"),
        PolicySetup("hidden_states", "pre_norm", template=template, negative_prompt="blurry"),
    )


def actions_of(policy: Qwen3VL, rows: list[Any]) -> list[Action]:
    batch = policy.collate(rows)
    with torch.no_grad():
        return policy.decode_actions(rows, batch, policy.module(batch))


@pytest.mark.parametrize("num_sources", [0, 1, 3])
def test_an_empty_completion_gives_the_stock_picture(policy: Qwen3VL, num_sources: int) -> None:
    """The prompt, too, is then the stock pipeline's."""
    sources, stock = tuple(references(num_sources)), tiny.make_stock()
    samples = [Sample(words, words, sources=sources) for words in tiny.WORDS[:2]]
    actions = actions_of(policy, [(policy.build_prompt(sample), ()) for sample in samples])
    negative, _ = tiny.encode("blurry", sources)
    for sample, action in zip(samples, actions, strict=True):
        states, places = tiny.encode(sample.instruction, sources)
        assert apart(action.payload.embeds, states) <= FORWARD_TOL
        assert action.payload.pictures == places
        assert apart(action.payload.negative_embeds, negative) <= FORWARD_TOL
        job = RenderJob(sample, action.payload, 5)
        drawn = render_floats(tiny.make_renderer(stock.ours()), [job])
        assert apart(drawn, tiny.render_stock(stock, [job])) <= PICTURE_TOL


def test_the_states_of_a_group_share_a_bitwise_equal_prefix(policy: Qwen3VL) -> None:
    """The renderer can therefore process the sources of a group once."""
    sample = Sample("s", tiny.WORDS[0], sources=tuple(references(2)))
    prompt = policy.build_prompt(sample)
    completions = ("turn the circle", "x", "add a red square to the image")
    rows = [(prompt, policy.encode_completion(words).token_ids) for words in completions]
    jobs = [RenderJob(sample, action.payload, 5) for action in actions_of(policy, rows)]
    renderer = tiny.make_renderer(tiny.make_parts())
    starts = [renderer._rows(job)[0] for job in jobs]
    assert all(map(starts[0].starts_like, starts))
    drawn = render_floats(renderer, jobs)
    assert apart(drawn[0], drawn[1]) > 0.1


def test_too_many_sources_are_refused(policy: Qwen3VL) -> None:
    sample = Sample("row-7", "x", sources=tuple(references(3)) + tuple(references(1)))
    with pytest.raises(UnusableSampleError, match="row-7"):
        policy.build_prompt(sample)
