"""A killed and resumed run equals an uninterrupted one bit for bit."""

from __future__ import annotations

import json
import shutil
from itertools import chain
from pathlib import Path

import pytest
import tiny_loop
from tiny_loop import assert_same_run, episodes_of, metrics_of
from tiny_messages import holds
from tiny_weight_files import displace

from rl.record.checkpoint import _write_manifest
from rl.run.metric_table import doc_of

pytestmark = pytest.mark.slow


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
    models: dict[str, str], uninterrupted: Path, tmp_path: Path
) -> None:
    shutil.copytree(uninterrupted, tmp_path / "tiny")
    config = tiny_loop.config_of(models, tmp_path)
    again = tiny_loop.run_forked(tiny_loop.write_config(tmp_path, config))
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
    models: dict[str, str], uninterrupted: Path, tmp_path: Path
) -> None:
    """Except for times and memory use."""
    tiny_loop.run_forked(tiny_loop.write_config(tmp_path, tiny_loop.config_of(models, tmp_path)))
    again = tmp_path / "tiny"
    assert_same_run(uninterrupted, again)
    binary = ["checkpoints/*/model/*.safetensors", "checkpoints/*/*.safetensors", "images/*/*"]
    files = [sorted(uninterrupted.glob(pattern)) for pattern in binary]
    assert all(files)
    for file in chain(*files):
        assert file.read_bytes() == (again / file.relative_to(uninterrupted)).read_bytes(), file


@pytest.mark.parametrize(
    ("where", "count"),
    [
        pytest.param(tiny_loop.STEP, "3", id="middle-of-an-iteration"),
        pytest.param("rl.record.checkpoint:_write_manifest", "2", id="middle-of-a-save"),
    ],
)
def test_a_run_killed_by_kill_9_resumes_exactly(
    models: dict[str, str], uninterrupted: Path, tmp_path: Path, where: str, count: str
) -> None:
    """Even if the models' files are rewritten meanwhile, with their tensors at other offsets."""
    copies = {name: shutil.copytree(folder, tmp_path / name) for name, folder in models.items()}
    config = tiny_loop.config_of({name: str(folder) for name, folder in copies.items()}, tmp_path)
    path = tiny_loop.write_config(tmp_path, config)
    killed = tiny_loop.run_forked(path, where, count, check=False)
    assert killed.returncode == -9, killed.stderr[-2000:]
    for folder in copies.values():
        displace(folder)
    resumed = tiny_loop.run_forked(path).stdout
    assert "resumed from" in resumed
    if where.startswith(
        "rl.record.checkpoint"
    ):  # the second iteration was recorded, and is repeated
        assert "records after iteration 1 are made again; what was recorded is set aside" in resumed
    assert_same_run(uninterrupted, tmp_path / "tiny")
    rows = tiny_loop.rows_of(tmp_path / "tiny/metrics.jsonl")
    reused = [row.get("judge/reused_replies") for row in rows]
    # Killed before the third update, which saves the second iteration in the background: by then
    # 2 questions each about the third's 8 pictures and the bare arm's 2 were answered.
    assert reused[3] == 20 or where.startswith("rl.record.checkpoint"), reused


def as_the_last_release_left_it(run_dir: Path) -> None:
    """Rewrites a run folder as commit 90fa50d left it: with a config key that no longer exists."""
    shutil.rmtree(run_dir / "checkpoints/step_000004")
    (run_dir / "last_checkpoint.txt").unlink()
    checkpoint = run_dir / "checkpoints/step_000003"
    state = json.loads((checkpoint / "state.json").read_text())
    for config in (
        state["meta"]["config"],
        written := json.loads((run_dir / "config.json").read_text()),
    ):
        config["checkpoint"]["keep"] = "all"
    (checkpoint / "state.json").write_text(json.dumps(state))
    (run_dir / "config.json").write_text(json.dumps(written))
    (checkpoint / "manifest.json").unlink()
    _write_manifest(checkpoint)


def test_a_run_of_the_last_release_is_resumed_exactly(
    models: dict[str, str], uninterrupted: Path, tmp_path: Path
) -> None:
    as_the_last_release_left_it(shutil.copytree(uninterrupted, tmp_path / "tiny"))
    path = tiny_loop.write_config(tmp_path, tiny_loop.config_of(models, tmp_path))
    resumed = tiny_loop.run_forked(path)
    assert "step_000003: 3 iterations done" in resumed.stdout
    assert_same_run(uninterrupted, tmp_path / "tiny")


def test_a_run_killed_before_its_first_checkpoint_starts_again(
    models: dict[str, str], uninterrupted: Path, tmp_path: Path
) -> None:
    changes = {"checkpoint": {"save_every_n_iterations": 4}}
    path = tiny_loop.write_config(tmp_path, tiny_loop.config_of(models, tmp_path, **changes))
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
    models: dict[str, str], uninterrupted: Path, tmp_path: Path, count: str, done: int
) -> None:
    path = tiny_loop.write_config(tmp_path, tiny_loop.config_of(models, tmp_path))
    stopped = tiny_loop.run_forked(
        path, "rl.rollout.stream:PendingRollout.__init__", count, "SIGTERM"
    )
    assert f"stopped after {done} iterations" in stopped.stdout
    assert [row["iteration"] for row in metrics_of(tmp_path / "tiny")] == list(range(done + 1))
    assert "resumed from" in tiny_loop.run_forked(path).stdout
    assert_same_run(uninterrupted, tmp_path / "tiny")


@pytest.fixture(scope="module")
def straight_with_vllm(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_loop.run_once(
        tmp_path_factory, "straight_with_vllm", lambda folder: with_vllm(models, folder)
    )


def with_vllm(models: dict[str, str], folder: Path) -> Path:
    """A run's config. Training draws dropout masks, so no forward of the rollout is reused."""
    config = tiny_loop.config_of(models, folder, engine={"type": "vllm"})
    config["policy"]["lora"]["dropout"] = 0.1
    return tiny_loop.write_config(folder, config)


PHASES = "prompts generate condition render learn judge_wait sync record checkpoint evaluate"


@pytest.mark.campaign
@pytest.mark.parametrize("phase", PHASES.split())
def test_a_run_with_vllm_killed_between_two_phases_resumes_exactly(
    models: dict[str, str], straight_with_vllm: Path, tmp_path: Path, phase: str
) -> None:
    path = with_vllm(models, tmp_path)
    tiny_loop.kill_and_resume(path, "phase", phase, "2")
    assert_same_run(straight_with_vllm, tmp_path / "tiny")


def test_a_resume_with_a_changed_config_is_refused_and_the_keys_are_named(
    models: dict[str, str], uninterrupted: Path, tmp_path: Path
) -> None:
    config = tiny_loop.config_of(models, uninterrupted.parent, seed=4, generations_per_prompt=2)
    refused = tiny_loop.run_forked(tiny_loop.write_config(tmp_path, config), check=False)
    assert refused.returncode != 0
    parts = "seed: 3 -> 4 ... generations_per_prompt: 4 -> 2 ... another run_name"
    assert holds(refused.stderr, parts)
