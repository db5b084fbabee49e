"""The Qwen2.5-VL policy against the stock pipeline, transformers and PEFT, at tiny size.

All numbers are float32 on a CPU. `_G` completions in a group.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import tiny_qwen
import torch
from safetensors.torch import load_file

from rl.policies import qwen2_5_vl
from rl.types import Completion, HiddenStates

TEMPERATURE = 0.7
WORDS_G = ["make the square green", "blue", "turn it to the sky and add a circle"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return tiny_qwen.save_policy_folder(tmp_path_factory.mktemp("policy"))


def make(folder: str, kind="hidden_states", negative=None, checkpointing=False, **config):
    config = {"dtype": "float32", "lora": {"r": 4, "alpha": 8}} | config
    return qwen2_5_vl.build(
        qwen2_5_vl.Config(type="qwen2_5_vl", model_path=folder, **config),
        template=tiny_qwen.TEMPLATE,
        kind=kind,
        negative_prompt=negative,
        temperature=TEMPERATURE,
        max_completion_tokens=16,
        gradient_checkpointing=checkpointing,
        device="cpu",
    )


def move(policy, scale: float = 0.1) -> None:
    """Stand-in for training: shift what is trainable, so that policy and base differ."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            if parameter.requires_grad:
                parameter.add_(scale * torch.randn_like(parameter))


def trainable(policy) -> dict[str, torch.Tensor]:
    return {n: p for n, p in policy.module.named_parameters() if p.requires_grad}


@pytest.fixture(scope="module")
def policy(folder):
    policy = make(folder, negative=" ")
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
    """Texts and pictures through `QwenImageEditPipeline`'s own encoder, given the token types that
    it forgets to pass on."""
    from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageEditPipeline
    from transformers import Qwen2_5_VLProcessor, Qwen2VLVideoProcessor

    class WithTokenTypes(torch.nn.Module):
        dtype = torch.float32

        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, input_ids, **inputs):
            types = (input_ids == self.model.config.image_token_id).long()
            return self.model(input_ids=input_ids, mm_token_type_ids=types, **inputs)

    def encode(texts, images):
        tokenizer = tiny_qwen.make_tokenizer()
        processor = Qwen2_5_VLProcessor(
            image_processor=tiny_qwen.make_image_processor(),
            tokenizer=tokenizer,
            video_processor=Qwen2VLVideoProcessor(),
        )
        pipeline = QwenImageEditPipeline(
            FlowMatchEulerDiscreteScheduler(), None, None, tokenizer, processor, None
        )
        pipeline.text_encoder = WithTokenTypes(policy.module.vl_model)
        with torch.no_grad():
            return pipeline._get_qwen_prompt_embeds(texts, images, "cpu", torch.float32)

    return encode


def test_conditioning_is_the_pipelines_own_given_the_token_types(policy, stock_embeds):
    """A prompt's kept states are the stock encoder's; the completion adds rows after them."""
    samples = [tiny_qwen.sample(i, width=64 * (i + 1)) for i in range(2)]
    prompts = [policy.build_prompt(sample) for sample in samples]
    embeds, mask = stock_embeds(
        [sample.instruction for sample in samples], [prompt.images[0] for prompt in prompts]
    )
    for i, prompt in enumerate(prompts):
        expected = embeds[i] if mask is None else embeds[i][mask[i].bool()]
        [action] = policy.act(prompt, [policy.encode_completion("blue")])
        kept = len(prompt.token_ids) - 64
        assert expected.shape == (kept, 64)
        assert (action.payload.embeds[:kept] - expected).abs().max() < 1e-5
        assert action.payload.embeds.shape[0] == kept + len(
            policy.encode_completion("blue").token_ids
        )


def test_a_batch_equals_one_by_one(policy, group):
    """To 2e-6 of the largest value: float32 sums in another order."""
    prompt, completions_G = group
    together = policy.act(prompt, completions_G)
    for completion, action in zip(completions_G, together, strict=True):
        [alone] = policy.act(prompt, [completion])
        for ours, theirs in (
            (action.payload.embeds, alone.payload.embeds),
            (action.logprobs, alone.logprobs),
        ):
            assert (ours - theirs).abs().max() <= 2e-6 * theirs.abs().max()


def test_pictures_of_different_samples_stay_with_their_rows(policy, group):
    """Rows of two prompts, interleaved: each equals its own forward."""
    other = policy.build_prompt(tiny_qwen.sample(5, width=64, height=96))
    ids = policy.encode_completion("blue").token_ids
    mixed = [(other, ids), *rows(group), (other, ids[:2])]
    with torch.no_grad():
        together = policy.module(policy.collate(mixed))
        for b, row in enumerate(mixed):
            alone = policy.module(policy.collate([row]))
            num_tokens = len(row[1])
            assert (together.logprobs[b, :num_tokens] - alone.logprobs[0]).abs().max() < 1e-5
            assert not together.logprobs[b, num_tokens:].any()


def test_the_stop_token_is_conditioned_on_and_embeds_are_detached(policy, group):
    prompt, completions_G = group
    for completion, action in zip(completions_G, policy.act(prompt, completions_G), strict=True):
        kept = len(prompt.token_ids) - prompt.num_dropped_tokens
        assert action.payload.embeds.shape == (kept + len(completion.token_ids), 64)
        assert not action.payload.embeds.requires_grad


def test_base_conditioning_ignores_the_adapter_and_negatives_always_do(folder, group):
    prompt, completions_G = group
    moved = make(folder, negative=" ", conditioning="base")
    untrained = make(folder, negative=" ")
    [before] = untrained.act(prompt, completions_G[:1])
    move(moved)
    [base] = moved.act(prompt, completions_G[:1])
    assert torch.equal(base.payload.embeds, before.payload.embeds)
    assert torch.equal(base.payload.negative_embeds, before.payload.negative_embeds)
    assert base.logprobs is None

    trained = make(folder, negative=" ")
    move(trained)
    [drifted] = trained.act(prompt, completions_G[:1])
    assert (drifted.payload.embeds - before.payload.embeds).abs().max() > 1e-2
    assert torch.equal(drifted.payload.negative_embeds, before.payload.negative_embeds)


def test_negatives_are_encoded_once_a_picture(policy, group):
    prompt, completions_G = group
    first = policy.act(prompt, completions_G[:1])[0].payload.negative_embeds
    again = policy.act(prompt, completions_G[1:2])[0].payload.negative_embeds
    assert again is first
    negative = policy.prompts.prompt(prompt.sample, " ")
    assert first.shape[0] == len(negative.token_ids) - 64


# Log-probs


def left_padded_logprobs(policy, group) -> tuple[torch.Tensor, list[int]]:
    """transformers' own forward over left-padded rows, full logits, plain log_softmax."""
    prompt, completions_G = group
    model = policy.module.vl_model
    lengths = [len(completion.token_ids) for completion in completions_G]
    width = len(prompt.token_ids) + max(lengths)
    ids = torch.full((len(lengths), width), 0)
    mask = torch.zeros_like(ids)
    for b, completion in enumerate(completions_G):
        row = torch.tensor([*prompt.token_ids, *completion.token_ids])
        ids[b, -len(row) :], mask[b, -len(row) :] = row, 1
    pixels, grid = prompt.model_inputs["pixel_values"], prompt.model_inputs["image_grid_thw"]
    logits = model(
        input_ids=ids,
        attention_mask=mask,
        pixel_values=pixels.repeat(len(lengths), 1),
        image_grid_thw=grid.repeat(len(lengths), 1),
        mm_token_type_ids=(ids == model.config.image_token_id).long(),
        logits_to_keep=max(lengths) + 1,
    ).logits.float()
    logits[..., list(policy.banned_token_ids)] = float("-inf")
    logprobs = (logits[:, :-1] / TEMPERATURE).log_softmax(-1)
    return logprobs.gather(-1, ids[:, -max(lengths) :, None])[..., 0], lengths


def test_logprobs_and_gradients_equal_a_left_padded_full_vocabulary_forward(policy, group):
    expected, lengths = left_padded_logprobs(policy, group)
    outputs = policy.module(policy.collate(rows(group)))
    weights = torch.linspace(-1, 1, sum(lengths))
    ours = torch.cat([outputs.logprobs[b, :n] for b, n in enumerate(lengths)])
    theirs = torch.cat([expected[b, -n:] for b, n in enumerate(lengths)])
    assert (ours - theirs).abs().max() < 1e-5
    assert ours.dtype == torch.float32

    parameters = list(trainable(policy).values())
    ours_grad = torch.autograd.grad((ours * weights).sum(), parameters)
    theirs_grad = torch.autograd.grad((theirs * weights).sum(), parameters)
    scale = max(grad.abs().max() for grad in theirs_grad)
    for a, b in zip(ours_grad, theirs_grad, strict=True):
        assert (a - b).abs().max() < 1e-5 * scale


def test_act_gives_the_training_forwards_logprobs(policy, group):
    prompt, completions_G = group
    with torch.no_grad():
        outputs = policy.module(policy.collate(rows(group)))
    for b, action in enumerate(policy.act(prompt, completions_G)):
        torch.testing.assert_close(
            action.logprobs, outputs.logprobs[b, : len(action.logprobs)], atol=1e-5, rtol=0
        )


def test_gradient_checkpointing_changes_no_gradient(folder, group):
    gradients = []
    for checkpointing in (False, True):
        policy = make(folder, checkpointing=checkpointing)
        move(policy)
        policy.module.train()
        policy.module(policy.collate(rows(group))).logprobs.sum().backward()
        gradients.append([p.grad for p in trainable(policy).values()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_only_the_language_models_attention_is_trained(policy):
    names = list(trainable(policy))
    assert len(names) == 2 * 2 * 4, "A and B of q, k, v, o in two layers"
    assert all("language_model.layers" in name for name in names)
    wide = qwen2_5_vl.LoraSection(target_modules=("gate_proj", "q_proj"))
    adapted = make(policy.config.model_path, lora=wide)
    assert not any("visual" in name for name in trainable(adapted))


def test_an_empty_completion_has_no_logprobs(policy, group):
    prompt, completions_G = group
    batch = policy.collate([(prompt, ()), (prompt, completions_G[0].token_ids)])
    outputs = policy.module(batch)
    assert not outputs.logprobs[0].any() and outputs.logprobs[1].any()
    assert policy.module(policy.collate([(prompt, ())])).logprobs.shape == (1, 0)


# What a completion means


def test_text_actions_carry_the_words_and_run_no_forward(folder, group, monkeypatch):
    policy = make(folder, kind="text")
    monkeypatch.setattr(policy.module, "forward", None)
    prompt, completions_G = group
    for action, words in zip(policy.act(prompt, completions_G), WORDS_G, strict=True):
        assert action.text == action.payload == words
        assert action.failure is None


@pytest.mark.parametrize("kind", ["hidden_states", "text"])
def test_completions_without_words_fail_alone(folder, group, kind):
    policy = make(folder, kind=kind)
    stop = policy.stop_token_ids[0]
    spaces = policy.encode_completion("  \n").token_ids
    ids_G = [(stop,), spaces, group[1][0].token_ids]
    completions_G = [Completion(ids, (0.0,) * len(ids), "stop") for ids in ids_G]
    empty, blank, fine = policy.act(group[0], completions_G)
    assert empty.payload is None and "no words" in empty.failure
    assert blank.payload is None and "no words" in blank.failure
    assert fine.failure is None and fine.text == WORDS_G[0]
    assert isinstance(fine.payload, str if kind == "text" else HiddenStates)


def test_a_reference_completion_stops_and_holds_no_specials(policy):
    completion = policy.encode_completion("say <|im_end|> now")
    assert completion.token_ids[-1] == policy.stop_token_ids[0]
    assert not set(completion.token_ids[:-1]) & {*policy.banned_token_ids, *policy.stop_token_ids}
    assert completion.finish == "stop"


# Weights


def test_reference_is_the_base_and_comes_back(policy, group):
    batch = policy.collate(rows(group))
    with torch.no_grad():
        trained = policy.module(batch).logprobs
        with policy.reference():
            base = policy.module(batch).logprobs
        after = policy.module(batch).logprobs
        untrained = make(policy.config.model_path).module(batch).logprobs
    assert torch.equal(base, untrained)
    assert torch.equal(after, trained)
    assert (trained - base).abs().max() > 1e-2
    assert all(parameter.requires_grad for parameter in trainable(policy).values())


def test_full_finetuning_trains_all_but_the_tower_and_keeps_its_reference(folder, group):
    policy = make(folder, lora=None)
    assert {n.split(".")[2] for n in trainable(policy)} == {"language_model", "weight"}
    batch = policy.collate(rows(group))
    with torch.no_grad():
        base = policy.module(batch).logprobs
        move(policy, 0.02)
        trained = policy.module(batch).logprobs
        with policy.reference():
            assert torch.equal(policy.module(batch).logprobs, base)
        assert torch.equal(policy.module(batch).logprobs, trained)
    assert (trained - base).abs().max() > 1e-2


def test_exported_weights_are_named_as_peft_does_and_are_copies(policy):
    from peft import get_peft_model_state_dict

    weights = policy.export_weights(trainable(policy), version=3)
    expected = get_peft_model_state_dict(policy.module.model)
    assert weights.kind == "lora" and weights.version == 3
    assert set(weights.tensors) == set(expected)
    assert all(torch.equal(weights.tensors[name], expected[name]) for name in expected)
    name = next(iter(weights.tensors))
    weights.tensors[name].mul_(2)
    assert not torch.equal(weights.tensors[name], expected[name])


def test_the_fingerprint_changes_exactly_when_a_weight_does(policy):
    tensors = {name: tensor.detach().clone() for name, tensor in trainable(policy).items()}
    first = policy.export_weights(tensors, 0).fingerprint
    assert policy.export_weights(dict(reversed(tensors.items())), 1).fingerprint == first
    victim = next(iter(tensors.values())).view(-1)
    victim[5] = torch.nextafter(victim[5], torch.tensor(9.0))
    assert policy.export_weights(tensors, 0).fingerprint != first


def test_a_saved_adapter_loads_in_peft_and_as_a_new_start(policy, group, tmp_path):
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

    again = make(policy.config.model_path, adapter_path=str(tmp_path))
    batch = policy.collate(rows(group))
    with torch.no_grad():
        assert torch.equal(again.module(batch).logprobs, policy.module(batch).logprobs)
    assert trainable(again).keys() == trainable(policy).keys()
    with pytest.raises(ValueError, match="r=4 alpha=8"):
        make(policy.config.model_path, adapter_path=str(tmp_path), lora={"r": 2, "alpha": 8})


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_full_model_loads_in_transformers(tmp_path, tied):
    from transformers import Qwen2_5_VLForConditionalGeneration

    policy = make(tiny_qwen.save_policy_folder(tmp_path / "base", tied=tied), lora=None)
    move(policy)
    exported = policy.export_weights(trainable(policy), 0)
    assert "lm_head.weight" in exported.tensors, "a sampler keeps its own head"
    policy.save_pretrained(str(tmp_path / "saved"), trainable(policy))
    restored = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / "saved")
    expected = policy.module.model.state_dict()
    for name, tensor in restored.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_weights_may_come_from_an_editors_text_encoder(folder, tmp_path):
    """Another model's weights under this model's tokenizer; the sampler's folder joins both."""
    editor = tmp_path / "editor"
    tokenizer = tiny_qwen.make_tokenizer()
    tiny_qwen.make_model(tokenizer, seed=7).save_pretrained(editor / "text_encoder")
    policy = make(folder, init_text_encoder_from=str(editor))
    theirs = load_file(editor / "text_encoder" / "model.safetensors")
    ours = policy.module.vl_model.state_dict()
    own = load_file(Path(folder) / "model.safetensors")
    head = "lm_head.weight"
    assert torch.equal(ours[head], theirs[head])
    assert not torch.equal(ours[head], own[head])

    joined = Path(policy.sampler_folder())
    assert (joined / "model.safetensors").resolve() == editor / "text_encoder" / "model.safetensors"
    assert (joined / "tokenizer.json").resolve() == Path(folder) / "tokenizer.json"
    assert (joined / "preprocessor_config.json").exists()
    assert Path(policy.sampler_folder()) == joined, "asked twice, made once"
    assert make(folder).sampler_folder() == folder


def test_picture_bounds_can_be_set(folder):
    """Fewer image tokens for the policy, whatever the processor on disk says."""
    sample = tiny_qwen.sample(0, width=96, height=96)

    def num_image_tokens(**config) -> int:
        prompt = make(folder, **config).build_prompt(sample)
        return int(prompt.model_inputs["image_grid_thw"].prod()) // 4

    assert num_image_tokens() == 9
    assert num_image_tokens(image_max_pixels=56 * 56) == 4
    assert num_image_tokens(image_min_pixels=110 * 110) == 16
    assert make(folder, image_max_pixels=56 * 56).image_pixel_bounds == (56 * 56, 56 * 56)


def test_every_rank_starts_from_the_same_adapter(folder):
    torch.manual_seed(1)
    first = trainable(make(folder))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second = trainable(make(folder))
    assert torch.equal(torch.get_rng_state(), before), "and draws nothing from the trainer's stream"
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = trainable(make(folder, lora={"r": 4, "alpha": 8, "init_seed": 1}))
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_importing_the_plug_imports_nothing_heavy():
    code = (
        "import sys, rl.policies.qwen2_5_vl as plug; plug.Config(type='x', model_path='y');"
        "assert not {'torch', 'transformers', 'peft', 'PIL'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
