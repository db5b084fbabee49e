"""The whole loop on prompts: a policy's words, sd3's pictures; killed, resumed, then used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_loop
import tiny_qwen
import tiny_sd3
from tiny_loop import assert_same_run, episodes_of, metrics_of
from tiny_weight_files import displace

from rl.edit.editor import Editor

pytestmark = pytest.mark.slow

SYSTEM_PROMPT = "Describe the image."


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    tiny_sd3.save_sd3(tiny_sd3.make_parts(), folder / "sd3")
    return {
        "policy": tiny_qwen.save_policy_folder(folder / "policy"),
        "sd3": str(folder / "sd3"),
        "editor": "",
    }


def config_of(models: dict[str, str], base_exp_dir: Path) -> dict[str, Any]:
    config = tiny_loop.config_of(models, base_exp_dir)
    config["policy"]["system_prompt"] = SYSTEM_PROMPT
    renderer = {**tiny_sd3.TINY, "model_path": models["sd3"], "num_steps": 2, "batch_size": 3}
    return {
        **config,
        "renderer": renderer,
        "rewards": {
            "brightness": {"type": "tests.brightness_reward"},
            "prompt_quality": {"type": "prompt_quality"},
        },
        "data": {
            "train": [{"type": "prompts"}],
            "validation": [{"type": "prompts", "split": "held_out"}],
        },
    }


@pytest.fixture(scope="module")
def straight(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    tiny_loop.run(tiny_loop.write_config(folder, config_of(models, folder)))
    return folder / "tiny"


def test_every_prompt_is_written_painted_and_graded(straight: Path) -> None:
    rows, episodes = metrics_of(straight), episodes_of(straight)
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3, 4]
    assert all(row["status/scored"] == 1 for row in rows[1:])
    assert all(row["optimizer/grad_norm"] > 0 for row in rows[1:]), "nothing was learnt from"
    assert len(episodes) == 4 * 2 * 4
    for episode in episodes:
        assert episode["reward"] == episode["parts"]["brightness/level"]
        assert 0 <= episode["parts"]["prompt_quality/total_0_5"] <= 5


def test_kill_9_and_resume_equals_straight_through(
    models: dict[str, str], straight: Path, tmp_path: Path
) -> None:
    """What the killed process had encoded already is encoded again, to the same bits, though the
    models' files were written anew with their tensors at other offsets."""
    path = tiny_loop.write_config(tmp_path, config_of(models, tmp_path))
    killed = tiny_loop.run_forked(path, tiny_loop.STEP, "3", check=False)
    assert killed.returncode == -9, killed.stderr[-2000:]
    for name in ("policy", "sd3"):
        displace(Path(models[name]))
    assert "resumed from" in tiny_loop.run_forked(path).stdout
    assert_same_run(straight, tmp_path / "tiny")


def test_the_finished_run_enhances_prompts(straight: Path) -> None:
    with Editor.from_run(straight, device="cpu", only_words=True) as editor:
        assert editor.config.policy["system_prompt"] == SYSTEM_PROMPT
        result = editor.edit(None, "a cat")
    assert result.words and result.image is None and result.failure is None
