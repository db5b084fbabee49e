"""Files that another version of this project wrote are read, or refused with a message."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_config
from tiny_messages import holds, raising, refusal

from rl.check import check_report
from rl.config import loading
from rl.config.schema import load_config
from rl.model_files import read_config
from rl.ranks.dist import Dist
from rl.record import checkpoint
from rl.record.run_record import RunRecord
from rl.tools.commands import export
from rl.tools.commands import report as report_command
from rl.tools.reading import read_evaluations
from rl.tools.trained import load_trained

OVERRIDES = [
    "num_iterations=3",
    "optimizer.warmup_iterations=0",
    "optimizer.final_lr_fraction=1.0",
    "checkpoint.save_every_n_iterations=2",
    "prompts_per_iteration=2",
    "generations_per_prompt=4",
    "evaluation.num_samples=4",
    "evaluation.every_n_iterations=2",
    "algorithm.zero_spread_groups=drop",
]
NEWER = "update vlm-edit-rl"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Three iterations of `tiny_prompts` by commit 90fa50d, without tensors and pictures."""
    return shutil.copytree(Path(__file__).parent / "format_3", tmp_path / "tiny_prompts")


def rewrite(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    written = json.loads(file.read_text())
    change(written)
    file.write_text(json.dumps(written))


def config_of(run_dir: Path, *overrides: str) -> Any:
    return tiny_config.shipped(
        "tiny_prompts", f"base_exp_dir={run_dir.parent}", *OVERRIDES, *overrides
    )


def stored(*allowed: Any, **sections: Any) -> dict[str, Any]:
    """What is read of a run's config with these sections."""
    return loading.stored({"format": loading.CONFIG_FORMAT, **sections}, "it", *allowed)


def test_a_run_of_the_last_release_can_be_resumed(run_dir: Path) -> None:
    config = config_of(run_dir)
    assert check_report.problems(config) == []
    assert holds(check_report.report(config, 80)[0].splitlines()[0], "after 2 iterations")


def test_of_an_older_run_keys_that_were_removed_are_dropped() -> None:
    """A plugin of the user's own may still read them."""
    engine = {"type": "vllm", "dtype": "auto"}
    own = {"type": "mine.Engine", "share_base_weights": True}
    read = stored(engine=engine | {"share_base_weights": True})
    assert read == {"format": loading.CONFIG_FORMAT, "engine": engine}
    assert stored(engine=own)["engine"] == own
    for kept, removed in (
        ({"type": "mine.reward", "model": {"batch_size": 4}}, {"backoff_s": 2.0}),
        ({"type": "viescore"}, {"backoff_s": 3.0}),
    ):
        written = kept | {"judge": {"model": "m"} | removed}
        assert stored(rewards={"one": written})["rewards"]["one"] == kept | {
            "judge": {"model": "m"}
        }


def test_a_run_with_a_removed_key_that_changed_what_it_computed_is_not_gone_on_with() -> None:
    """It can still be read, and used if the key changed training alone."""
    emu3 = {"type": "emu3"}
    assert stored(loading.CHANGED_TRAINING, policy=emu3 | {"constrained": True})["policy"] == emu3
    thinks = stored(loading.CHANGED_TRAINING, policy={"thought": {"loss": "all"}})
    assert thinks["policy"] == {"thought": {}}, "it still thinks"
    for key, value in (("constrained", False), ("train_text_tokens_only", True)):
        policy = emu3 | {key: value}
        assert stored(policy=policy)["policy"] == emu3
        with pytest.raises(ValueError, match=rf"it sets policy\.{key}=.*version"):
            stored(loading.CHANGED_TRAINING, policy=policy)
    assert stored(loading.CHANGED_OUTPUT, policy=policy)["policy"] == emu3


def test_a_removed_key_is_refused_only_with_another_value_than_its_default() -> None:
    """The sentence says what to use instead."""
    name = "configs/quickstart.jsonnet"
    load_config(name, ["engine.share_base_weights=false", "policy.from_run=''"])
    removed = ("engine.share_base_weights=true", "policy.from_run='runs/x'")
    assert sorted(tiny_config.problems_of(name, *removed)) == [
        f"{name}: engine.share_base_weights: this key was removed, delete it; it is always false",
        f"{name}: policy.from_run: this key was removed, delete it; "
        "a new run sets policy.adapter_path, which takes a run folder",
    ]


def test_a_breaking_change_to_an_old_run_is_refused(run_dir: Path) -> None:
    changes = ("data.train.0.seed=5", "algorithm.loss=grpo")
    [problem] = check_report.problems(config_of(run_dir, *changes))
    assert holds(problem, "run_name: ... 'tiny_prompts'")
    breaking = [line.strip() for line in problem.splitlines() if line.startswith("  ")]
    assert breaking == ["data.train.0.seed: 1 -> 5", "algorithm.loss: 'dapo' -> 'grpo'"]


@pytest.mark.slow
def test_the_report_reads_a_run_of_the_last_release(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_command.main([str(run_dir)]) == 0
    assert "own words: 0.001" in capsys.readouterr().out
    [first, _] = read_evaluations(run_dir)
    [record, _] = first.records.values()
    assert (record["bare_file"], record["bare_reward"]) == ("1903207363_baseline.png", 0.0)


def test_the_policy_of_the_last_release_is_found(run_dir: Path) -> None:
    weights = "pkg://tiny_world/weights/rewriter"
    trained = load_trained(run_dir)
    assert trained.policy()["model_path"] == weights
    options = argparse.Namespace(policy=None, base=None, text_encoder_from=None)
    assert (Path(export.policy_of(trained, options).config.model_path) / "config.json").is_file()
    assert read_config(trained.model)["base_model_name_or_path"] == weights


@pytest.mark.parametrize(
    ("number", "parts"),
    [
        ("4", f"format 4 ... 3 to 3 ... {NEWER}"),
        ("2", "format 2 ... 3 to 3 ... the version of vlm-edit-rl that wrote it"),
        ("'two'", "format 'two'"),
    ],
)
def test_a_config_of_another_format_is_one_problem(number: str, parts: str) -> None:
    name = "configs/quickstart.jsonnet"
    overrides = (f"format={number}", "baseline_arm=never", "no_key_yet=1")
    [problem] = tiny_config.problems_of(name, *overrides)
    assert holds(problem, f"{name} ... {parts}")


@pytest.mark.parametrize(
    ("file", "current"),
    [
        ("config.json", loading.CONFIG_FORMAT),
        ("checkpoints/step_000002/state.json", loading.CHECKPOINT_FORMAT),
    ],
)
def test_what_a_newer_version_wrote_is_refused(
    run_dir: Path, file: str, current: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint no longer matches its manifest, but the message does not call it damaged."""
    rewrite(run_dir / file, lambda written: written.update(format=current + 1))
    folder = (run_dir / file).parent
    message = f"{folder} has the format {current + 1}, ... {current} to {current} ... {NEWER}"
    [problem] = check_report.problems(config_of(run_dir))
    assert holds(problem, f"run_name: ... {message} ... another run_name ... move {run_dir} away")
    for use in (checkpoint.model_folder, load_trained):
        with raising(ValueError, message):
            use(run_dir)
    assert NEWER in refusal(export.main, [str(run_dir), str(run_dir / "exported")])
    if file == "config.json":
        assert report_command.main([str(run_dir)]) == 1
        assert holds(capsys.readouterr().err, message)


@pytest.mark.parametrize(
    ("written", "parts"),
    [
        ('{"auto_mapping": {"format": 3}}', f"the format 3 ... 1 to 2 ... {NEWER}"),
        ('{"auto_mapping": ', "damaged ... JSON"),
    ],
)
def test_an_adapter_that_cannot_be_read_is_refused(run_dir: Path, written: str, parts: str) -> None:
    adapter = shutil.move(run_dir / "checkpoints" / "step_000002" / "model", run_dir.parent / "a")
    (adapter / "adapter_config.json").write_text(written)
    parts = f"{adapter}/adapter_config.json ... {parts}"
    overrides = ["policy.model_path=pkg://tiny_world/weights/rewriter", "base_exp_dir=elsewhere"]
    config = config_of(run_dir, *overrides, f"policy.adapter_path={adapter}")
    [problem] = check_report.problems(config)
    assert holds(problem, f"policy.adapter_path: ... {parts}")


def test_an_older_format_is_refused_and_a_run_writes_the_current_one(run_dir) -> None:
    config = config_of(run_dir)
    rewrite(run_dir / "config.json", lambda written: written.pop("format"))
    [problem] = check_report.problems(config)
    assert holds(problem, "format 1 ... 3 to 3 ... the version of vlm-edit-rl that wrote it")
    RunRecord(run_dir, config, Dist()).write_config()
    assert json.loads((run_dir / "config.json").read_text())["format"] == loading.CONFIG_FORMAT
