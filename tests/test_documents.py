"""Tests the commands and config blocks of the documents of the four original systems.

`tests/documents/*.md` are verbatim copies. Each line is

    run       executed by a test of this file at tiny size: unchanged, with placeholders filled in,
              or (if it names a script of its repository or the author's disk) as the replacement in
              LINES. `nvidia-smi` and the judge are replaced by stand-ins;
    checked   compared with this project, not executed;
    network   not tried: needs a network or a service;
    theirs    not tried: only concerns the machine or another environment.

At least four of five lines of the first two kinds are run.
`python tests/test_documents.py` prints the table.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
from tiny_run import run_config

from rl.config.schema import load_config
from rl.rewards.judged import EditQuality
from rl.tools.editor import Editor

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("qwen_image_edit", "earl", "reasoning", "prompt_enhancement")
Fate = Literal["run", "checked", "network", "theirs"]


class Line(NamedTuple):
    document: str
    begins: str
    """The beginning of a command, or of a block of config or Python."""
    fate: Fate
    ours: str = ""
    """'run', 'checked': the replacement that is run or read; else why it is not tried."""


TINY = (
    "engine='{type: \"transformers\"}' num_iterations=1 prompts_per_iteration=2 "
    "generations_per_prompt=4 evaluation.num_samples=2 optimizer.warmup_iterations=0"
)
TINY_PROMPTS = f"python -m rl.simple_launch configs/tiny_prompts.jsonnet {TINY}"
LINES = [
    Line("qwen_image_edit", "conda activate", "theirs", "an environment; scripts/_install.sh"),
    Line("qwen_image_edit", "cd /home/coder", "run", 'cd "$CLONE"'),
    Line("qwen_image_edit", "python test_setup.py", "run",
         "python -m rl.simple_launch --check configs/quickstart.jsonnet"),
    Line("qwen_image_edit", "export OPENAI_API_KEY=", "run"),
    Line("qwen_image_edit", "echo $OPENAI_API_KEY", "run"),
    Line("qwen_image_edit", "bash run_8gpu.sh", "run",
         f"python -m rl.simple_launch --nproc 2 configs/quickstart.jsonnet {TINY} "
         "judge.api_key_env=OPENAI_API_KEY"),
    Line("qwen_image_edit", "tail -f outputs/grpo_clean", "run",
         "tail -n 1 runs/quickstart/metrics.jsonl"),
    Line("qwen_image_edit", "- **Model**", "checked", "configs/qwen_image_edit.jsonnet"),
    Line("qwen_image_edit", "- **DeepSpeed**", "checked", "configs/qwen_image_edit.jsonnet"),
    Line("qwen_image_edit", "reward = 0.6 *", "checked", "rl/rewards/judged.py"),
    Line("qwen_image_edit", "nvidia-smi", "theirs", "NVIDIA's driver"),
    Line("earl", "git clone", "network", "their repository"),
    Line("earl", "cd EARL", "run", 'cd "$CLONE"'),
    Line("earl", "python -m venv", "theirs", "an environment; scripts/_install.sh"),
    Line("earl", "source .rl_venv", "theirs", "an environment; scripts/_install.sh"),
    Line("earl", "pip install torch==2.6.0", "network", "torch of CUDA 12.4; here 2.13"),
    Line("earl", "pip install flash-attn", "network", "optional here: pyproject.toml"),
    Line("earl", "pip install -r rl/req", "network", "rl/requirements.txt, of requirements.lock"),
    Line("earl", "nano rl_venv", "theirs", "an editor; vLLM is told at run time"),
    Line("earl", "_MULTIMODAL_MODELS", "checked", "SERVED_AS in rl/engines/vllm.py"),
    Line("earl", "./rl/scripts/setup_datasets.sh", "network", "some 100 GB from the hub"),
    Line("earl", "NUM_GPUS=", "run"),
    Line("earl", "torchrun", "run"),
    Line("earl", "export VLLM_USE_V1=0", "run"),
    Line("earl", "vllm serve", "network", "147 GB of weights; scripts/serve_judge.sh"),
    Line("earl", "CONFIG_NAME=", "run"),
    Line("earl", "export APP__", "run"),
    Line("earl", "export WANDB_RUN_ID=", "run"),
    Line("earl", "export PYTHONPATH=", "run"),
    Line("earl", "python -m rl.simple_launch", "run"),
    Line("earl", "- `sft_s__rl_s.jsonnet`", "checked", "configs/, as the launch line names them"),
    Line("earl", "{", "run"),
    Line("reasoning", "flexai training run", "network", "FlexAI; its arguments are checked"),
    Line("reasoning", "accelerate launch", "run",
         f"python -m rl.simple_launch --nproc 2 configs/tiny_reasoning.jsonnet {TINY}"),
    Line("reasoning", "flexai", "network", "FlexAI, an account"),
    Line("prompt_enhancement", "pip install", "network", "requirements.txt, of requirements.lock"),
    Line("prompt_enhancement", "CUDA_VISIBLE_DEVICES=", "run"),
    Line("prompt_enhancement", "PYTORCH_CUDA_ALLOC_CONF=", "run"),
    Line("prompt_enhancement", "NCCL_DEBUG=", "run"),
    Line("prompt_enhancement", "python test_grpo_system.py", "run",
         "python -m rl.simple_launch --check configs/tiny_prompts.jsonnet"),
    Line("prompt_enhancement", "./run_multi_gpu_training.sh", "run",
         f"{TINY_PROMPTS} run_name=placed policy.device=cpu renderer.device=cpu "
         "rewards.clip.device=cpu"),
    Line("prompt_enhancement", "python train_grpo.py", "run", TINY_PROMPTS),
    Line("prompt_enhancement", "python test_qwen.py", "run",
         'python -m rl enhance --adapter runs/tiny_prompts --device cpu "a cat"'),
    Line("prompt_enhancement", "python test_integrated_system.py", "run",
         "python -m rl report runs/tiny_prompts"),
    Line("prompt_enhancement", "python test_clip_reward.py", "checked", "tests/rewards/"),
    Line("prompt_enhancement", "from models.qwen_wrapper", "run", "rl/tools/editor.py"),
    Line("prompt_enhancement", "qwen = QwenWrapper(\n", "run", "rl/tools/editor.py"),
    Line("prompt_enhancement", "from models.clip_reward", "checked", "tests/rewards/"),
]  # fmt: skip


@cache
def lines_of(document: str) -> list[str]:
    """The document's commands, one per line, and its other blocks as a whole."""
    text = (ROOT / "tests/documents" / f"{document}.md").read_text(encoding="utf-8")
    return [line for kind, block in re.findall(r"^```(\w+)\n(.*?)^```", text, re.M | re.S)
            for line in _lines(kind, block)]  # fmt: skip


def line_of(document: str, begins: str) -> str:
    """The only line or block that begins with `begins`."""
    [line] = [line for line in lines_of(document) if line.startswith(begins)]
    return line


def _lines(kind: str, block: str) -> Iterator[str]:
    if kind == "text" and "`sft_" not in block and "`" in block:
        yield from re.findall(r"`([^`]+)`", block)
    elif kind == "bash":
        for line in re.sub(r" *\\\n *", " ", block).split("\n"):
            command = re.sub(r"(^|\s)#.*", "", line).strip()
            yield from filter(None, command.partition(" -- ")[::2])
    else:
        yield block.rstrip("\n")


def fates() -> list[tuple[Line, str]]:
    """(first matching entry of LINES, the line), in the documents' order."""
    return [
        (next(e for e in LINES if e.document == name and line.startswith(e.begins)), line)
        for name in DOCUMENTS
        for line in dict.fromkeys(lines_of(name))
    ]


def of(document: str, *beginnings: str) -> list[str]:
    """The commands to run for the lines with these beginnings; asserts that each is run."""
    lines = []
    for begins in beginnings:
        matches = [(entry, line) for entry, line in fates()
                   if entry.document == document and line.startswith(begins)]  # fmt: skip
        assert matches and all(entry.fate == "run" for entry, _ in matches), begins
        lines += [entry.ours or line for entry, line in matches]
    return lines


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone with separate `runs` and configs, on a machine that seems to have `$GPUS` GPUs."""
    for name in ("rl", "tiny_world", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (tmp_path / "bin").mkdir()
    driver = tmp_path / "bin/nvidia-smi"
    gpu = "$i, GPU-$i, NVIDIA H100, 580.65, 9.0, 81559, 9"
    driver.write_text(f"#!/bin/sh\nfor i in $(seq $GPUS); do echo {gpu}; done\n")
    driver.chmod(0o755)
    return tmp_path


def run_lines(clone: Path, lines: list[str], **environment: str) -> str:
    """Runs the lines in a shell and returns the output; each line has to succeed."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and "WANDB" not in k}
    path = f"{clone / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", "\n".join(lines)],
        cwd=clone,
        env=kept | {"PATH": path, "CLONE": str(clone), **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_each_line_is_classified_and_four_of_five_are_run() -> None:
    entries = [entry for entry, _ in fates()]
    assert set(entries) == set(LINES), "an entry of LINES is in no document"
    tried = [entry.fate for entry in entries if entry.fate in ("run", "checked")]
    assert tried.count("run") >= 0.8 * len(tried)


# --- Qwen-Image-Edit --------------------------------------------------------------------------


@pytest.mark.slow
def test_the_commands_of_the_image_editors_document_run(clone: Path) -> None:
    beginnings = ("cd ", "python test_setup.py", "export ", "echo ", "bash run_8gpu.sh", "tail ")
    out = run_lines(clone, of("qwen_image_edit", *beginnings), PYTHONPATH=str(ROOT))
    assert "nothing is wrong\n" in out
    [last] = [json.loads(line) for line in out.split("\n") if line.startswith('{"iteration"')]
    assert last["reward/mean"] >= 0


def test_the_image_editors_settings_are_those_of_the_shipped_config() -> None:
    """Its ZeRO-2 is stage 1 here, which is better for adapters (base.libsonnet)."""
    bullets = line_of("qwen_image_edit", "- **Model**")
    stated = dict(re.findall(r"^- \*\*(.+)\*\*: (.+)$", bullets, re.M))
    config = load_config(ROOT / "configs/qwen_image_edit.jsonnet", (), {
        "APP__RUN_NAME": "a", "APP__BASE_EXP_DIR": "b", "APP__REWARD_FUNCTION_API_BASE": "http://c",
    })  # fmt: skip
    policy, lora = config.policy, config.policy["lora"]
    [train] = config.data.train
    instruction = train["columns"]["instruction"]
    assert stated == {
        "Model": policy["model_path"],
        "Method": f"GRPO with LoRA (r={lora['r']}, α={lora['alpha']})",  # noqa: RUF001
        "Batch size": f"1 per GPU × 2 accumulation = {config.prompts_per_iteration} effective",  # noqa: RUF001
        "Learning rate": f"{config.optimizer.learning_rate:.0e}".replace("e-0", "e-"),
        "Precision": policy["dtype"],
        "Dataset": "Complex-Edit (complexity "
        f"{int(re.sub(r'[^0-9]', '', instruction)) + 1}, real images)",
        "Generations": f"{config.generations_per_prompt} per prompt",
        "Epochs": f"{config.num_epochs:g}",
    }
    assert train["path"].endswith("/Complex-Edit") and train["split"].startswith("test_real")
    assert set(lora["target_modules"]) == {"q_proj", "v_proj", "k_proj", "o_proj"}


def test_the_editors_reward_is_edit_quality() -> None:
    config = EditQuality.Config()
    weights = (config.alignment_weight, config.quality_weight)
    formula = "reward = {} * alignment_score + {} * quality_score".format(*weights)
    assert line_of("qwen_image_edit", "reward =") == formula


# --- EARL -------------------------------------------------------------------------------------

AT_TINY_SIZE = """(import 'documented.jsonnet') + {
  model_path: 'pkg://tiny_world/weights/emu3', tokenizer_path: null,
  assistant_prefill: '<|image start|>',
  num_iterations: 1, episodes_per_iteration: 8, generations_per_sample: 4,
  max_response_tokens: 32, max_prompt_len: 64, model_context_size: 96,
  val_paths_file: [], push_to_hub_every_n_iterations: null,
  policy: { dtype: 'float32' },
  renderer: { model_path: 'pkg://tiny_world/weights/emu3_vq', dtype: 'float32' },
  optimizer: { backend: 'torch' },
  judge: { image_side_px: 64 },
  data: { train: [{ type: 'tiny_world.data.shape_tokens', num_samples: 8, seed: 1 }] },
}"""


@pytest.mark.slow
def test_the_commands_of_earls_training_script_run(clone: Path) -> None:
    """Runs step 2 line by line; the config that it names is the documented block at tiny size."""
    from tiny_world.judge_server import JudgeServer

    (clone / "configs/documented.jsonnet").write_text(line_of("earl", "{"))
    (clone / "configs/mine.jsonnet").write_text(AT_TINY_SIZE)
    lines = of(
        "earl", "cd EARL", "export VLLM_USE_V1=0", "CONFIG_NAME=", "export APP__DATA_DIR",
        "export APP__BASE_EXP_DIR", "export APP__REWARD_FUNCTION_API_BASE", "export APP__RUN_NAME",
        "export WANDB_RUN_ID", "NUM_GPUS=", "export PYTHONPATH", "python -m rl.simple_launch",
    )  # fmt: skip
    with JudgeServer("Qwen/Qwen2.5-VL-72B-Instruct") as judge:
        address = judge.api_base.removeprefix("http://").removesuffix("/v1")
        script = "\n".join(lines).replace("<config_name>", "mine")
        script = script.replace("<reward_server_ip>:4877", address)
        run_lines(clone, [script], GPUS="1", WANDB_MODE="offline")
    [run] = (clone / "RL_EXPERIMENTS").iterdir()
    assert run.name == "mine" and (run / "metrics.jsonl").is_file()
    assert (run / "wandb_id.txt").read_text() == "mine\n"
    [page] = run.glob("wandb/offline-run-*")
    assert page.name.endswith("-mine")


@pytest.mark.campaign
def test_earls_check_of_its_ranks_runs(clone: Path) -> None:
    """Runs before PYTHONPATH is set, as the script finds its package by itself."""
    out = run_lines(clone, of("earl", "NUM_GPUS=", "torchrun"), GPUS="2")
    assert "PyTorch GLOO is successful!\n" in out


def test_earls_ten_configs_are_shipped() -> None:
    listed = re.findall(r"^- `(.+)`:", line_of("earl", "- `sft_s__rl_s"), re.M)
    assert sorted(listed) == [file.name for file in sorted((ROOT / "configs").glob("sft_*"))]


def test_earls_patch_of_vllm_is_applied_at_run_time() -> None:
    from rl.engines.vllm_process import SERVED_AS

    patch = line_of("earl", "_MULTIMODAL_MODELS")
    [(architecture, served_as)] = re.findall(r'"(Emu3\w+)": \("llama", "(\w+)"\)', patch)
    assert {architecture: served_as} == SERVED_AS


def test_earls_requirements_and_download_script_exist() -> None:
    """Follows `pip install -r` and the download as far as they need no network."""
    file, names = ROOT / "rl/requirements.txt", []
    while file.suffix == ".txt":
        [inner] = re.findall(r"^-r (.+)$", file.read_text(), re.M)
        file = (file.parent / inner).resolve()
        names.append(file.name)
    assert names == ["requirements.txt", "requirements.lock"] and file.is_file()
    done = subprocess.run(
        ["./rl/scripts/setup_datasets.sh", "none"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.partition(";")[0]) == (
        2, "setup_datasets.sh: no set none",
    )  # fmt: skip


# --- reasoning --------------------------------------------------------------------------------


def test_the_reasoners_arguments_are_those_of_the_shipped_config() -> None:
    arguments = shlex.split(line_of("reasoning", "accelerate launch"))
    options = {
        argument.removeprefix("--").partition("=")[0]: arguments[number + 1 :]
        for number, argument in enumerate(arguments)
        if argument.startswith("--")
    }
    config = load_config(ROOT / "configs/vlm_reasoning.jsonnet", (), {
        "APP__RUN_NAME": "a", "APP__BASE_EXP_DIR": "b",
    })  # fmt: skip
    lora = config.policy["lora"]
    assert options["model_name_or_path"][0] == config.policy["model_path"]
    assert float(options["learning_rate"][0]) == config.optimizer.learning_rate
    assert options["dtype"][0] == config.policy["dtype"]
    assert int(options["max_prompt_length"][0]) == config.policy["max_prompt_tokens"]
    assert int(options["max_completion_length"][0]) == config.sampling.max_completion_tokens
    assert options["lora_target_modules"][:2] == lora["target_modules"]
    assert "use_vllm" in options and config.engine["type"] == "vllm"
    assert "gradient_checkpointing" in options  # needed here only with less than 80 GB
    assert "log_completions" in options and config.tracking.log_episodes_every_n_iterations
    assert arguments[2].endswith("deepspeed_zero3.yaml") and config.optimizer.zero_stage == 3
    assert config.world_size == 2, "--accels 2"


@pytest.mark.campaign
def test_the_commands_of_the_reasoning_document_run(clone: Path) -> None:
    run_lines(clone, of("reasoning", "accelerate launch"), PYTHONPATH=str(ROOT))
    assert (clone / "runs/tiny_reasoning/metrics.jsonl").is_file()


# --- prompt enhancement -----------------------------------------------------------------------


@pytest.mark.slow
def test_the_commands_of_the_prompt_enhancement_document_run(clone: Path) -> None:
    variables = of(
        "prompt_enhancement", "CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "NCCL_DEBUG"
    )
    out = run_lines(
        clone,
        [f"export {variable}" for variable in variables]
        + of(
            "prompt_enhancement", "python test_grpo_system.py", "./run_multi_gpu_training.sh",
            "python train_grpo.py", "python test_qwen.py", "python test_integrated_system.py",
        ),
        PYTHONPATH=str(ROOT),
    )  # fmt: skip
    assert "a cat\n  words:   " in out
    assert {run.name for run in (clone / "runs").iterdir()} == {"placed", "tiny_prompts"}


@pytest.mark.slow
def test_the_editor_replaces_the_prompt_enhancers_wrapper() -> None:
    """Its `QwenWrapper` is `Editor` with `only_words`."""
    code = line_of("prompt_enhancement", "qwen = QwenWrapper(\n")
    options: dict[str, Any] = {}
    exec(code, {"QwenWrapper": lambda **arguments: options.update(arguments)})
    policy = {"type": "qwen2_5_vl", "model_path": "pkg://tiny_world/weights/rewriter"}
    config = run_config(
        policy=policy,
        engine={"type": "transformers"},
        renderer={"type": "none"},
        sampling={"max_completion_tokens": options["max_new_tokens"]},
        evaluation={"temperature": options["temperature"]},
    )
    with Editor(config, options["device"], only_words=True) as editor:
        assert editor.edit(None, "a cat").words


if __name__ == "__main__":
    for entry, line in fates():
        start = line.partition("\n")[0][:60]
        print(f"{entry.fate:8} {entry.document:19} {start:60} {entry.ours}")
