"""An error anywhere leaves every finished iteration on disk, and the run resumes exactly."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import tiny_loop
from tiny_faulty_judge import MODEL, Fault, FaultyJudge
from tiny_loop import assert_same_run, iterations_of, rows_of
from tiny_messages import holds

EVERY = {"checkpoint": {"save_every_n_iterations": 4}, "evaluation": {"every_n_iterations": 2}}
"""No checkpoint is due before the last iteration."""
ENDS = [
    ("rl.rollout.episodes:PromptOrder.shard", "5", "ValueError", 2),
    ("rl.engines.transformers:TransformersEngine.generate", "8", "RuntimeError", 2),
    ("rl.policies.qwen_vl:Qwen25VL.build_prompt", "13", "KeyError", 2),
    ("rl.learner.learner:Learner.begin", "5", "MemoryError", 2),
    ("rl.renderers.diffusion_renderer:DiffusionRenderer.render", "11", "OutOfMemoryError", 2),
    ("rl.rollout.stream:episode_of", "45", "AssertionError", 2),
    ("rl.learner.train_step:TrainStep.accumulate", "5", "OutOfMemoryError", 2),
    ("rl.learner.learner:TorchBackend.step", "3", "FloatingPointError", 2),
    ("rl.learner.learner:TorchBackend._write_back", "3", "OutOfMemoryError", 2),
    ("rl.run.run:sync", "4", "RuntimeError", 2),
    ("rl.run.evaluation:_measure", "3", "ZeroDivisionError", 2),
    ("rl.run.run:Run.log", "4", "UnicodeEncodeError", 3),
    ("rl.console:Console.iteration", "3", "SystemExit", 2),
]
"""(function that raises, at which call, error, number of iterations finished by then)."""
IN_CI = (5, 7, 11)
"""Indices into ENDS: in a rollout, in and after a step; the others run in the campaign."""


LOSS = """
from pathlib import Path
from rl.algorithm.grpo import loss_named

METRICS, RAISED = (Path(__file__).parent / "tiny" / name for name in ("metrics.jsonl", "raised"))

def loss(x):
    if METRICS.exists() and METRICS.read_text().count("\\n") > 1 and not RAISED.exists():
        RAISED.touch()
        raise KeyboardInterrupt("of a plugin")
    return loss_named("grpo")(x)
"""
"""Raises once, when metrics of two iterations are written."""


@pytest.fixture(scope="module")
def uninterrupted(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_loop.run_once(tmp_path_factory, "straight_saving_often", models, **EVERY)


@pytest.mark.parametrize(
    ("where", "count", "error", "finished"),
    [
        pytest.param(*end, marks=pytest.mark.slow if number in IN_CI else pytest.mark.campaign)
        for number, end in enumerate(ENDS)
    ],
)
def test_an_error_anywhere_costs_no_finished_iteration(
    models: dict[str, str],
    uninterrupted: Path,
    tmp_path: Path,
    where: str,
    count: str,
    error: str,
    finished: int,
) -> None:
    path = tiny_loop.written(models, tmp_path, **EVERY)
    ended = tiny_loop.run_forked(path, where, count, error, check=False)
    assert ended.returncode not in (0, -9), ended.stdout[-2000:] + ended.stderr[-4000:]
    assert "injected" in ended.stderr + ended.stdout
    assert tiny_loop.saved_in(tmp_path / "tiny") == [f"step_{finished:06d}"]
    tiny_loop.run_forked(path)
    assert_same_run(uninterrupted, tmp_path / "tiny")
    assert iterations_of(tmp_path / "tiny") == [0, 1, 2, 3, 4]


class EndsBeforeTheLastEvaluation(FaultyJudge):
    """Resets every connection once the run has opened the last evaluation's journal."""

    def __init__(self, run_dir: Path) -> None:
        self._journal = run_dir / "judge/evaluation_000002.rank0.jsonl"
        super().__init__()

    def begin(self, body: bytes, headers: dict[str, str]) -> Fault:
        fault = super().begin(body, headers)
        return Fault(reset=True) if self._journal.exists() else fault


@pytest.mark.slow
def test_a_judge_that_ends_before_the_last_evaluation_costs_nothing(
    models: dict[str, str], tmp_path: Path
) -> None:
    def config(folder: Path, judge: FaultyJudge) -> Path:
        return tiny_loop.written(
            models,
            folder,
            num_iterations=2,
            judge={"api_base": judge.api_base, "model": MODEL, "max_outage_s": 1.0},
            evaluation={"every_n_iterations": 2, "num_samples": 3},
            final_reward={"weights": {"brightness": 1, "viescore": 1}},
        )

    straight, killed = tmp_path / "straight/tiny", tmp_path / "killed/tiny"
    with EndsBeforeTheLastEvaluation(killed) as judge:
        ended = tiny_loop.run_forked(config(killed.parent, judge), check=False)
    assert ended.returncode == 1
    assert holds(
        ended.stderr, "3 of 3 ... evaluation could not be graded ... 3 x viescore: outage ... same "
        "command again: it repeats this evaluation"
    )  # fmt: skip
    assert iterations_of(killed) == [0, 1]
    assert not (killed / "evaluation/it_000002").exists()
    with FaultyJudge() as judge:
        tiny_loop.run_forked(config(killed.parent, judge))
        tiny_loop.run(config(straight.parent, judge))
    assert_same_run(straight, killed, num_iterations=2)
    records = "evaluation/it_000002/records.jsonl"
    assert rows_of(straight / records) == rows_of(killed / records)


@pytest.mark.slow
def test_a_plugin_that_raises_is_named_and_the_same_command_resumes(tmp_path: Path) -> None:
    (tmp_path / "outsider.py").write_text(LOSS)
    config = tiny_loop.shortened("tiny_reasoning", tmp_path, "transformers")
    config["algorithm"]["loss"] = "outsider.loss"
    config["evaluation"]["every_n_iterations"] = 0
    config["checkpoint"]["save_every_n_iterations"] = 9
    path = tiny_loop.write_config(tmp_path, config)
    command = [sys.executable, "-m", "rl.simple_launch", str(path)]
    environ = tiny_loop.environment(PYTHONPATH=f"{tiny_loop.REPO}:{tmp_path}")
    launch = partial(
        subprocess.run, command, env=environ, capture_output=True, text=True, timeout=300
    )
    ended = launch()
    assert ended.returncode == 1
    assert "algorithm.loss: outsider.loss raises KeyboardInterrupt: of a plugin (" in ended.stderr
    assert (tmp_path / "tiny/checkpoints/step_000001").is_dir(), "finished work is on disk"
    resumed = launch()
    assert resumed.returncode == 0 and "resumed from" in resumed.stdout, resumed.stderr
