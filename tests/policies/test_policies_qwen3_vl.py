"""A tiny Qwen3-VL policy against plain transformers: only what differs from Qwen2.5-VL."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import padded_reference
import pytest
import tiny_qwen
import tiny_qwen3
import torch
from tiny_act import act
from tiny_policy import move, trainable
from tiny_qwen3 import make_qwen3
from tiny_rounding import FORWARD_TOL, apart

from benchmarks.flop_counter import flop_counter
from rl.api.policy import PolicySetup
from rl.meter import LanguageModel, prefix_tree_pairs
from rl.policies.qwen_vl import Qwen25VL

LENGTHS = ((7, 1, 0, 12), (3,), (9, 9))
"""Completion lengths of three groups."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_qwen3.save_policy_folder(tmp_path_factory.mktemp("policy"))


def make_rows(policy: Any, numbers: tuple[int, ...] = (3, 0, 1)) -> list[tuple[Any, Any]]:
    """Rows of groups whose prompts have `numbers` pictures of different sizes."""
    policy.prompts.template = replace(policy.prompts.template, min_pictures=0)
    pictures = [
        tiny_qwen.picture(i, *size) for i, size in enumerate([(64, 64), (128, 64), (64, 96)])
    ]
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number, lengths in zip(numbers, LENGTHS, strict=True):
        sample = replace(tiny_qwen.sample(number), sources=tuple(pictures[:number]))
        prompt = policy.build_prompt(sample)
        assert len(prompt.images) == number
        drawn = (torch.randint(10, 250, (n,), generator=generator) for n in lengths)
        rows += [(prompt, tuple(ids.tolist())) for ids in drawn]
    return rows


def test_states_are_pre_norm_or_post_norm_as_the_renderer_asks(folder: str) -> None:
    policies = {kind: make_qwen3(folder, state_kind=kind) for kind in ("post_norm", "pre_norm")}
    rows = make_rows(policies["pre_norm"])[:1]
    embeds = {}
    for kind, policy in policies.items():
        [action] = act(policy, rows)
        embeds[kind] = action.payload.embeds
        assert not embeds[kind].requires_grad
    norm = policies["pre_norm"].module.base_model.model.language_model.norm
    with torch.no_grad():
        assert torch.allclose(norm(embeds["pre_norm"]), embeds["post_norm"], atol=FORWARD_TOL)
    assert (embeds["pre_norm"] - embeds["post_norm"]).abs().max() > 1


def test_negatives_and_base_states_are_pre_norm_too(folder: str) -> None:
    policy = make_qwen3(
        folder, section={"conditioning": "base"}, state_kind="pre_norm", negative_prompt=" "
    )
    move(policy)
    untrained = make_qwen3(folder, state_kind="pre_norm")
    rows = make_rows(policy)[:1]
    [action] = act(policy, rows)
    [expected] = act(untrained, rows)
    assert apart(action.payload.embeds, expected.payload.embeds) <= FORWARD_TOL
    with policy.reference(), torch.no_grad():
        negative = policy.prompts.with_instruction(rows[0][0], " ")
        states, _ = padded_reference.qwen_row(policy, negative, ())
    kept = states[negative.num_dropped_tokens :]
    assert (action.payload.negative_embeds - kept).norm() <= 1e-6 * kept.norm()


def test_deepstack_features_change_the_result_and_are_kept_per_picture(folder: str) -> None:
    policy = make_qwen3(folder)
    rows = make_rows(policy)
    prompts = [rows[0][0], rows[4][0], rows[5][0]]
    features = policy.picture_features(prompts)
    assert [None if one is None else tuple(one.shape) for one in features] == [
        (9 + 8 + 8, 4 * 64), None, (9, 4 * 64)
    ]  # fmt: skip
    assert torch.equal(features[0][:9], features[2])
    encoded = []
    visual = policy.module.base_model.model.visual
    visual.register_forward_hook(lambda _module, _args, out: encoded.append(out))
    batch = policy.collate(rows)
    with torch.no_grad():
        whole = policy.module(batch).logprobs
        assert not encoded, "the forwards use the kept features"
        kept = policy.module._features._kept
        for key, one in dict(kept).items():
            kept[key] = one * (torch.arange(4 * 64) < 64)
        assert (policy.module(batch).logprobs - whole).abs().max() > 0.1


def test_a_trained_tower_runs_for_prompts_without_pictures_too(folder: str) -> None:
    """Other ranks may have pictures, so every rank's backward must reach the tower."""
    section = {"lora": None, "freeze_vision_tower": False}
    policy = make_qwen3(folder, section=section)
    rows = make_rows(policy, (0, 0, 0))
    expected = torch.cat([padded_reference.qwen_row(policy, *row)[1] for row in rows]).detach()
    logprobs = policy.module(policy.collate(rows)).logprobs
    ours = torch.cat([logprobs[b, : len(ids)] for b, (_, ids) in enumerate(rows)])
    assert torch.allclose(ours.double(), expected.double(), rtol=0, atol=FORWARD_TOL)
    logprobs.sum().backward()
    grads = {name: p.grad for name, p in trainable(policy).items() if "visual" in name}
    assert all(grad is not None and not grad.any() for grad in grads.values())


def test_a_saved_adapter_can_be_loaded_and_names_its_class(folder: str, tmp_path: Path) -> None:
    policy = make_qwen3(folder)
    move(policy)
    policy.save_pretrained(str(tmp_path), trainable(policy))
    adapter_config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert adapter_config["auto_mapping"]["base_model_class"] == "Qwen3VLForConditionalGeneration"
    again = make_qwen3(folder, section={"adapter_path": str(tmp_path)})
    rows = make_rows(policy)
    make_rows(again)
    with torch.no_grad():
        one, other = (p.module(p.collate(rows)).logprobs for p in (policy, again))
    assert apart(one, other) <= FORWARD_TOL


def test_a_model_of_another_family_is_refused(folder: str, tmp_path: Path) -> None:
    """The config is checked when the policy is built."""
    with pytest.raises(ValueError, match=r"is a 'qwen3_vl', which policy.type 'qwen2_5_vl' does"):
        Qwen25VL(
            Qwen25VL.Config(type="qwen2_5_vl", model_path=folder, dtype="float32"),
            PolicySetup("text"),
        )


def test_the_flop_formulas_agree_with_a_real_language_model() -> None:
    """All heads together are wider than the hidden size."""
    model = tiny_qwen3.make_model(tiny_qwen.make_tokenizer())
    sizes = LanguageModel.of(model.config.text_config)
    ids = torch.arange(24)[None] + 10
    with flop_counter() as forward:
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    with flop_counter() as backward:
        hidden.sum().backward()
    pairs = prefix_tree_pairs(24, ())
    assert forward.get_total_flops() == pytest.approx(sizes.forward_flops(24, pairs))
    assert backward.get_total_flops() == pytest.approx(sizes.backward_flops(24, pairs))


def test_there_is_only_one_stock_arm(folder: str) -> None:
    """Its pipeline passes token types on, so there is no arm without them."""
    policy = make_qwen3(folder)
    assert set(policy.stock_arms(policy.build_prompt(tiny_qwen.sample(0)))) == {"stock"}
