"""A policy that starts from another run's adapter: `policy.from_run`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_config
import tiny_policy
import torch

from rl.checkpoints import checkpoint
from rl.config.schema import load_config
from rl.edit.trained import Trained
from rl.policies import qwen2_5_vl
from rl.simple_launch import _named_start, _parse, main

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


def make(**section: Any) -> qwen2_5_vl.Qwen25VL:
    return tiny_policy.make_qwen(str(tiny_config.WEIGHTS / "policy"), "text", **section)


def problems(**section: Any) -> list[str]:
    values = tiny_config.shipped("quickstart", *CHANGES).policy | section
    return qwen2_5_vl.Qwen25VL.problems(qwen2_5_vl.Config(**values), None)


def test_the_newest_adapter_is_loaded(trained: Path) -> None:
    policy = make(lora=LORA, from_run=str(trained))
    expected = make(lora=LORA, adapter_path=str(trained / "checkpoints/step_000002/model"))
    for (name, ours), theirs in zip(
        tiny_policy.trainable(policy).items(), tiny_policy.trainable(expected).values(), strict=True
    ):
        assert ours.equal(theirs), name
        assert "lora_B" not in name or torch.count_nonzero(ours)
    assert problems(from_run=str(trained)) == []


def test_another_model_shape_or_folder_is_refused_before_loading(
    trained: Path, tmp_path: Path
) -> None:
    run = str(trained)
    for section, parts in (
        ({"lora": LORA | {"r": 4}}, ["lora.r: 4 given", "trained with 8"]),
        ({"lora": LORA | {"target_modules": ["q_proj"]}}, ["lora.target_modules: "]),
        ({"model_path": "Qwen/Qwen2.5-VL-7B-Instruct"}, ["model_path: ", "make them equal"]),
        ({"type": "qwen3_vl"}, ["type: 'qwen3_vl' given"]),
        ({"lora": None}, ["from_run: needs lora"]),
        ({"from_run": str(tmp_path)}, ["from_run: ", "has no checkpoint"]),
        ({"from_run": "runs/typo"}, ["from_run: 'runs/typo' is no folder"]),
    ):
        [problem] = problems(**{"from_run": run, **section})
        assert all(part in problem for part in parts), problem
    assert problems(from_run=run, adapter_path=f"{run}/checkpoints/step_000001/model")
    whole = tmp_path / "checkpoints/step_000001/model"
    whole.mkdir(parents=True)
    (whole / "config.json").write_text("{}")
    (whole.parent / "state.json").write_text("{}")
    checkpoint._write_manifest(whole.parent)
    assert f"policy.model_path={whole}" in problems(from_run=str(tmp_path))[0]


@pytest.mark.slow
def test_the_launcher_names_the_checkpoint_and_a_resume_keeps_it(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [QUICKSTART, *CHANGES, f"policy.from_run={trained}", f"base_exp_dir={tmp_path}"]

    def named() -> str:
        args = _parse(words)
        return str(_named_start(args, load_config(args.config, args.overrides)).policy["from_run"])

    newest = str(trained / "checkpoints/step_000002")
    assert named() == newest
    with pytest.raises(SystemExit) as ended:
        main(["--check", *words])
    line = f"policy.from_run: {newest} after 2 iterations, held-out reward 0.875"
    assert (ended.value.code, line in capsys.readouterr().out) == (0, True)
    first = str(trained / "checkpoints/step_000001")
    tiny_config.save_checkpoint(
        load_config(QUICKSTART, [*words[1:-2], f"policy.from_run={first}", words[-1]]), 3
    )
    assert named() == first


def test_an_edit_uses_the_trained_adapter_only() -> None:
    config = {"policy": {"type": "qwen2_5_vl", "from_run": "runs/first"}}
    section = Trained(Path("adapter"), True, config).policy()
    assert section == {"type": "qwen2_5_vl", "adapter_path": "adapter"}
