"""`rl rehearse` (an iteration on a fake GPU) with each model family: memory against the plan,
planted faults. Skipped without g++."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tiny_config import ENVIRONMENT, REPO

from rl.check.memory_plan import CONTEXT_GB

SCRIPT = Path(__file__).with_name("rehearse_families.py")
FAMILIES = {
    "qwen_image_edit": {"condition": 53, "render": 62, "reference": 54, "learn": 55, "step": 45},
    "qwen_image_21": {"load": 33, "condition": 53, "reference": 53, "learn": 53, "step": 33},
    "prompt_enhancement": {"condition": 32, "render": 34, "reference": 33, "learn": 34, "step": 32},
    "vlm_reasoning": {"condition": 8, "reference": 74, "learn": 74, "step": 8},
    "sft_s__rl_s": {"load": 120, "render": 140, "learn": 167, "step": 188},
}
"""Config -> phase -> its peak with all layers, GB. Left out: Qwen-Image-2.1's `render`, whose keys
of the sources grow with the layers (see benchmarks/results/rehearsals.md), and the `reference` of a
full fine-tune, where the plan counts gradients of groups that are graded early."""
FAULTS = {
    "qwen_image_edit, on the CPU": "cuda:0 and cpu",
    "qwen_image_edit, float32": "addmm of torch.bfloat16 and torch.float32",
}
"""Case -> part of its error."""
MAX_DIFFERENCE = 0.05
SLOW = ("qwen_image_edit", "sft_s__rl_s", "qwen_image_edit, float32")
OTHERS = [case for case in (*FAMILIES, *FAULTS) if case not in SLOW]
pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="a rehearsal compiles 35 lines of C++"
)


def rehearsed(cases: Iterable[str]) -> dict[str, Any]:
    """Case -> results; all in one process, as importing torch takes as long as a rehearsal."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *cases],
        cwd=REPO,
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(SLOW, marks=pytest.mark.slow, id="two"),
        pytest.param(OTHERS, marks=pytest.mark.campaign, id="others"),
    ],
)
def test_rehearsals(subtests: pytest.Subtests, cases: Iterable[str]) -> None:
    results = rehearsed(cases)
    for name in FAMILIES.keys() & results.keys():
        done, peaks = results[name], FAMILIES[name]
        with subtests.test("memory equals the plan", config=name):
            for phase, real_gb in peaks.items():
                difference = done["planned"][phase] - CONTEXT_GB - done["rehearsed"][phase]
                assert abs(difference) < MAX_DIFFERENCE * real_gb, (phase, difference)
        if name == "qwen_image_edit":
            with subtests.test("the FLOPs of a forward, by hand"):
                assert 1 < done["tflop"]["learn_reference"] / forward_tflop() < 1.25
    for case in FAULTS.keys() & results.keys():
        with subtests.test("a planted fault is found", case=case):
            assert FAULTS[case] in results[case]["error"]


def forward_tflop() -> float:
    """Of Qwen2.5-VL-7B: products of each token with two layers' matrices, and of each completion
    token with the head. Attention adds up to a quarter."""
    layers = 2 * 2 * (3584 * (3584 + 2 * 512) + 3584 * 3584 + 3 * 3584 * 18944)
    head, completions = 2 * 3584 * 152064, 3 * 256
    return (layers * (2048 + completions) + head * completions) / 1e12


def test_what_a_machine_lacks_is_named() -> None:
    # In a separate process, because `cuda_guard.cpp` must be loaded before torch.
    command = [sys.executable, "-m", "rl.tools.commands.rehearse", "configs/quickstart.jsonnet"]
    done = subprocess.run(command, cwd=REPO, env={"PATH": ""}, capture_output=True, text=True)
    assert done.returncode == 2 and "apt install g++" in done.stderr
