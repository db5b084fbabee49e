"""Tests the commands and config blocks of the documents of the four original systems.

`tests/documents/*.md` are verbatim copies. The tables of `docs/documents.md` say what becomes of
each line:

    run       executed by a test of this file at tiny size: unchanged, with placeholders filled in,
              or (if it names a script of its repository or the author's disk) as its stand-in. For
              `nvidia-smi` and the judge there are stand-ins, too;
    checked   compared with this project, not executed;
    network   not tried: needs a network or a service;
    theirs    not tried: only concerns the machine or another environment.

At least four of five lines of the first two kinds are run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import tiny_config
from tiny_config import REPO
from tiny_run import run_config

from rl.config.loading import MOVED
from rl.config.schema import RunConfig
from rl.engines.vllm_process import SERVED_AS
from rl.rewards.judged import EditQuality
from rl.tools.editor import Editor
from tiny_world.judge_server import JudgeServer

DOCUMENTS = ("qwen_image_edit", "earl", "reasoning", "prompt_enhancement")
Fate = Literal["run", "checked", "network", "theirs"]


class Line(NamedTuple):
    document: str
    begins: str
    """The beginning of a command, or of a block of config or Python."""
    fate: Fate


TINY = (
    "engine='{type: \"transformers\"}' num_iterations=1 prompts_per_iteration=2 "
    "generations_per_prompt=4 evaluation.num_samples=2 optimizer.warmup_iterations=0 "
    "tracking.page=false"
)
TINY_PROMPTS = f"python -m rl.simple_launch configs/tiny_prompts.jsonnet {TINY}"
STAND_INS = {
    "cd /home/coder": 'cd "$CLONE"',
    "python test_setup.py": "python -m rl.simple_launch --check configs/quickstart.jsonnet",
    "bash run_8gpu.sh": f"python -m rl.simple_launch --nproc 2 configs/quickstart.jsonnet {TINY} "
    "judge.api_key_env=OPENAI_API_KEY",
    "tail -f outputs/grpo_clean": "tail -n 1 runs/quickstart/metrics.jsonl",
    "cd EARL": 'cd "$CLONE"',
    "accelerate launch": "python -m rl.simple_launch --nproc 2 configs/tiny_reasoning.jsonnet "
    + TINY,
    "python test_grpo_system.py": "python -m rl.simple_launch --check configs/tiny_prompts.jsonnet",
    "./run_multi_gpu_training.sh": f"{TINY_PROMPTS} run_name=placed policy.device=cpu "
    "renderer.device=cpu rewards.clip.device=cpu",
    "python train_grpo.py": TINY_PROMPTS,
    "python test_qwen.py": 'python -m rl enhance --run runs/tiny_prompts --device cpu "a cat"',
    "python test_integrated_system.py": "python -m rl report runs/tiny_prompts",
}
"""Beginning of a line that is run -> the command of this project that is run for it."""
PAGE = (REPO / "docs/documents.md").read_text(encoding="utf-8")
LINES = [
    Line(document, *row)
    for document, section in zip(DOCUMENTS, PAGE.split("\n## ")[1:], strict=True)
    for row in re.findall(r"^\| `+ ?(.+?) ?`+ \| (run|checked|network|theirs) \| ", section, re.M)
]


@cache
def lines_of(document: str) -> list[str]:
    """The document's commands, one per line, and its other blocks as a whole."""
    text = (REPO / "tests/documents" / f"{document}.md").read_text(encoding="utf-8")
    return [line for kind, block in re.findall(r"^```(\w+)\n(.*?)^```", text, re.M | re.S)
            for line in _lines(kind, block)]  # fmt: skip


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
    """(its row of the page, the line), in the documents' order."""
    return [
        (next(e for e in LINES if e.document == name and line.startswith(e.begins)), line)
        for name in DOCUMENTS
        for line in dict.fromkeys(lines_of(name))
    ]


def test_each_line_is_classified_and_four_of_five_are_run() -> None:
    entries = [entry for entry, _ in fates()]
    assert set(entries) == set(LINES), "a row is of no document"
    tried = [entry.fate for entry in entries if entry.fate in ("run", "checked")]
    assert tried.count("run") >= 0.8 * len(tried)


# What is run

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
"""Over the config that EARL's document prints."""
DRIVER = """#!/bin/sh
for i in $(seq $GPUS); do echo $i, GPU-$i, NVIDIA H100, 580.65, 9.0, 81559, 9; done
"""
"""The machine seems to have `$GPUS` GPUs."""
AT_ROOT = {"PYTHONPATH": str(REPO)}


class Script(NamedTuple):
    """Lines of a document that run one after the other in a clone with separate runs."""

    document: str
    beginnings: tuple[str, ...]
    then: str
    """Commands that check what was `printed` and written; each must succeed."""
    environment: dict[str, str] = AT_ROOT


CAMPAIGN = pytest.mark.campaign
SCRIPTS = [
    pytest.param(Script(
        "qwen_image_edit",
        ("cd ", "python test_setup.py", "export ", "echo ", "bash run_8gpu.sh", "tail "),
        """grep 'nothing is wrong$' printed
        tail -n 1 printed | grep '^{"iteration".*"reward/mean": *[0-9]'""",
    ), id="image editor"),
    pytest.param(Script(
        "earl",
        ("cd EARL", "export VLLM_USE_V1=0", "CONFIG_NAME=", "export APP__DATA_DIR",
         "export APP__BASE_EXP_DIR", "export APP__REWARD_FUNCTION_API_BASE",
         "export APP__RUN_NAME", "export WANDB_RUN_ID", "NUM_GPUS=", "export PYTHONPATH",
         "python -m rl.simple_launch"),
        """[[ $(ls RL_EXPERIMENTS) == mine ]]
        cd RL_EXPERIMENTS/mine; test -f metrics.jsonl; [[ $(cat wandb_id.txt) == mine ]]
        [[ $(echo wandb/offline-run-*) =~ ^[^\\ ]*-mine$ ]]""",
        {"GPUS": "1", "WANDB_MODE": "offline"},
    ), id="EARL"),
    # Runs before PYTHONPATH is set, as the script finds its package by itself.
    pytest.param(Script(
        "earl", ("NUM_GPUS=", "torchrun"), "grep 'PyTorch GLOO is successful!$' printed",
        {"GPUS": "2"},
    ), id="EARL's ranks", marks=CAMPAIGN),
    pytest.param(Script(
        "reasoning", ("accelerate launch",), "test -f runs/tiny_reasoning/metrics.jsonl"
    ), id="reasoning", marks=CAMPAIGN),
    pytest.param(Script(
        "prompt_enhancement",
        ("CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "NCCL_DEBUG",
         "python test_grpo_system.py", "./run_multi_gpu_training.sh", "python train_grpo.py",
         "python test_qwen.py", "python test_integrated_system.py"),
        """grep -A 1 '^a cat$' printed | grep '^  words:   '
        [[ $(echo $(ls runs)) == 'placed tiny_prompts' ]]""",
    ), id="prompt enhancement"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_lines_of_a_document_run(script: Script, tmp_path: Path) -> None:
    for name in ("rl", "tiny_world", "docs"):
        (tmp_path / name).symlink_to(REPO / name)
    shutil.copytree(REPO / "configs", tmp_path / "configs")
    [printed] = [line for line in lines_of("earl") if line.startswith("{")]
    for file, text in (
        ("configs/documented.jsonnet", printed),
        ("configs/mine.jsonnet", AT_TINY_SIZE),
        ("nvidia-smi", DRIVER),
    ):
        (tmp_path / file).write_text(text)
    (tmp_path / "nvidia-smi").chmod(0o755)
    lines = []
    for begins in script.beginnings:
        matches = [(entry, line) for entry, line in fates()
                   if entry.document == script.document and line.startswith(begins)]  # fmt: skip
        assert matches and all(entry.fate == "run" for entry, _ in matches), begins
        lines += [STAND_INS.get(entry.begins, line) for entry, line in matches]
    text = "\n".join(["(", *lines, ") | tee printed", script.then])
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and "WANDB" not in k}
    with JudgeServer("Qwen/Qwen2.5-VL-72B-Instruct") as judge:
        address = judge.api_base.removeprefix("http://").removesuffix("/v1")
        done = subprocess.run(
            ["bash", "-aex", "-o", "pipefail", "-c",  # -a: a document's variables are for programs
             text.replace("<config_name>", "mine").replace("<reward_server_ip>:4877", address)],
            cwd=tmp_path,
            env=kept | {"PATH": path, "CLONE": str(tmp_path), **script.environment},
            capture_output=True, text=True, timeout=600,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


# What is compared

SAID = {
    ("qwen_image_edit", "qwen_image_edit"): """
- **Model**: {config.policy[model_path]}
- **Method**: GRPO with LoRA (r={config.policy[lora][r]}, α={config.policy[lora][alpha]})
- **Batch size**: 1 per GPU × 2 accumulation = {config.prompts_per_iteration} effective
- **Learning rate**: {config.optimizer.learning_rate:.0e}
- **Precision**: {config.policy[dtype]}
- **Dataset**: {data[path]} {data[columns][instruction]} {data[split]} images)
- **Generations**: {config.generations_per_prompt} per prompt
- **Epochs**: {config.num_epochs:g}
- **LoRA targets**: {targets}
reward = {reward.alignment_weight} * alignment_score + {reward.quality_weight} * quality_score""",  # noqa: RUF001
    ("reasoning", "vlm_reasoning"): """
/deepspeed_zero{config.optimizer.zero_stage}.yaml
--accels {config.world_size}
--model_name_or_path {config.policy[model_path]}
--learning_rate {config.optimizer.learning_rate:.0e}
--dtype {config.policy[dtype]}
--max_prompt_length {config.policy[max_prompt_tokens]}
--max_completion_length {config.sampling.max_completion_tokens}
--use_{config.engine[type]}
--lora_target_modules {targets}""",
}
"""(document, config) -> what both say. The image editor's ZeRO-2 is stage 1 here, which is better
for adapters (base.libsonnet)."""
SPELT = {
    "UCSC-VLAA/Complex-Edit": "Complex-Edit",
    "edit.compound.7.compound_instruction": "(complexity 8,",
    "test_real[:-32]": "real",
    "q_proj, k_proj, v_proj, o_proj": "q_proj, v_proj, k_proj, o_proj",
    "modules q_proj, v_proj": 'modules "q_proj" "v_proj"',
    "e-05": "e-5",
}
"""A value of a config -> the document's words for it."""


@pytest.mark.parametrize("document, name", SAID)
def test_a_config_has_the_values_of_its_document(document: str, name: str) -> None:
    config = tiny_config.shipped(name)
    targets = ", ".join(config.policy["lora"]["target_modules"])
    text = SAID[document, name].format(
        config=config, data=config.data.train[0], reward=EditQuality.Config(), targets=targets
    )
    for ours, theirs in SPELT.items():
        text = text.replace(ours, theirs)
    told = "\n".join(lines_of(document))
    for line in text.strip().split("\n"):
        assert re.search(re.escape(line) + r"(?!\S)", told), line
    assert document != "reasoning" or config.tracking.log_episodes_every_n_iterations


def test_earls_configs_and_its_patch_of_vllm_are_here() -> None:
    told = "\n".join(lines_of("earl"))
    listed = re.findall(r"^- `(.+)`:", told, re.M)
    assert sorted(listed) == sorted(file.name for file in (REPO / "configs").glob("sft_*"))
    assert dict(re.findall(r'"(Emu3\w+)": \("llama", "(\w+)"\)', told)) == SERVED_AS
    pages = (REPO / "docs/coming-from.md").read_text("utf-8") + PAGE
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", pages, re.M))
    fields = re.findall(r"^    ([a-z]\w+):", told, re.M)
    here = {name: ("always", f"`{MOVED[name]}") if name in MOVED else "" for name in fields}
    assert len(here) > 25 and all(rows[name].startswith(here[name]) for name in here)


def test_the_keys_on_the_page_exist() -> None:
    files = [*(REPO / "configs").rglob("*sonnet"), *(REPO / "rl").rglob("*.py")]
    known = set(re.findall(r"\b(\w+)\??: ", "".join(file.read_text("utf-8") for file in files)))
    named = re.findall(rf"`(?:{'|'.join(RunConfig.model_fields)})\.(?:\w+\.)*(\w+)[ =`]", PAGE)
    assert len(set(named)) >= 30 and {*named} - {"py"} <= known


def test_earls_requirements_and_download_script_exist() -> None:
    """Follows `pip install -r` and the download as far as they need no network."""
    for file, named in (
        ("rl/requirements.txt", "../requirements.txt"),
        ("requirements.txt", "requirements.lock"),
    ):
        assert re.findall(r"^-r (.+)$", (REPO / file).read_text(), re.M) == [named]
        assert ((REPO / file).parent / named).is_file()
    done = subprocess.run(
        ["./rl/scripts/setup_datasets.sh", "none"], cwd=REPO, capture_output=True, text=True
    )
    assert done.returncode == 2 and "setup_datasets.sh: no set none;" in done.stderr


@pytest.mark.slow
def test_the_editor_replaces_the_prompt_enhancers_wrapper() -> None:
    """Its `QwenWrapper` is `Editor` with `only_words`."""
    [code] = [line for line in lines_of("prompt_enhancement") if line.startswith("qwen = Q")]
    options: dict[str, Any] = {}
    exec(code, {"QwenWrapper": lambda **arguments: options.update(arguments)})
    config = run_config(
        policy={"type": "qwen2_5_vl", "model_path": "pkg://tiny_world/weights/rewriter"},
        engine={"type": "transformers"},
        renderer={"type": "none"},
        sampling={"max_completion_tokens": options["max_new_tokens"]},
        evaluation={"temperature": options["temperature"]},
    )
    with Editor(config, options["device"], only_words=True) as editor:
        assert editor.edit(None, "a cat").words
