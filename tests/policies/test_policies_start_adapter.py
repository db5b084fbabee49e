"""A policy that starts from another run's adapter: `policy.adapter_path`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_config
import tiny_policy
import tiny_qwen
import tiny_rows
import torch
from tiny_messages import code_of

from rl import build
from rl.config.schema import load_config
from rl.policies.qwen_vl import Qwen25VL
from rl.ranks.dist import Dist
from rl.record import checkpoint
from rl.run.set_up import with_start
from rl.simple_launch import _named_start, _parse, main
from rl.tools.trained import Trained

LORA = {"r": 8, "alpha": 16, "target_modules": ["q_proj", "v_proj"]}
QUICKSTART = "configs/quickstart.jsonnet"
CHANGES = [f"policy.lora={json.dumps(LORA)}"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with two checkpoints; the newer one's adapter is not the initial one."""
    run = tmp_path_factory.mktemp("runs") / "first"
    section = tiny_config.shipped("quickstart", *CHANGES).policy
    for iteration in (1, 2):
        policy = make(lora=LORA)
        tiny_policy.move(policy, scale=iteration / 10)
        step = run / "checkpoints" / f"step_{iteration:06d}"
        policy.save_pretrained(str(step / "model"), tiny_policy.trainable(policy))
        state = {"iteration": iteration, "world_size": 1, "meta": {"config": {"policy": section}}}
        (step / "state.json").write_text(json.dumps(state))
        checkpoint._write_manifest(step)
    (run / "metrics.jsonl").write_text('{"iteration": 2, "eval/reward": 0.875}\n')
    return run


def make(**section: Any) -> Qwen25VL:
    return tiny_policy.make(str(tiny_config.WEIGHTS / "policy"), kind="text", **section)


def problems(**section: Any) -> list[str]:
    config = tiny_config.shipped("quickstart", *CHANGES)
    return list(Qwen25VL.problems(Qwen25VL.Config(**(config.policy | section)), config))


def test_the_newest_adapter_is_loaded(trained: Path) -> None:
    expected = make(lora=LORA, adapter_path=str(trained / "checkpoints/step_000002/model"))
    for path in (trained, trained / "checkpoints/step_000002"):
        policy = make(lora=LORA, adapter_path=str(path))
        theirs = tiny_policy.trainable(expected)
        for name, ours in tiny_policy.trainable(policy).items():
            assert ours.equal(theirs[name]) and ours.any(), name
        assert problems(adapter_path=str(path)) == []


def test_another_model_shape_or_folder_is_refused_before_loading(
    trained: Path, tmp_path: Path
) -> None:
    run = str(trained)
    for section, parts in (
        ({"lora": LORA | {"r": 4}}, ["lora.r: 4 given", "adapter_path's is 8"]),
        ({"lora": None}, ["adapter_path: needs lora"]),
        ({"adapter_path": str(tmp_path)}, ["adapter_path: ", "nor a checkpoint of a run"]),
        ({"adapter_path": "runs/typo"}, ["adapter_path: 'runs/typo' holds no adapter_config.json"]),
    ):
        [problem] = problems(**{"adapter_path": run, **section})
        assert all(part in problem for part in parts), problem
    adapter = shutil.copytree(trained / "checkpoints/step_000002/model", tmp_path / "adapter")
    saved = json.loads((adapter / "adapter_config.json").read_text())
    saved["base_model_name_or_path"] = "Qwen/Qwen2.5-VL-3B-Instruct"
    (adapter / "adapter_config.json").write_text(json.dumps(saved))
    other = {"model_path": "Qwen/Qwen2.5-VL-7B-Instruct", "adapter_path": str(adapter)}
    assert "model_path: adapter_path was trained on 'Qwen/Qwen2.5-VL-3B" in problems(**other)[0]
    assert problems(adapter_path=str(adapter)) == [], "a folder may be a copy"
    whole = tmp_path / "checkpoints/step_000001/model"
    whole.mkdir(parents=True)
    (whole / "config.json").write_text("{}")
    (whole.parent / "state.json").write_text("{}")
    checkpoint._write_manifest(whole.parent)
    assert f"policy.model_path={whole}" in problems(adapter_path=str(tmp_path))[0]


@pytest.mark.slow
def test_the_launcher_names_the_checkpoint_and_a_resume_keeps_it(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [QUICKSTART, *CHANGES, f"policy.adapter_path={trained}", f"base_exp_dir={tmp_path}"]

    def named() -> str:
        args = _parse(words)
        config = _named_start(args, load_config(args.config, args.overrides))
        return str(config.policy["adapter_path"])

    newest = str(trained / "checkpoints/step_000002/model")
    assert named() == newest
    assert code_of(main, "--check", *words) == 0
    assert f"starts from          {newest}" in capsys.readouterr().out
    first = str(trained / "checkpoints/step_000001/model")
    tiny_config.save_checkpoint(
        load_config(QUICKSTART, [*words[1:-2], f"policy.adapter_path={first}", words[-1]]), 3
    )
    assert named() == first


def test_an_edit_uses_the_trained_adapter_only() -> None:
    config = {"policy": {"type": "qwen2_5_vl", "adapter_path": "runs/first"}}
    section = Trained(Path("adapter"), True, config).policy()
    assert section == {"type": "qwen2_5_vl", "adapter_path": "adapter"}


def logprobs(policy: Qwen25VL) -> torch.Tensor:
    return tiny_rows.logprobs(policy, [(policy.build_prompt(tiny_qwen.sample(0)), (20, 30, 40))])


def test_the_reference_is_the_adapter_that_the_run_starts_from(trained: Path) -> None:
    adapter = str(trained / "checkpoints/step_000002/model")
    policy = make(lora=LORA, adapter_path=adapter, keeps_start=True)
    start = logprobs(policy)
    with policy.reference():
        assert logprobs(policy).equal(start), "a KL of 0 before the first step"
    with policy.base_model():
        base = logprobs(policy)
    tiny_policy.move(policy)
    moved = logprobs(policy)
    with policy.reference():
        assert logprobs(policy).equal(start)
    with policy.base_model():
        assert logprobs(policy).equal(base)
    assert logprobs(policy).equal(moved)
    assert not base.allclose(start, atol=1e-3) and not moved.allclose(start, atol=1e-3)
    old = make(lora=LORA, adapter_path=adapter)
    with old.reference():
        assert logprobs(old).equal(base), "a run that was begun before runs kept their start"


def test_a_run_keeps_its_own_copy_of_the_adapter(trained: Path, tmp_path: Path) -> None:
    adapter = trained / "checkpoints/step_000002/model"
    overrides = [*CHANGES, f"policy.adapter_path={adapter}", f"base_exp_dir={tmp_path}"]
    config = load_config(QUICKSTART, overrides)
    resolved = build.resolve(config)

    def opened(newest: Path | None) -> tuple[str, bool]:
        own, keeps_start = with_start(resolved, newest, Dist())
        return own.policy.config.adapter_path, keeps_start

    own = str(config.run_dir / "start")
    assert opened(None) == (own, True)
    weights = "adapter_model.safetensors"
    assert Path(own, weights).read_bytes() == (adapter / weights).read_bytes()
    tiny_config.save_checkpoint(config, 1)
    newest = config.run_dir / "checkpoints/step_000001"
    assert opened(newest) == (own, True)
    shutil.rmtree(own)
    with pytest.raises(ValueError, match="start is gone"):
        opened(newest)
    state = json.loads((newest / "state.json").read_text())
    del state["meta"]["config"]["algorithm"]["kl_reference"]
    (newest / "state.json").write_text(json.dumps(state))
    assert opened(newest) == (str(adapter), False), "it was begun with the base model as reference"
    fresh = build.resolve(load_config(QUICKSTART, [*CHANGES, f"base_exp_dir={tmp_path}"]))
    assert with_start(fresh, None, Dist())[1] is False
