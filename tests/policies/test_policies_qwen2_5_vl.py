"""A tiny Qwen2.5-VL policy against the stock pipeline, transformers and PEFT, in float32."""

from dataclasses import replace
from pathlib import Path

import padded_reference
import pytest
import tiny_qwen
import torch
from safetensors.torch import load_file
from tiny_act import act, act_group
from tiny_calls import calls_of, pictures_read
from tiny_policy import make, move, saved, trainable
from tiny_rounding import FORWARD_TOL, apart
from tiny_rows import pictured_rows

from rl.api.policy import LoraSection
from rl.api.types import HiddenStates

WORDS_G = ["make the square green", "blue", "turn it to the sky and add a circle"]


@pytest.fixture(scope="module")
def policy():
    policy = make(negative_prompt=" ")
    move(policy)
    return policy


@pytest.fixture(scope="module")
def rows(policy):
    """Completions of one group."""
    prompt = policy.build_prompt(tiny_qwen.sample(0, width=128, height=64))
    return [(prompt, policy.encode_completion(words).token_ids) for words in WORDS_G]


# Conditioning


def test_conditioning_equals_that_of_the_stock_pipeline_with_token_types(policy):
    """The kept states of a prompt equal those of `QwenImageEditPipeline`, with the token types that
    it does not pass on; rows of the completion follow."""
    from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageEditPipeline

    processor = tiny_qwen.make_processor()
    pipeline = QwenImageEditPipeline(
        FlowMatchEulerDiscreteScheduler(), None, None, processor.tokenizer, processor, None
    )
    pipeline.text_encoder = tiny_qwen.WithTokenTypes(policy.module.base_model)
    samples = [tiny_qwen.sample(i, width=64 * (i + 1)) for i in range(2)]
    prompts = [policy.build_prompt(sample) for sample in samples]
    texts, pictures = ([s.instruction for s in samples], [p.images[0] for p in prompts])
    with torch.no_grad():
        embeds, mask = pipeline._get_qwen_prompt_embeds(texts, pictures, "cpu", torch.float32)
    blue = policy.encode_completion("blue")
    for i, prompt in enumerate(prompts):
        expected = embeds[i] if mask is None else embeds[i][mask[i].bool()]
        [action] = act_group(policy, prompt, [blue])
        kept = len(prompt.token_ids) - 64
        assert apart(action.payload.embeds[:kept], expected) < FORWARD_TOL
        assert len(action.payload.embeds) == kept + len(blue.token_ids)


@pytest.mark.parametrize(
    ("family", "state_kind"), [("qwen2_5_vl", "post_norm"), ("qwen3_vl", "pre_norm")]
)
def test_base_conditioning_and_all_negatives_ignore_the_adapter(family, state_kind):
    keys = {"negative_prompt": " ", "state_kind": state_kind}
    untrained, trained = make(family, **keys), make(family, **keys)
    with_base = make(family, **keys, conditioning="base")
    rows = pictured_rows(untrained)[:1]
    move(trained)
    move(with_base)
    before, after, base = (act(one, rows)[0].payload for one in (untrained, trained, with_base))
    assert apart(base.embeds, before.embeds) <= FORWARD_TOL
    assert apart(after.embeds, before.embeds) > 1e-2
    negative = untrained.prompts.with_instruction(rows[0][0], " ")
    states = padded_reference.qwen_row(untrained, negative, ())[0][negative.num_dropped_tokens :]
    for payload in (before, after, base):
        assert (payload.negative_embeds - states).norm() <= 1e-6 * states.norm()


def test_each_new_negative_takes_exactly_one_forward():
    """Two pictures, one of them with two instructions; a negative depends on its picture only."""
    policy = make(negative_prompt=" ")
    samples = [tiny_qwen.sample(0), tiny_qwen.sample(1, width=96), tiny_qwen.sample(0, "blue")]
    blue = policy.encode_completion("blue").token_ids
    rows = [(policy.build_prompt(sample), blue) for sample in samples]
    forwards = calls_of(policy.module, lambda args, _kwargs, _out: len(args[0].groups))
    first = [action.payload.negative_embeds for action in act(policy, rows)]
    assert forwards == [3, 1, 1]
    assert first[2] is first[0]
    again = [action.payload.negative_embeds for action in act(policy, rows[::-1])]
    assert len(forwards) == 4 and all(a is b for a, b in zip(again[::-1], first, strict=True))


def test_features_are_kept_per_picture_and_negatives_per_list_of_pictures():
    """Features are kept per picture, and do not depend on the others: a resumed run may encode
    other pictures together. A negative is kept per list of pictures, in order."""
    policy = make(negative_prompt=" ", template=replace(tiny_qwen.TEMPLATE, max_pictures=3))
    read = pictures_read(policy)
    a, b, c = (tiny_qwen.picture(i, width=64 + 32 * i) for i in range(3))
    prompts = [
        policy.build_prompt(replace(tiny_qwen.sample(i), sources=sources))
        for i, sources in enumerate([(a, b, c), (a,), (b, a), (a, b), (a, b)])
    ]
    actions = act(policy, [(prompt, policy.encode_completion("x").token_ids) for prompt in prompts])
    assert read == [1, 1, 1]
    negatives = [action.payload.negative_embeds for action in actions]
    assert negatives[3] is negatives[4] and len({id(states) for states in negatives}) == 4
    for prompt, states in zip(prompts, negatives, strict=True):
        negative = policy.prompts.prompt(prompt.sample, " ")
        expected = padded_reference.qwen_states(policy.module.base_model, negative, ())
        assert (states - expected[64:]).abs().max() <= 2e-6 * expected.abs().max()
    features = policy.picture_features(prompts[:3])
    [alone] = make().picture_features(prompts[1:2])
    assert apart(features[0][: len(alone)], alone) <= FORWARD_TOL
    assert torch.equal(features[2][-len(alone) :], features[0][: len(alone)])


# What is trained


def test_only_the_language_models_attention_is_trained(policy):
    names = list(trainable(policy))
    assert len(names) == 2 * 2 * 4, "A and B of q, k, v, o in two layers"
    assert all("language_model.layers" in name for name in names)
    adapted = make(lora=LoraSection(target_modules=("gate_proj", "q_proj")))
    assert not any("visual" in name for name in trainable(adapted))


# What a completion means


def test_text_actions_contain_the_words_and_run_no_forward(rows, monkeypatch):
    policy = make(kind="text")
    monkeypatch.setattr(policy.module, "forward", None)
    assert not policy.reads_states
    for action, words in zip(policy.decode_actions(rows, None, None), WORDS_G, strict=True):
        assert action.text == action.payload == words
        assert action.failure is None


@pytest.mark.parametrize("kind", ["hidden_states", "text"])
def test_completions_without_words_fail_and_others_do_not(rows, kind):
    policy = make(kind=kind)
    prompt, ids = rows[0]
    spaces = policy.encode_completion("  \n").token_ids
    ids_G = [policy.stop_token_ids[:1], spaces, ids]
    *wordless, fine = act(policy, [(prompt, ids) for ids in ids_G])
    for action in wordless:
        assert action.payload is None and "no words" in action.failure
    assert fine.failure is None and fine.text == WORDS_G[0]
    assert isinstance(fine.payload, str if kind == "text" else HiddenStates)


# Weights


def test_weights_may_come_from_an_editors_text_encoder(tmp_path):
    """Another model's weights with this model's tokenizer; the engine folder links to both."""
    folder, editor = saved("qwen2_5_vl"), tmp_path / "editor"
    tokenizer = tiny_qwen.make_tokenizer()
    tiny_qwen.make_model(tokenizer, seed=7).save_pretrained(editor / "text_encoder")
    policy = make(init_text_encoder_from=str(editor))
    theirs = load_file(editor / "text_encoder" / "model.safetensors")
    ours = policy.module.base_model.state_dict()
    base = load_file(Path(folder) / "model.safetensors")
    head = "lm_head.weight"
    assert torch.equal(ours[head], theirs[head])
    assert not torch.equal(ours[head], base[head])

    joined = Path(policy.engine_folder())
    assert (joined / "model.safetensors").resolve() == editor / "text_encoder" / "model.safetensors"
    assert (joined / "tokenizer.json").resolve() == Path(folder) / "tokenizer.json"
    assert (joined / "preprocessor_config.json").exists()
    assert Path(policy.engine_folder()) == joined, "the second call returns the same folder"
    assert make().engine_folder() == folder


def test_the_picture_bounds_can_be_set():
    """The config keys override the bounds of the processor on disk."""
    sample = tiny_qwen.sample(0, width=96, height=96)

    def num_image_tokens(**config) -> int:
        return int(make(**config).build_prompt(sample).model_inputs["image_grid_thw"].prod()) // 4

    assert num_image_tokens() == 9
    assert num_image_tokens(image_max_pixels=56 * 56) == 4
    assert num_image_tokens(image_min_pixels=110 * 110) == 16
    assert make(image_max_pixels=56 * 56).image_pixel_bounds == (56 * 56, 56 * 56)


def test_a_new_adapter_is_drawn_from_the_run_seed_or_from_init_seed():
    def lora_a(seed: int, init_seed: int | None) -> list[torch.Tensor]:
        lora = {"r": 4, "alpha": 8, "init_seed": init_seed}
        adapter = trainable(make(seed=seed, lora=lora))
        return [tensor for name, tensor in sorted(adapter.items()) if "lora_A" in name]

    torch.manual_seed(1)
    before = torch.get_rng_state()
    zero, one = lora_a(0, None), lora_a(1, None)
    assert torch.equal(torch.get_rng_state(), before), "the global generator is not used"
    torch.manual_seed(2)
    assert all(map(torch.equal, lora_a(0, None), zero)), "the same on every rank"
    assert not any(torch.equal(a, b) for a, b in zip(zero, one, strict=True))
    for tensors, expected in ((lora_a(1, 0), zero), (lora_a(0, 1), one)):
        assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))
