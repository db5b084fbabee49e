"""How long an iteration takes: hand-computed cases, times computed from a config, `rl check`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import tiny_config

from benchmarks import picture_flops, run_hours
from rl import build
from rl.check import check_report
from rl.check.iteration_time import (
    MOST_WORKERS,
    Iteration,
    bound_by,
    computed,
    enough_workers,
    pool_lines,
)
from rl.config.schema import RenderPoolConfig, load_config

rare = partial(pytest.param, marks=pytest.mark.campaign)
WORK = Iteration(
    num_ranks=1, num_groups=3, group_size=4, batch_size=2, questions=0,
    sample_s=5.0, condition_s=0.0, draw_s=1.0, judge_s=0.0, learn_s=0.0, sync_s=2.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "total_s"),
    [
        # Twelve pictures, one by one; then six batches of 2 s on 1, 4 and 6 workers.
        ({}, 5 + 12 + 2),
        ({"workers": 1}, 5 + 12 + 2),
        ({"workers": 4}, 5 + 2 * 2 + 2),
        ({"workers": 6}, 5 + 2 + 2),
        ({"workers": 512}, 5 + 2 + 2),
        # Conditioning, 1 s a group: before every batch of the rank; before the first of a worker.
        ({"condition_s": 1.0}, 5 + 3 + 12 + 2),
        ({"condition_s": 1.0, "workers": 1}, 5 + 1 + 12 + 2),
        # Workers outpace the conditioning: groups are ready at 10, 20, 30; the last takes 2 s.
        ({"condition_s": 10.0, "workers": 6}, 5 + 30 + 2 + 2),
        # No overlap: one batch in all.
        ({"num_groups": 1, "group_size": 2, "condition_s": 3.0, "workers": 8}, 5 + 3 + 2 + 2),
        # The first batch is drawn after 2 s; then 24 questions of 3 s in 2 slots.
        ({"questions": 2, "judge_s": 3.0, "workers": 6, "judge_slots": 2}, 5 + 2 + 36 + 2),
        # The judge has a slot for each question; it reads while others are drawn.
        ({"questions": 2, "judge_s": 3.0, "judge_slots": 24}, 5 + 12 + 3 + 2),
        # Twelve answers of 1 s, the last group's lesson of 1 s.
        ({"questions": 1, "judge_s": 1.0, "learn_s": 1.0, "workers": 6}, 5 + 2 + 12 + 1 + 2),
        # Three lessons of 10 s outlast the judge.
        ({"questions": 1, "judge_s": 0.1, "learn_s": 10.0, "workers": 6}, 5 + 2 + 30 + 2),
        # Batches of 2, 2, 2 and 1 on two workers: two rounds of 2 s.
        ({"num_groups": 1, "group_size": 7, "workers": 2}, 5 + 2 + 2 + 2),
        # A batch cannot be larger than a rank's pictures.
        ({"batch_size": 100, "workers": 2}, 5 + 12 + 2),
    ],
)  # fmt: skip
def test_hand_computed_iterations(changes: dict[str, float], total_s: float) -> None:
    assert replace(WORK, **changes).total_s == pytest.approx(total_s)  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_ranks", "batch_size"), product((1, 4), (1, 2, 5)))
def test_more_workers_are_never_slower(num_ranks: int, batch_size: int) -> None:
    work = replace(
        WORK, num_ranks=num_ranks, batch_size=batch_size, condition_s=0.7,
        questions=2, judge_s=0.1, learn_s=2.0,
    )  # fmt: skip
    seconds = [replace(work, workers=n).total_s for n in range(1, 100)]
    assert all(more <= less + 1e-9 for less, more in pairwise(seconds))
    assert seconds[-1] < seconds[0]


def test_the_bound_is_what_shortens_the_iteration_most() -> None:
    assert bound_by(replace(WORK, workers=1)) == "drawing"
    assert bound_by(replace(WORK, workers=6)) == "sampling"
    assert bound_by(replace(WORK, workers=6, questions=2, judge_s=3.0)) == "the judge"
    assert bound_by(replace(WORK, workers=6, condition_s=10.0)) == "conditioning"


def test_enough_workers() -> None:
    assert enough_workers(WORK) == 6
    # 1000 batches of 1 s take ceil(1000 / n): 2 s on 500 to 999 workers.
    many = replace(WORK, num_groups=250, sample_s=0.0, sync_s=0.0, batch_size=1)
    assert enough_workers(many) == 500 < MOST_WORKERS
    assert enough_workers(replace(WORK, draw_s=0.0)) == 0
    assert enough_workers(replace(WORK, questions=1, judge_s=1000.0)) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "counted"),
    [
        ("qwen_image_edit", lambda: picture_flops.edit(1024, 1024**2 // 28**2, 50, True)),
        rare("qwen_image_edit_plus", lambda: picture_flops.edit(1024, 196, 40, True)),
        rare("qwen_image_edit_fewstep", lambda: picture_flops.edit(512, 512**2 // 28**2, 8, False)),
        rare("qwen_image_21", lambda: picture_flops.image_21(1024, 1, 40)),
        ("qwen_image_21_fewstep", lambda: picture_flops.image_21(512, 1, 8)),
    ],
)
def test_the_formulas_of_a_picture_agree_with_counted_operations(
    config: str, counted: Callable[[], float]
) -> None:
    """The counter runs the real forward on the meta device; the formula leaves out the VAE and
    what is computed once per picture."""
    renderer = build.resolve(tiny_config.shipped(config)).renderer
    flops = renderer.cls.cost(renderer.config).picture_flops
    assert flops is not None and 0.93 < flops / counted() < 1.02


def test_times_are_computed_for_the_gpu_of_the_config() -> None:
    work = computed(build.resolve(tiny_config.shipped("qwen_image_edit")))
    assert (work.num_ranks, work.num_groups, work.group_size, work.questions) == (8, 2, 9, 2)
    # 20.3 PFLOP a picture (counted); H200: 790 TFLOP/s, of which half are reached.
    assert work.draw_s == pytest.approx(20.3e15 / (0.5 * 790e12), rel=0.02)
    eight_bit = tiny_config.shipped("qwen_image_edit", "renderer.fp8=storage")
    assert computed(build.resolve(eight_bit)).draw_s == work.draw_s


def test_rl_check_and_the_benchmark_print_what_the_docs_show(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in tiny_config.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("APP__BASE_EXP_DIR", str(tmp_path))
    monkeypatch.chdir(tiny_config.REPO)
    page = Path("docs/scale.md").read_text(encoding="utf-8")
    section = page.partition("## How many workers\n")[2].partition("\n## ")[0]
    lines = [line[4:] for line in section.split("\n") if line.startswith("    ")]
    command, *shown = lines
    path, *overrides = command.removeprefix("rl check ").split()
    text, _ = check_report.report(load_config(path, overrides), gpu_gb=141)
    assert shown[0] == "render pool" and "\n".join(shown) in text
    assert [run_hours.pool_row(*pool) for pool in run_hours.POOLS] == [
        line for line in section.split("\n") if line.startswith("| `")
    ]


def test_the_lines_for_a_check() -> None:
    def lines_of(name: str, **pool: Any) -> list[str]:
        pooled = tiny_config.shipped(name).model_copy(
            update={"render_pool": RenderPoolConfig(**pool)}
        )
        return pool_lines(build.resolve(pooled))

    first, memory, _, *rest = lines_of("qwen_image_edit", workers=16)
    assert first == "16 workers, Ray at auto"
    # 13.63e9 + 0.127e9 weights of two bytes, activations, and 2 GB of CUDA's.
    assert 2 + 27.5 < float(memory.split()[3]) < 40
    # 18 pictures of a rank are five batches of 4 (208 s): 40 of eight ranks in one round.
    assert [line.split()[2:4] for line in rest[:3]] == [
        ["without", "a"],
        ["with", "16"],
        ["with", "40"],
    ]
    assert all(line.endswith("; drawing bounds it") for line in rest[:3])
    assert rest[3].startswith("beyond 40 workers")
    unknown = lines_of("qwen_image_edit", workers="auto")
    assert unknown[0].startswith("auto") and len(unknown) == 6
    assert lines_of("qwen_image_edit_fewstep", workers=16)[-2].endswith("the judge bounds it")
    assert lines_of("vlm_reasoning", workers=16)[-1].startswith("time not planned: renderer")
    size = "time not planned: renderer: the size of this model is unknown"
    assert lines_of("sft_s__rl_sc", workers=16)[-1] == size
