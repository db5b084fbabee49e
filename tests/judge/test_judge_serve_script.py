"""scripts/serve_judge.sh with stand-ins for `nvidia-smi` and `vllm`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from tiny_programs import write_programs

SCRIPT = Path(__file__).parents[2] / "scripts" / "serve_judge.sh"


def _serve(tmp_path: Path, num_gpus: int, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs it with an `nvidia-smi` that lists `num_gpus` and a `vllm` that prints its arguments."""
    stand_ins = {
        "nvidia-smi": "\n".join(["#!/bin/sh", *(f"echo GPU {n}" for n in range(num_gpus)), ""]),
        "vllm": '#!/bin/sh\necho "$@"\n',
    }
    path = f"{write_programs(tmp_path, stand_ins)}:{os.environ['PATH']}"
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("JUDGE_", "CUDA_"))}
    return subprocess.run(
        ["bash", str(SCRIPT), "--max-num-seqs", "64"],
        env={**inherited, "PATH": path, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("num_gpus", "visible", "split"),
    [(1, "", 1), (2, "", 2), (6, "", 4), (8, "", 8), (16, "", 8), (8, "4,5", 2)],
)
def test_the_model_is_split_over_the_visible_gpus(
    num_gpus: int, visible: str, split: int, tmp_path: Path
) -> None:
    done = _serve(tmp_path, num_gpus, **{"CUDA_VISIBLE_DEVICES": visible} if visible else {})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "serve Qwen/Qwen3-VL-32B-Instruct-FP8 --host 127.0.0.1 --port 4877"
    )
    assert f"--tensor-parallel-size {split} " in done.stdout
    assert '--limit-mm-per-prompt {"image": 2, "video": 0}' in done.stdout
    assert done.stdout.rstrip().endswith("--max-num-seqs 64")


def test_model_and_address_can_be_set_and_the_url_is_written_to_a_file(tmp_path: Path) -> None:
    url_file = tmp_path / "url"
    done = _serve(
        tmp_path, 1, JUDGE_MODEL="me/judge", JUDGE_HOST="10.0.0.7", JUDGE_URL_FILE=str(url_file)
    )
    assert done.stdout.startswith("serve me/judge --host 10.0.0.7")
    assert url_file.read_text() == "http://10.0.0.7:4877/v1\n"
    assert "without VLLM_API_KEY" in done.stderr


def test_without_a_gpu_the_script_fails_with_a_remedy(tmp_path: Path) -> None:
    done = _serve(tmp_path, 0)
    assert done.returncode == 1 and "no GPU" in done.stderr and "judge.start_command" in done.stderr
