"""A killed and resumed run equals an uninterrupted one bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_loop
from tiny_loop import assert_same_run, episodes_of, iterations_of, metrics_of
from tiny_messages import holds
from tiny_weight_files import displace

from rl.record.checkpoint import _write_manifest
from rl.run.metric_table import doc_of

pytestmark = pytest.mark.slow


Models = dict[str, str]
"""Role -> folder."""


def test_a_run_writes_metrics_episodes_and_pictures(uninterrupted: Path) -> None:
    rows = metrics_of(uninterrupted)
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3, 4]
    assert all(row["optimizer/grad_norm"] > 0 for row in rows[1:]), "an iteration had no gradient"
    assert all(row["status/scored"] == 1 for row in rows[1:])
    assert {"eval/reward", "eval_reference/reward"} <= rows[0].keys() & rows[4].keys()
    assert "eval/reward" not in rows[1]
    assert [name for name in rows[0].keys() | rows[4].keys() if not doc_of(name)] == ["iteration"]
    assert rows[4]["sync/mean_abs_dlogp"] < 1e-5
    episodes = episodes_of(uninterrupted)
    assert len(episodes) == 4 * 2 * 4
    replies = episodes[0]["replies"]["viescore"]
    assert len(replies) == 2 and all('"score"' in reply for reply in replies)
    assert (uninterrupted / episodes[0]["image_file"]).is_file()
    assert (uninterrupted / "evaluation/it_000000/records.jsonl").read_text().count("\n") == 3


def test_a_finished_run_says_so_and_loads_nothing(
    models: Models, uninterrupted: Path, tmp_path: Path
) -> None:
    shutil.copytree(uninterrupted, tmp_path / "tiny")
    again = tiny_loop.run_forked(tiny_loop.written(models, tmp_path))
    assert "all 4 iterations are done" in again.stdout
    assert "loading" not in again.stdout


def test_the_numbers_are_those_of_the_golden_trace(uninterrupted: Path) -> None:
    """A commit that changes these numbers says why and rewrites tests/golden_trace.json.

    The trace was recorded by a plain loop: padded rows, a second forward for the backward, the
    stock editor. The tolerance covers rounding and other CPUs: rewards spread by only 0.003 here,
    and pictures are rounded to bytes.
    """
    golden = json.loads((Path(__file__).parents[1] / "golden_trace.json").read_text())
    for expected, row in zip(golden, metrics_of(uninterrupted), strict=True):
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, rel=2e-2, abs=1e-3), (name, row["iteration"])


def test_two_runs_are_equal_to_the_last_byte(
    models: Models, uninterrupted: Path, tmp_path: Path
) -> None:
    """Except for times and memory use."""
    tiny_loop.run_forked(tiny_loop.written(models, tmp_path))
    again = tmp_path / "tiny"
    assert_same_run(uninterrupted, again)
    for binary in ("checkpoints/*/model/*.safe*", "checkpoints/*/*.safe*", "images/*/*"):
        files = list(uninterrupted.glob(binary))
        assert files, binary
        for file in files:
            assert file.read_bytes() == (again / file.relative_to(uninterrupted)).read_bytes(), file


@pytest.mark.parametrize(
    ("where", "count"),
    [
        pytest.param(tiny_loop.STEP, "3", id="middle-of-an-iteration"),
        pytest.param("rl.record.checkpoint:_write_manifest", "2", id="middle-of-a-save"),
    ],
)
def test_a_run_killed_by_kill_9_resumes_exactly(
    models: Models, uninterrupted: Path, tmp_path: Path, where: str, count: str
) -> None:
    """Even if the models' files are rewritten meanwhile, with their tensors at other offsets."""
    copies = {name: str(shutil.copytree(models[name], tmp_path / name)) for name in models}
    resumed = tiny_loop.kill_and_resume(
        *(tiny_loop.written(copies, tmp_path), where, count),
        meanwhile=lambda: [displace(Path(folder)) for folder in copies.values()],
    )
    assert_same_run(uninterrupted, tmp_path / "tiny")
    if where == tiny_loop.STEP:
        # Killed before the third update, which saves the second iteration in the background: by
        # then 2 questions each about the third's 8 pictures and the bare arm's 2 were answered.
        assert tiny_loop.rows_of(tmp_path / "tiny/metrics.jsonl")[3]["judge/reused_replies"] == 20
    else:  # the second iteration was recorded, and is repeated
        assert "records after iteration 1 are made again; what was recorded is set aside" in resumed


def test_a_run_of_the_last_release_is_resumed_exactly(
    models: Models, uninterrupted: Path, tmp_path: Path
) -> None:
    """The run folder is rewritten as commit 90fa50d left it: with a key that no longer exists."""
    run_dir = shutil.copytree(uninterrupted, tmp_path / "tiny")
    shutil.rmtree(run_dir / "checkpoints/step_000004")
    (run_dir / "last_checkpoint.txt").unlink()
    checkpoint = run_dir / "checkpoints/step_000003"
    for file, section in ((checkpoint / "state.json", "meta"), (run_dir / "config.json", "")):
        values = json.loads(file.read_text())
        config = values["meta"]["config"] if section else values
        config["checkpoint"]["keep"] = "all"
        file.write_text(json.dumps(values))
    (checkpoint / "manifest.json").unlink()
    _write_manifest(checkpoint)
    resumed = tiny_loop.run_forked(tiny_loop.written(models, tmp_path))
    assert "step_000003: 3 iterations done" in resumed.stdout
    assert_same_run(uninterrupted, tmp_path / "tiny")


def test_a_run_killed_before_its_first_checkpoint_starts_again(
    models: Models, uninterrupted: Path, tmp_path: Path
) -> None:
    path = tiny_loop.written(models, tmp_path, checkpoint={"save_every_n_iterations": 4})
    tiny_loop.run_forked(path, tiny_loop.STEP, "3", check=False)
    before = (tmp_path / "tiny/metrics.jsonl").read_bytes()
    again = tiny_loop.run_forked(path)
    (set_aside,) = (tmp_path / "tiny/set_aside").iterdir()
    assert holds(again.stdout, f"begins again from the base weights ... {set_aside}")
    assert (set_aside / "metrics.jsonl").read_bytes() == before
    assert_same_run(uninterrupted, tmp_path / "tiny")
    # A run whose checkpoints were deleted is not silently repeated.
    shutil.rmtree(tmp_path / "tiny/checkpoints")
    record = (tmp_path / "tiny/metrics.jsonl").read_bytes()
    refused = tiny_loop.run_forked(path, check=False)
    assert refused.returncode != 0 and "loading" not in refused.stdout
    assert holds(refused.stderr, "no checkpoint ... step_000004 ... another run_name")
    assert (tmp_path / "tiny/metrics.jsonl").read_bytes() == record


@pytest.mark.parametrize(
    ("count", "done"),
    # The evaluation before training renders seven times: completions, references, the words of its
    # three samples again (through training's forward, and each alone), the stock arm.
    [("8", 0), pytest.param("10", 2, marks=pytest.mark.campaign)],
)
def test_sigterm_in_a_rollout_saves_at_once_and_the_run_resumes_exactly(
    models: Models, uninterrupted: Path, tmp_path: Path, count: str, done: int
) -> None:
    path = tiny_loop.written(models, tmp_path)
    stopped = tiny_loop.run_forked(
        path, "rl.rollout.stream:PendingRollout.__init__", count, "SIGTERM"
    )
    assert f"stopped after {done} iterations" in stopped.stdout
    assert iterations_of(tmp_path / "tiny") == list(range(done + 1))
    assert "resumed from" in tiny_loop.run_forked(path).stdout
    assert_same_run(uninterrupted, tmp_path / "tiny")


@pytest.fixture(scope="module")
def straight_with_vllm(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_loop.run_once(tmp_path_factory, "straight_with_vllm", models, **with_vllm(models))


def with_vllm(models: Models) -> dict[str, Any]:
    """Changes of a config. Training draws dropout masks, so no forward of a rollout is reused."""
    policy = tiny_loop.config_of(models, Path())["policy"]
    policy["lora"]["dropout"] = 0.1
    return {"engine": {"type": "vllm"}, "policy": policy}


PHASES = "prompts generate condition render learn judge_wait sync record checkpoint evaluate"


@pytest.mark.campaign
@pytest.mark.parametrize("phase", PHASES.split())
def test_a_run_with_vllm_killed_between_two_phases_resumes_exactly(
    models: Models, straight_with_vllm: Path, tmp_path: Path, phase: str
) -> None:
    path = tiny_loop.written(models, tmp_path, **with_vllm(models))
    tiny_loop.kill_and_resume(path, "phase", phase, "2")
    assert_same_run(straight_with_vllm, tmp_path / "tiny")


def test_a_resume_with_a_changed_config_is_refused_and_the_keys_are_named(
    models: Models, uninterrupted: Path, tmp_path: Path
) -> None:
    config = tiny_loop.config_of(models, uninterrupted.parent, seed=4, generations_per_prompt=2)
    refused = tiny_loop.run_forked(tiny_loop.write_config(tmp_path, config), check=False)
    assert refused.returncode != 0
    assert holds(refused.stderr, "seed: 3 -> 4 ... generations_per_prompt: 4 -> 2 ... run_name")
