"""`rl check --conformance`, on the policy that docs/policy-plugin.md prints, and with faults."""

from __future__ import annotations

import argparse
import copy
import importlib
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import tiny_loop
import torch
from tiny_config import REPO
from tiny_messages import code_of
from tiny_pages import printed, save_files
from tiny_typing import typing_errors

from rl import simple_launch
from rl.config.schema import ConfigError
from rl.engines.transformers import TransformersEngine
from rl.policies import prompting
from rl.policies.policy_base import TrainedPolicy
from rl.policies.trained_module import TrainedModule
from rl.tools import conformance
from rl.tools.commands import export
from rl.tools.notebook import load_run
from rl.tools.trained import config_for_use, load_trained

PLUGIN = "my_plugins.smolvlm"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("docs")
    save_files("docs/policy-plugin.md", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_plugins"]:
        del sys.modules[name]


@pytest.fixture
def subject(folder: Path, tmp_path: Path) -> conformance.Subject:
    return conformance.Subject(conformance.resolved(PLUGIN, None, [], tmp_path), tmp_path)


@pytest.mark.slow
def test_the_printed_policy_conforms(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (folder / "my_plugins/smolvlm.py").read_text().count("\n") < 120
    assert conformance.main([PLUGIN]) == 0
    out = capsys.readouterr().out
    assert out.count("PASS ") == len(conformance.CHECKS) == 8, out


def smolvlm() -> Any:
    return importlib.import_module(PLUGIN)


# Each fault changes the printed policy, or the engine, as its author might have written them.


def no_generation_prompt(patch: pytest.MonkeyPatch) -> None:
    ids = smolvlm().Prompts.ids
    patch.setattr(smolvlm().Prompts, "ids", lambda *given: ids(*given)[:-5])


def special_texts_become_tokens(patch: pytest.MonkeyPatch) -> None:
    def tokenize(tokenizer: Any, template: Any, instruction: str) -> list[int]:
        return prompting.ids_of(tokenizer, template.text.replace("{instruction}", instruction))

    patch.setattr(prompting, "tokenize", tokenize)


def engine_samples_banned_tokens(patch: pytest.MonkeyPatch) -> None:
    def distribution(self: Any, logits: torch.Tensor, params: Any, kinds: Any = None) -> Any:
        return (logits.cpu().float() / params.temperature).log_softmax(-1)

    patch.setattr(TransformersEngine, "_distribution", distribution)


def one_generator_for_the_batch(patch: pytest.MonkeyPatch) -> None:
    generate = TransformersEngine.generate
    patch.setattr(
        TransformersEngine,
        "generate",
        lambda self, prompts, params, seeds: generate(self, prompts, params, range(len(seeds))),
    )


def exports_the_first_weights(patch: pytest.MonkeyPatch) -> None:
    export = TrainedPolicy.export_weights
    first: list[Any] = []

    def stale(self: Any, tensors: Any, version: int) -> Any:
        first.append(export(self, tensors, version))
        return first[0]

    patch.setattr(TrainedPolicy, "export_weights", stale)


def drops_the_weights(patch: pytest.MonkeyPatch) -> None:
    """An engine with a copy of the policy that is never updated, and that cannot be read back."""
    init = TransformersEngine.__init__

    def with_copy(self: Any, config: Any, setup: Any) -> None:
        init(self, config, setup)
        self._policy = copy.copy(setup.policy)
        self._policy.module = copy.deepcopy(setup.policy.module)

    patch.setattr(TransformersEngine, "__init__", with_copy)
    patch.setattr(TransformersEngine, "held_fingerprint", lambda self: None)


def reference_is_the_policy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TrainedPolicy, "reference", lambda self: nullcontext())


def reference_stays_on(patch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def reference(self: Any) -> Iterator[None]:
        self.module.model.base_model.disable_adapter_layers()
        yield

    patch.setattr(TrainedPolicy, "reference", reference)


def centred_in_the_batch(patch: pytest.MonkeyPatch) -> None:
    logprobs = TrainedModule.logprobs

    def centred(self: Any, hidden: Any, ids: Any) -> Any:
        values, entropy = logprobs(self, hidden - hidden.mean(0), ids)
        return values, entropy

    patch.setattr(TrainedModule, "logprobs", centred)


def random_head(patch: pytest.MonkeyPatch) -> None:
    load = smolvlm().load_model

    def with_noise(config: Any) -> Any:
        model = load(config)
        torch.seed()
        model.lm_head.weight.data.normal_()
        return model

    patch.setattr(smolvlm(), "load_model", with_noise)


def half_the_adapter_is_saved(patch: pytest.MonkeyPatch) -> None:
    save = TrainedPolicy.save_pretrained

    def partly(self: Any, folder: str, tensors: Any) -> None:
        save(self, folder, {name: t for name, t in tensors.items() if ".0." in name})

    patch.setattr(TrainedPolicy, "save_pretrained", partly)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "fault", "cause"),
    [
        (0, no_generation_prompt, "it ends"),
        (0, special_texts_become_tokens, "1 special tokens come from a user"),
        (1, engine_samples_banned_tokens, "banned|apart over"),
        (2, one_generator_for_the_batch, "alone gets other completions"),
        (3, exports_the_first_weights, "export_weights does not change|changed nothing"),
        (3, drops_the_weights, "load_weights drops the weights"),
        (4, reference_is_the_policy, "follows the trained weights"),
        (4, reference_stays_on, "changed requires_grad"),
        (5, centred_in_the_batch, "of the largest entry"),
        (6, random_head, "weights differ|other log-probs"),
        (7, half_the_adapter_is_saved, "does not fit"),
    ],
)
def test_each_rule_catches_a_planted_fault(
    subject: conformance.Subject,
    number: int,
    fault: Callable[[pytest.MonkeyPatch], None],
    cause: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conformance, "CHECKS", [conformance.CHECKS[number]])
    fault(monkeypatch)
    [line] = conformance.lines(subject)
    assert line.status == "FAIL" and line.fix, line.text()
    assert re.search(cause, line.note), line.note


@pytest.mark.parametrize(
    ("plugin", "config", "cause"),
    [
        ("my_plugins.letters", None, "holds no Policy"),
        ("my_plugins.nowhere", None, "No module named 'my_plugins.nowhere'"),
        ("nothing", None, "neither a policy nor an engine"),
        ("qwen2_5_vl", None, "tiny makes no tiny model"),
        (PLUGIN, "configs/nowhere.jsonnet", "no such config file"),
    ],
)
def test_what_cannot_be_tested_is_refused(
    folder: Path, tmp_path: Path, plugin: str, config: str | None, cause: str
) -> None:
    with pytest.raises(ConfigError, match=cause):
        conformance.resolved(plugin, config, [], tmp_path)


def test_the_command_needs_no_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.execv", execv := Mock(side_effect=SystemExit))
    code_of(simple_launch.main, "--check", "--conformance", "nothing")
    assert execv.call_args.args[1][-2:] == ["rl.tools.conformance", "nothing"]


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_the_command_hands_over_what_it_was_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.execv", execv := Mock(side_effect=SystemExit))
    code_of(simple_launch.main, "my.jsonnet", "a=1", "--conformance=emu3", "--check")
    *_, option, module, plugin, config, override = execv.call_args.args[1]
    assert (option, plugin, override) == ("-m", "emu3", "a=1")
    monkeypatch.setattr(sys, "argv", [module, plugin, config, override])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    assert ended.value.code == 1 and "my.jsonnet: no such config" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["transformers"],
        ["qwen2_5_vl", "configs/tiny_reasoning.jsonnet", "engine.type=transformers"],
        ["emu3", "configs/tiny_earl.jsonnet", "engine.type=transformers"],
    ],
)
def test_shipped_plugins_conform(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert conformance.main(words) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_the_printed_commands_train_edit_and_export_it(tmp_path: Path) -> None:
    save_files("docs/policy-plugin.md", tmp_path)
    commands = [
        line
        for line in printed("docs/policy-plugin.md")
        if re.match("python|rl (?!check --conf)", line)
    ]
    assert typing_errors(sorted((tmp_path / "my_plugins").glob("*.py")), tmp_path) == []
    (tmp_path / "photo.jpg").write_bytes((REPO / "docs/images/scene.png").read_bytes())
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", "\n".join(commands)],
        cwd=tmp_path,
        env=tiny_loop.environment(PATH=path),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    run = load_run(tmp_path / "runs/smolvlm")
    rewards = {
        row["iteration"]: row["eval/reward"] for row in run.metrics() if "eval/reward" in row
    }
    assert rewards[3] > rewards[0] + 0.2, rewards
    assert (tmp_path / "words/photo.json").is_file()
    trained = load_trained(run.folder)
    options = argparse.Namespace(policy=None)
    for uses_its_code in (config_for_use, lambda trained: export.policy_of(trained, options)):
        with pytest.raises(ValueError, match=f"code would run here; .* --policy {PLUGIN}"):
            uses_its_code(trained)
    from transformers import SmolVLMForConditionalGeneration

    base = SmolVLMForConditionalGeneration.from_pretrained(tmp_path / "tiny_smolvlm")
    merged = SmolVLMForConditionalGeneration.from_pretrained(tmp_path / "my_model")
    name = "model.text_model.layers.0.self_attn.q_proj.weight"
    assert not merged.state_dict()[name].equal(base.state_dict()[name])
