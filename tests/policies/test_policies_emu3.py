"""A tiny Emu3 policy against transformers and PEFT, in float32 on a CPU."""

from pathlib import Path

import numpy as np
import pytest
import tiny_emu3
import torch
from safetensors.torch import load_file
from tiny_act import act, act_group
from tiny_policy import TEMPERATURE, make_emu3, move, trainable
from tiny_rounding import FORWARD_TOL, apart

from rl.api.engine import EngineSetup
from rl.api.plugin import PluginConfig
from rl.api.policy import PolicySetup
from rl.api.types import SamplingParams
from rl.engines.transformers import TransformersEngine
from rl.policies import emu3


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return tiny_emu3.save_policy_folder(tmp_path_factory.mktemp("policy"))


LORA = {"lora": {"r": 4, "alpha": 8}}


def stock(folder: str):
    from transformers import Emu3ForCausalLM

    return Emu3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def policy(folder):
    return make_emu3(folder)


def rows_of(policy) -> list[tuple]:
    """Two groups with different grids: a picture, one after a thought, one cut off, only words."""
    samples = [tiny_emu3.sample(0), tiny_emu3.sample(1, height=2, width=3)]
    first, second = (policy.build_prompt(sample) for sample in samples)
    write = policy.prompts.picture_completion
    return [
        (first, write(samples[0].target_codes)),
        (second, write(samples[1].target_codes, thought=" a red sky")),
        (first, write(samples[1].target_codes)[:9]),
        (second, policy.encode_completion("no idea").token_ids),
    ]


def forward(policy, rows):
    with torch.no_grad():
        return policy.module(policy.collate(rows))


# Log-probs


def test_forced_tokens_have_log_prob_zero_and_are_still_attended_to(policy):
    prompt, ids = rows_of(policy)[0]
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
    sizes = []
    head = policy.module.base_model.lm_head
    hook = head.register_forward_hook(lambda _module, _args, output: sizes.append(output.shape))
    forward(policy, rows_of(policy)[:1])
    hook.remove()
    # 16 codes of 64; '4', '*', '4' and the image token over the 528 ids below them.
    assert sizes == [(4, 528), (16, 64)]


def test_training_mode_gives_the_same_log_probs_as_sampling(policy):
    """The published configs have a dropout of 0.1, which training must not apply."""
    rows = rows_of(policy)
    policy.module.eval()
    expected = forward(policy, rows).logprobs
    policy.module.train()
    assert apart(forward(policy, rows).logprobs, expected) <= FORWARD_TOL


def test_a_published_folder_loads_as_the_same_policy(policy, tmp_path):
    published = make_emu3(tiny_emu3.save_published_folder(tmp_path))
    theirs = forward(published, rows_of(published)).logprobs
    assert apart(theirs, forward(policy, rows_of(policy)).logprobs) <= FORWARD_TOL


def test_a_constrained_sampler_and_the_trainer_agree(tmp_path):
    """The transformers engine decodes with a cache under the grammar; log-probs agree."""
    policy = make_emu3(tiny_emu3.save_policy_folder(tmp_path, fond_of_pictures=True))
    prompt = policy.build_prompt(tiny_emu3.sample(3, height=3, width=2))
    params = SamplingParams(TEMPERATURE, 1.0, -1, max_tokens=40, num_completions=6)
    [group] = TransformersEngine(PluginConfig(), EngineSetup(policy, "cpu")).generate(
        [prompt], params, [0]
    )
    actions = act_group(policy, prompt, group)
    assert sum(action.failure is None for action in actions) >= 3
    outputs = forward(policy, [(prompt, completion.token_ids) for completion in group])
    for b, completion in enumerate(group):
        ours = outputs.logprobs[b, : len(completion.token_ids)]
        assert (ours - torch.tensor(completion.logprobs)).abs().max() < FORWARD_TOL


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


# Export


def test_full_weights_load_in_the_stock_model(folder, tmp_path):
    policy = make_emu3(folder)
    move(policy)
    rows = rows_of(policy)
    policy.save_pretrained(str(tmp_path), trainable(policy))
    again = make_emu3(str(tmp_path))
    assert apart(forward(again, rows).logprobs, forward(policy, rows).logprobs) <= FORWARD_TOL
    theirs, ours = stock(str(tmp_path)).state_dict(), load_file(tmp_path / "model.safetensors")
    exported = policy.export_weights(trainable(policy), 3)
    assert exported.kind == "full" and exported.version == 3
    assert theirs.keys() == ours.keys() == exported.tensors.keys()
    live_weights = policy.module.base_model.state_dict()
    for name, tensor in exported.tensors.items():
        assert torch.equal(theirs[name], tensor) and not tensor.requires_grad
        # The export must not copy the model, which may fill half a GPU.
        assert tensor.data_ptr() == live_weights[name].data_ptr()


def test_a_tied_head_stays_tied_and_is_exported_under_both_names(tmp_path):
    policy = make_emu3(tiny_emu3.save_policy_folder(tmp_path / "base", tied=True))
    model = policy.module.base_model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    move(policy)
    assert not any("lm_head" in name for name in trainable(policy))
    exported = policy.export_weights(trainable(policy), 0).tensors
    assert torch.equal(exported["lm_head.weight"], exported["model.embed_tokens.weight"])
    policy.save_pretrained(str(tmp_path / "out"), trainable(policy))
    rows = rows_of(policy)
    again = make_emu3(str(tmp_path / "out"))
    assert apart(forward(again, rows).logprobs, forward(policy, rows).logprobs) <= FORWARD_TOL


def test_a_saved_adapter_loads_in_peft_and_equals_the_exported_one(folder, tmp_path):
    from peft import PeftModel

    policy = make_emu3(folder, **LORA)
    move(policy)
    policy.save_pretrained(str(tmp_path), trainable(policy))
    restored = PeftModel.from_pretrained(stock(folder), tmp_path)
    ours = {name.removeprefix("model."): p for name, p in trainable(policy).items()}
    theirs = {name: p for name, p in restored.named_parameters() if "lora_" in name}
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    exported = policy.export_weights(trainable(policy), 0)
    assert exported.kind == "lora" and policy.config.lora.r == 4
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert exported.tensors.keys() == saved.keys()
    again, rows = make_emu3(folder, adapter_path=str(tmp_path), **LORA), rows_of(policy)
    assert apart(forward(again, rows).logprobs, forward(policy, rows).logprobs) <= FORWARD_TOL


def test_layers_can_be_adapted_but_not_the_head(folder):
    policy = make_emu3(folder, lora={"target_modules": ["gate_proj"]})
    layers = {name.split(".lora_")[0] for name in trainable(policy)}
    assert len(layers) == 2 and all(name.endswith("mlp.gate_proj") for name in layers)
    lora = {"target_modules": ["gate_proj", "lm_head"]}
    config = emu3.Config.model_validate({"type": "emu3", "model_path": folder, "lora": lora})
    [problem] = emu3.Emu3.problems(config, None)
    assert problem.startswith("lora.target_modules: 'lm_head' is not a layer")


def test_the_engine_folder_contains_no_python_code(policy, tmp_path):
    from transformers import AutoConfig, AutoTokenizer

    published = make_emu3(tiny_emu3.save_published_folder(tmp_path))
    sampler = Path(published.engine_folder())
    assert published.engine_folder() == str(sampler) and not list(sampler.glob("*.py"))
    config = AutoConfig.from_pretrained(sampler)
    assert config.architectures == ["Emu3ForCausalLM"] and config.model_type == "emu3_text_model"
    assert len(AutoTokenizer.from_pretrained(sampler)) == config.vocab_size == 592
    ours = stock(str(sampler)).state_dict()
    for name, tensor in stock(policy.config.model_path).state_dict().items():
        assert torch.equal(ours[name], tensor)
    assert published.image_pixel_bounds is None and not published.adapts_vision_tower


def test_incomplete_weights_and_other_tokenizers_are_refused(folder, tmp_path):
    from safetensors.torch import save_file

    partial = Path(tiny_emu3.save_policy_folder(tmp_path / "partial"))
    tensors = load_file(partial / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 weights of an Emu3 \(model.norm.weight"):
        make_emu3(str(partial))
    longer = tiny_emu3.make_tokenizer(num_codes=80)
    longer.save_pretrained(tmp_path / "more")
    with pytest.raises(ValueError, match="has 608 tokens, the model 592"):
        make_emu3(folder, tokenizer_path=str(tmp_path / "more"))
    with pytest.raises(ValueError, match="emits"):
        emu3.Emu3(
            emu3.Config(type="emu3", model_path=folder),
            PolicySetup("text", max_completion_tokens=8, device=""),
        )


def test_token_ids_beyond_the_tokenizer_are_never_sampled(tmp_path):
    folder = tiny_emu3.save_policy_folder(tmp_path)
    tiny_emu3.make_tokenizer(num_codes=60).save_pretrained(tmp_path / "fewer")
    fewer = str(tmp_path / "fewer")
    assert make_emu3(folder, tokenizer_path=fewer).vocabulary_slices[-1] == 588
