"""A tiny Qwen2.5-VL policy against the stock pipeline, transformers and PEFT, in float32."""

from dataclasses import replace
from pathlib import Path

import padded_reference
import pytest
import tiny_qwen
import tiny_qwen3
import torch
from safetensors.torch import load_file
from tiny_act import act, act_group
from tiny_policy import make_qwen, move, trainable
from tiny_rounding import FORWARD_TOL, apart

from rl.api.policy import LoraSection
from rl.api.types import HiddenStates

WORDS_G = ["make the square green", "blue", "turn it to the sky and add a circle"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return tiny_qwen.save_policy_folder(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def policy(folder):
    policy = make_qwen(folder, negative=" ")
    move(policy)
    return policy


@pytest.fixture(scope="module")
def group(policy):
    prompt = policy.build_prompt(tiny_qwen.sample(0, width=128, height=64))
    return prompt, [policy.encode_completion(words) for words in WORDS_G]


def rows(group) -> list[tuple]:
    prompt, completions_G = group
    return [(prompt, completion.token_ids) for completion in completions_G]


# Conditioning


@pytest.fixture(scope="module")
def stock_embeds(policy):
    """Encodes with `QwenImageEditPipeline`, with the token types that it does not pass on."""
    from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageEditPipeline

    def encode(texts, images):
        processor = tiny_qwen.make_processor()
        pipeline = QwenImageEditPipeline(
            FlowMatchEulerDiscreteScheduler(), None, None, processor.tokenizer, processor, None
        )
        pipeline.text_encoder = tiny_qwen.WithTokenTypes(policy.module.base_model)
        with torch.no_grad():
            return pipeline._get_qwen_prompt_embeds(texts, images, "cpu", torch.float32)

    return encode


def test_conditioning_equals_that_of_the_stock_pipeline_with_token_types(policy, stock_embeds):
    """The kept states of a prompt equal the stock encoder's; rows of the completion follow."""
    samples = [tiny_qwen.sample(i, width=64 * (i + 1)) for i in range(2)]
    prompts = [policy.build_prompt(sample) for sample in samples]
    embeds, mask = stock_embeds(
        [sample.instruction for sample in samples], [prompt.images[0] for prompt in prompts]
    )
    for i, prompt in enumerate(prompts):
        expected = embeds[i] if mask is None else embeds[i][mask[i].bool()]
        [action] = act_group(policy, prompt, [policy.encode_completion("blue")])
        kept = len(prompt.token_ids) - 64
        assert expected.shape == (kept, 64)
        assert (action.payload.embeds[:kept] - expected).abs().max() < FORWARD_TOL
        assert action.payload.embeds.shape[0] == kept + len(
            policy.encode_completion("blue").token_ids
        )


def test_base_conditioning_and_all_negatives_ignore_the_adapter(folder, group):
    prompt, completions_G = group
    with_base = make_qwen(folder, negative=" ", conditioning="base")
    untrained = make_qwen(folder, negative=" ")
    [before] = act_group(untrained, prompt, completions_G[:1])
    move(with_base)
    [base] = act_group(with_base, prompt, completions_G[:1])
    assert apart(base.payload.embeds, before.payload.embeds) <= FORWARD_TOL
    assert apart(base.payload.negative_embeds, before.payload.negative_embeds) <= FORWARD_TOL

    trained = make_qwen(folder, negative=" ")
    move(trained)
    [after] = act_group(trained, prompt, completions_G[:1])
    assert (after.payload.embeds - before.payload.embeds).abs().max() > 1e-2
    assert apart(after.payload.negative_embeds, before.payload.negative_embeds) <= FORWARD_TOL


def test_each_new_negative_takes_exactly_one_forward(folder, group):
    """Two pictures, one of them with two instructions; a negative depends on its picture only."""
    policy = make_qwen(folder, negative=" ")
    samples = [tiny_qwen.sample(0), tiny_qwen.sample(1, width=96), tiny_qwen.sample(0, "blue")]
    prompts = [policy.build_prompt(sample) for sample in samples]
    rows = [(prompt, policy.encode_completion("blue").token_ids) for prompt in prompts]
    forwards = []
    policy.module.register_forward_hook(lambda _module, args, _out: forwards.append(args[0].groups))
    first = [action.payload.negative_embeds for action in act(policy, rows)]
    assert [len(groups) for groups in forwards] == [3, 1, 1]
    assert first[2] is first[0]
    again = [action.payload.negative_embeds for action in act(policy, rows[::-1])]
    assert len(forwards) == 4 and all(a is b for a, b in zip(again[::-1], first, strict=True))
    for prompt, states in zip(prompts, first, strict=True):
        negative = policy.prompts.prompt(prompt.sample, " ")
        expected = padded_reference.qwen_states(policy.module.base_model, negative, ())
        assert (states - expected[64:]).abs().max() <= 2e-6 * expected.abs().max()


def test_the_features_of_a_picture_do_not_depend_on_the_others(folder):
    """A resumed run may encode other pictures together than an uninterrupted run."""
    policy, alone = make_qwen(folder), make_qwen(folder)
    prompts = [policy.build_prompt(tiny_qwen.sample(i)) for i in range(3)]
    batch_sizes = []
    visual = policy.module.base_model.model.visual
    visual.register_forward_pre_hook(
        lambda _module, _args, kwargs: batch_sizes.append(len(kwargs["grid_thw"])), with_kwargs=True
    )
    features = policy.picture_features(prompts)
    assert batch_sizes == [1, 1, 1]
    for prompt, ours in zip(prompts, features, strict=True):
        [expected] = alone.picture_features([prompt])
        assert apart(ours, expected) <= FORWARD_TOL


def test_features_are_kept_per_picture_and_negatives_per_list_of_pictures(folder):
    """Features are kept per picture; a negative is kept per list of pictures, in order."""
    several = replace(tiny_qwen.TEMPLATE, max_pictures=3)
    policy = make_qwen(folder, negative=" ", template=several)
    encoded = []
    visual = policy.module.base_model.model.visual
    visual.register_forward_hook(lambda _module, _args, out: encoded.append(len(out[0])))
    a, b, c = (tiny_qwen.picture(i, width=64 + 32 * i) for i in range(3))
    sources_by_prompt = [(a, b, c), (a,), (b, a), (a, b), (a, b)]
    prompts = [
        policy.build_prompt(replace(tiny_qwen.sample(i), sources=sources))
        for i, sources in enumerate(sources_by_prompt)
    ]
    actions = act(policy, [(prompt, policy.encode_completion("x").token_ids) for prompt in prompts])
    assert len(encoded) == 3
    negatives = [action.payload.negative_embeds for action in actions]
    assert negatives[3] is negatives[4] and len({id(states) for states in negatives}) == 4
    for prompt, states in zip(prompts, negatives, strict=True):
        negative = policy.prompts.prompt(prompt.sample, " ")
        expected = padded_reference.qwen_states(policy.module.base_model, negative, ())
        assert (states - expected[64:]).abs().max() <= 2e-6 * expected.abs().max()
    features = policy.picture_features(prompts[:3])
    alone = policy.picture_features([prompts[1]])[0]
    assert torch.equal(features[0][: len(alone)], alone)
    assert torch.equal(features[2][-len(alone) :], alone)


# What is trained


def test_only_the_language_models_attention_is_trained(policy):
    names = list(trainable(policy))
    assert len(names) == 2 * 2 * 4, "A and B of q, k, v, o in two layers"
    assert all("language_model.layers" in name for name in names)
    wide = LoraSection(target_modules=("gate_proj", "q_proj"))
    adapted = make_qwen(policy.config.model_path, lora=wide)
    assert not any("visual" in name for name in trainable(adapted))


# What a completion means


def test_text_actions_contain_the_words_and_run_no_forward(folder, group, monkeypatch):
    policy = make_qwen(folder, kind="text")
    monkeypatch.setattr(policy.module, "forward", None)
    assert not policy.reads_states
    for action, words in zip(policy.decode_actions(rows(group), None, None), WORDS_G, strict=True):
        assert action.text == action.payload == words
        assert action.failure is None


@pytest.mark.parametrize("kind", ["hidden_states", "text"])
def test_completions_without_words_fail_and_others_do_not(folder, group, kind):
    policy = make_qwen(folder, kind=kind)
    stop = policy.stop_token_ids[0]
    spaces = policy.encode_completion("  \n").token_ids
    ids_G = [(stop,), spaces, group[1][0].token_ids]
    empty, blank, fine = act(policy, [(group[0], ids) for ids in ids_G])
    assert empty.payload is None and "no words" in empty.failure
    assert blank.payload is None and "no words" in blank.failure
    assert fine.failure is None and fine.text == WORDS_G[0]
    assert isinstance(fine.payload, str if kind == "text" else HiddenStates)


# Weights


def test_reference_uses_the_base_weights_and_restores_the_trained_ones(policy, group):
    batch = policy.collate(rows(group))
    with torch.no_grad():
        trained = policy.module(batch).logprobs
        with policy.reference():
            base = policy.module(batch).logprobs
        after = policy.module(batch).logprobs
        untrained = make_qwen(policy.config.model_path).module(batch).logprobs
    assert apart(base, untrained) <= FORWARD_TOL
    assert apart(after, trained) <= FORWARD_TOL
    assert (trained - base).abs().max() > 1e-2
    assert all(parameter.requires_grad for parameter in trainable(policy).values())


@pytest.mark.parametrize("lora", [{"r": 4, "alpha": 8, "target_modules": ["qkv"]}, None])
def test_features_of_a_trained_tower_follow_its_weights(folder, group, lora):
    """Also under `reference()`, where an adapter's parameters look frozen."""
    policy = make_qwen(folder, freeze_vision_tower=False, lora=lora)
    batch = policy.collate(rows(group))
    with torch.no_grad(), policy.reference():
        base = policy.module(batch).logprobs
    move(policy)
    trained = policy.module(batch).logprobs
    assert (trained - base).abs().max() > 1e-2
    trained.sum().backward()
    assert any(p.grad.any() for n, p in trainable(policy).items() if "visual" in n)
    with torch.no_grad(), policy.reference():
        assert apart(policy.module(batch).logprobs, base) <= FORWARD_TOL
    assert apart(policy.module(batch).logprobs, trained) <= FORWARD_TOL


def test_full_finetuning_trains_all_but_the_tower_and_keeps_its_reference(folder, group):
    policy = make_qwen(folder, lora=None)
    assert {n.split(".")[2] for n in trainable(policy)} == {"language_model", "weight"}
    batch = policy.collate(rows(group))
    with torch.no_grad():
        base = policy.module(batch).logprobs
        move(policy, 0.02)
        trained = policy.module(batch).logprobs
        with policy.reference():
            assert apart(policy.module(batch).logprobs, base) <= FORWARD_TOL
        assert apart(policy.module(batch).logprobs, trained) <= FORWARD_TOL
    assert (trained - base).abs().max() > 1e-2


def test_exported_weights_have_the_names_of_peft_and_are_copies(policy):
    from peft import get_peft_model_state_dict

    weights = policy.export_weights(trainable(policy), version=3)
    expected = get_peft_model_state_dict(policy.module.model)
    assert weights.kind == "lora" and weights.version == 3
    assert set(weights.tensors) == set(expected)
    assert all(torch.equal(weights.tensors[name], expected[name]) for name in expected)
    name = next(iter(weights.tensors))
    weights.tensors[name].mul_(2)
    assert not torch.equal(weights.tensors[name], expected[name])


def test_a_saved_adapter_loads_in_peft_and_as_adapter_path(policy, group, tmp_path):
    from peft import PeftModel
    from transformers import Qwen2_5_VLForConditionalGeneration

    policy.save_pretrained(str(tmp_path), trainable(policy))
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        policy.config.model_path, dtype=torch.float32
    )
    restored = PeftModel.from_pretrained(model, tmp_path)
    assert restored.peft_config["default"].base_model_name_or_path == policy.config.model_path
    theirs = {n: p for n, p in restored.named_parameters() if "lora_" in n}
    ours = {n.removeprefix("model."): p for n, p in trainable(policy).items()}
    assert set(theirs) == set(ours)
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)

    again = make_qwen(policy.config.model_path, adapter_path=str(tmp_path))
    batch = policy.collate(rows(group))
    with torch.no_grad():
        assert apart(again.module(batch).logprobs, policy.module(batch).logprobs) <= FORWARD_TOL
    assert trainable(again).keys() == trainable(policy).keys()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", [tiny_qwen, tiny_qwen3])
def test_a_saved_full_model_loads_in_transformers(tmp_path, family, tied):
    from transformers import AutoModelForImageTextToText

    base = family.save_policy_folder(tmp_path / "base", tied=tied)
    if family is tiny_qwen:
        policy = make_qwen(base, lora=None)
    else:
        policy = tiny_qwen3.make_qwen3(base, section={"lora": None})
    move(policy)
    exported = policy.export_weights(trainable(policy), 0)
    assert "lm_head.weight" in exported.tensors, "the engine has a head of its own"
    policy.save_pretrained(str(tmp_path / "saved"), trainable(policy))
    restored = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved")
    assert type(restored).__name__ in policy.model_classes
    expected = policy.module.model.state_dict()
    for name, tensor in restored.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_weights_may_come_from_an_editors_text_encoder(folder, tmp_path):
    """Another model's weights with this model's tokenizer; the engine folder links to both."""
    editor = tmp_path / "editor"
    tokenizer = tiny_qwen.make_tokenizer()
    tiny_qwen.make_model(tokenizer, seed=7).save_pretrained(editor / "text_encoder")
    policy = make_qwen(folder, init_text_encoder_from=str(editor))
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
    assert make_qwen(folder).engine_folder() == folder


def test_the_picture_bounds_can_be_set(folder):
    """The config keys override the bounds of the processor on disk."""
    sample = tiny_qwen.sample(0, width=96, height=96)

    def num_image_tokens(**config) -> int:
        prompt = make_qwen(folder, **config).build_prompt(sample)
        return int(prompt.model_inputs["image_grid_thw"].prod()) // 4

    assert num_image_tokens() == 9
    assert num_image_tokens(image_max_pixels=56 * 56) == 4
    assert num_image_tokens(image_min_pixels=110 * 110) == 16
    assert make_qwen(folder, image_max_pixels=56 * 56).image_pixel_bounds == (56 * 56, 56 * 56)


def test_a_new_adapter_is_drawn_from_the_run_seed_or_from_init_seed(folder):
    def lora_a(seed: int, init_seed: int | None) -> list[torch.Tensor]:
        lora = {"r": 4, "alpha": 8, "init_seed": init_seed}
        adapter = trainable(make_qwen(folder, seed=seed, lora=lora))
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
