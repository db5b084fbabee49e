"""A tiny Emu3 policy against transformers and PEFT, in float32 on a CPU."""

from pathlib import Path

import numpy as np
import pytest
import tiny_emu3
import torch
from padded_reference import stock
from safetensors.torch import load_file
from tiny_act import act, act_group
from tiny_calls import calls_of
from tiny_engines import max_dlogp, plain_engine, sampling
from tiny_policy import TEMPERATURE, make, saved, trainable
from tiny_rounding import FORWARD_TOL, apart
from tiny_rows import logprobs, painted_rows

from rl.policies import emu3


@pytest.fixture(scope="module")
def policy():
    return make("emu3")


# Log-probs


def test_forced_tokens_have_log_prob_zero_and_are_still_attended_to(policy):
    prompt, ids = painted_rows(policy)[0]
    batch = policy.collate([(prompt, ids)])
    forced = batch.model_inputs["forced"]
    assert int(forced.sum()) == 4 + 3, "ends of four rows, frame, picture and sequence"
    outputs = policy.module(batch)
    assert not outputs.logprobs[forced].any() and not outputs.entropy[forced].any()
    assert (outputs.logprobs[~forced] < 0).all()
    row_end = ids.index(policy.image_vocabulary.end_of_row)
    batch.input_ids[len(prompt.token_ids) + row_end] = 5
    changed = policy.module(batch).logprobs
    assert apart(changed[0, : row_end + 1], outputs.logprobs[0, : row_end + 1]) <= FORWARD_TOL
    assert (changed - outputs.logprobs)[0, row_end + 1 :].abs().max() > 0.01


def test_only_the_slice_of_the_vocabulary_of_each_token_is_projected(policy):
    sizes = calls_of(policy.module.base_model.lm_head, lambda _args, _kwargs, out: out.shape)
    logprobs(policy, painted_rows(policy)[:1])
    # 16 codes of 64; '4', '*', '4' and the image token over the 528 ids below them.
    assert sizes == [(4, 528), (16, 64)]


def test_training_mode_gives_the_same_log_probs_as_sampling(policy):
    """The published configs have a dropout of 0.1, which training must not apply."""
    rows = painted_rows(policy)
    policy.module.eval()
    expected = logprobs(policy, rows)
    policy.module.train()
    assert apart(logprobs(policy, rows), expected) <= FORWARD_TOL


def test_a_published_folder_loads_as_the_same_policy(policy, tmp_path):
    published = make(tiny_emu3.save_published_folder(tmp_path))
    theirs = logprobs(published, painted_rows(published))
    assert apart(theirs, logprobs(policy, painted_rows(policy))) <= FORWARD_TOL


def test_a_constrained_sampler_and_the_trainer_agree():
    """The transformers engine decodes with a cache under the grammar; log-probs agree."""
    policy = make(saved("emu3", fond_of_pictures=True))
    prompt = policy.build_prompt(tiny_emu3.sample(3, height=3, width=2))
    params = sampling(TEMPERATURE, max_tokens=40, num_completions=6)
    [group] = plain_engine(policy).generate([prompt], params, [0])
    actions = act_group(policy, prompt, group)
    assert sum(action.failure is None for action in actions) >= 3
    assert max_dlogp(policy, [prompt], [group]) < FORWARD_TOL


def test_completions_of_a_group_become_codes(policy):
    sample = tiny_emu3.sample(2)
    prompt = policy.build_prompt(sample)
    whole = policy.prompts.picture_completion(sample.target_codes)
    rows = [(prompt, ids) for ids in (whole, whole[:-8], whole[:2])]
    painted, cut, words_only = act(policy, rows)
    assert np.array_equal(painted.payload, sample.target_codes) and painted.failure is None
    assert cut.payload is None and cut.failure.startswith("cut off")
    assert words_only.failure.startswith("no image token") and words_only.text == "4*"
    assert policy.pass_through_completion(sample) is None


# Folders


def test_layers_can_be_adapted_but_not_the_head():
    policy = make("emu3", lora={"target_modules": ["gate_proj"]})
    layers = {name.split(".lora_")[0] for name in trainable(policy)}
    assert len(layers) == 2 and all(name.endswith("mlp.gate_proj") for name in layers)
    lora = {"target_modules": ["gate_proj", "lm_head"]}
    config = emu3.Config(type="emu3", model_path=saved("emu3"), lora=lora)
    [problem] = emu3.Emu3.problems(config, None)
    assert problem.startswith("lora.target_modules: 'lm_head' is not a layer")


def test_the_engine_folder_contains_no_python_code(policy, tmp_path):
    from transformers import AutoConfig, AutoTokenizer

    published = make(tiny_emu3.save_published_folder(tmp_path))
    sampler = Path(published.engine_folder())
    assert published.engine_folder() == str(sampler) and not list(sampler.glob("*.py"))
    config = AutoConfig.from_pretrained(sampler)
    assert config.architectures == ["Emu3ForCausalLM"] and config.model_type == "emu3_text_model"
    assert len(AutoTokenizer.from_pretrained(sampler)) == config.vocab_size == 592
    ours = stock(str(sampler)).state_dict()
    for name, tensor in stock(policy.config.model_path).state_dict().items():
        assert torch.equal(ours[name], tensor)
    assert published.image_pixel_bounds is None and not published.adapts_vision_tower


def test_incomplete_weights_and_other_tokenizers_are_refused(tmp_path):
    from safetensors.torch import save_file

    partial = Path(tiny_emu3.save_policy_folder(tmp_path / "partial"))
    tensors = load_file(partial / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 weights of an Emu3 \(model.norm.weight"):
        make(str(partial))
    tiny_emu3.make_tokenizer(num_codes=80).save_pretrained(tmp_path / "more")
    with pytest.raises(ValueError, match="has 608 tokens, the model 592"):
        make("emu3", tokenizer_path=str(tmp_path / "more"))
    with pytest.raises(ValueError, match="emits"):
        make("emu3", kind="text")


def test_token_ids_beyond_the_tokenizer_are_never_sampled(tmp_path):
    tiny_emu3.make_tokenizer(num_codes=60).save_pretrained(tmp_path)
    assert make("emu3", tokenizer_path=str(tmp_path)).vocabulary_slices[-1] == 588
