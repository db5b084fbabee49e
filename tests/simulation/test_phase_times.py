"""Times computed from a config or read from a run, and `rl pool plan`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import tiny_config

from benchmarks import picture_flops
from rl import build
from rl.check import iteration_time
from rl.check.iteration_time import Machines, pool_lines, simulate
from rl.config.schema import RenderPoolConfig
from rl.tools.commands.pool import main

rare = partial(pytest.param, marks=pytest.mark.campaign)


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
    flops = renderer.cls.picture_flops(renderer.config)
    assert flops is not None and 0.93 < flops / counted() < 1.02


def test_times_are_computed_for_the_gpu_of_the_config() -> None:
    edit = iteration_time.computed(build.resolve(tiny_config.shipped("qwen_image_edit")))
    work = edit.iteration
    assert (work.num_ranks, work.num_groups, work.group_size, work.questions) == (8, 2, 9, 2)
    # 20.3 PFLOP a picture (counted); H200: 790 TFLOP/s, of which half are reached.
    assert work.draw_s == pytest.approx(20.3e15 / (0.5 * 790e12), rel=0.02)
    # (2048 + 128) x 3584 values of two bytes, a source and a picture of 1024 x 1024 in RGB.
    assert work.picture_bytes == (2048 + 128) * 3584 * 2 + 2 * 3 * 1024**2
    eight_bit = tiny_config.shipped("qwen_image_edit", "renderer.fp8=storage")
    assert iteration_time.computed(build.resolve(eight_bit)).iteration.draw_s == work.draw_s


def test_times_are_medians_of_a_run_without_its_first_iteration(tmp_path: Path) -> None:
    config = tiny_config.shipped("tiny_qwen_image_21")
    resolved = build.resolve(config)
    names = ("prompts", "generate", "condition", "render", "learn", "sync", "record", "iteration")
    rows = [
        {f"time/{name}_s": seconds * (n + 1) for n, name in enumerate(names)}
        | {"iteration": seconds, "judge/latency_p50_s": 0.25}
        for seconds in (100, 1, 2, 50)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stored = config.model_dump(mode="json")
    (tmp_path / "config.json").write_text(json.dumps(stored))
    times = iteration_time.measured(resolved, tmp_path)
    work, groups = times.iteration, config.prompts_per_iteration
    assert times.measured_s == 2 * 8 and work.sample_s == 2 * (1 + 2) and work.sync_s == 2 * (6 + 7)
    assert work.condition_s * groups == pytest.approx(2 * 3)
    assert work.draw_s * work.num_pictures == pytest.approx(2 * 4)
    assert work.learn_s * groups == pytest.approx(2 * 5)
    assert work.judge_s == 0.25 and times.slots_per_judge == config.judge.max_concurrency
    alone = simulate(work, Machines(judge_slots=times.slots_per_judge)).phases_s
    assert alone["render"] == pytest.approx(2 * 4) and alone["learn"] == pytest.approx(2 * 5)

    (tmp_path / "config.json").write_text(json.dumps(stored | {"world_size": 2}))
    with pytest.raises(ValueError, match="world_size: 2 in"):
        iteration_time.measured(resolved, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(stored | {"render_pool": {"workers": 2}}))
    with pytest.raises(ValueError, match="a pool drew"):
        iteration_time.measured(resolved, tmp_path)


@pytest.mark.slow
def test_the_command_prints_what_the_docs_show_and_refuses_what_it_cannot_plan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in tiny_config.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tiny_config.REPO)
    page = Path("docs/scale.md").read_text(encoding="utf-8")
    section = page.partition("## How many workers\n")[2].partition("\n## ")[0]
    lines = [line[4:] for line in section.split("\n") if line.startswith("    ")]
    starts = [n for n, line in enumerate(lines) if line.startswith("rl pool plan ")]
    assert len(starts) == 2
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        assert main(lines[start].split()[2:]) == 0
        out = capsys.readouterr().out.split("\n")
        assert max(map(len, out)) <= 80
        shown = [line for line in lines[start + 1 : end] if line]
        assert [line.rstrip() for line in out if line][: len(shown)] == shown
    edit, reasoning = "configs/qwen_image_edit.jsonnet", "configs/vlm_reasoning.jsonnet"
    for wrong, why in (
        ([edit, "--workers", "513"], "--workers"),
        ([edit, "--judges", "0"], "--judges"),
        ([reasoning], "draws no pictures"),
        ([edit, "--run", "nowhere"], "nowhere"),
    ):
        assert main(["plan", *wrong]) == 1
        assert why in capsys.readouterr().err


def test_the_lines_for_a_check() -> None:
    def lines_of(name: str) -> list[str]:
        config = tiny_config.shipped(name)
        pooled = config.model_copy(update={"render_pool": RenderPoolConfig(workers=16)})
        return pool_lines(build.resolve(pooled))

    first, *lines = lines_of("qwen_image_edit")
    assert first == "16 workers, Ray at auto"
    # 13.63e9 + 0.127e9 weights of two bytes, activations, and 2 GB of CUDA's.
    assert 2 + 27.5 < float(re.search(r"takes ([\d.]+) GB", lines[0])[1]) < 40  # type: ignore[index]
    assert lines[1] == "transfer: 3.15 GB an iteration (21.9 MB a picture)"  # 144 of these
    seconds = {
        words[3]: float(words[0])
        for words in (line.split() for line in lines)
        if words[1:3] == ["s", "with"]
    }
    assert seconds["39"] < seconds["16"] and lines[-1].startswith("beyond 39 workers")
    reasoning = lines_of("vlm_reasoning")
    assert reasoning[-1].startswith("time not planned: renderer")
