"""Reasoning at tiny size, on the shipped config: two ranks under ZeRO-3 are the run of one."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_edits
import tiny_loop
import torch
from tiny_loop import metrics_of

pytestmark = pytest.mark.campaign

CONFIG = "configs/tiny_reasoning.jsonnet"


def write_config(folder: Path, changes: str) -> Path:
    """The shipped config with `changes`, as run 'tiny' of `folder`, four iterations of 4 x 4."""
    folder.mkdir()
    path = folder / "config.jsonnet"
    short = """{
      run_name: 'tiny', base_exp_dir: '%s', num_iterations: 4,
      prompts_per_iteration: 4, generations_per_prompt: 4,
      optimizer+: { warmup_iterations: 1 },
      evaluation+: { every_n_iterations: 2, num_samples: 6 },
      checkpoint+: { save_every_n_iterations: 1 },
    }"""
    path.write_text(f"(import '{tiny_loop.REPO / CONFIG}') + {short % folder} + {changes}")
    return path


def launch(path: Path, num_ranks: int) -> Path:
    """Returns the run's folder."""
    ended = tiny_loop.launch(path, num_ranks)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    return path.parent / "tiny"


def test_two_ranks_under_zero_3_where_some_questions_have_no_picture(tmp_path: Path) -> None:
    """As configs/vlm_reasoning.jsonnet does: adapters on q and v, checkpointing, vLLM."""
    rows = [{"problem": f"what is {a} plus 1?", "solution": str(a + 1)} for a in range(6)]
    texts = tiny_edits.write_jsonl(tmp_path / "texts.jsonl", list(rows))
    changes = """{
      num_iterations: 2,
      policy+: { lora: { r: 4, alpha: 8, target_modules: ['q_proj', 'v_proj'] } },
      engine+: { kv_cache_memory_mb: 64, max_num_seqs: 16 },
      data+: {
        local texts = { type: 'edit_jsonl', path: '%s', columns: {
          instruction: 'problem', source_optional: true, hidden: { answer: 'solution' } } },
        train: [super.train[0], texts],
        validation: [texts, super.validation[0]],
      },
      optimizer+: {
        adam_eps: 1e-4, max_tokens_per_micro_batch: 600, gradient_checkpointing: true, %s
      },
    }"""
    deepspeed = "backend: 'deepspeed', zero_stage: 3"
    sharded = launch(write_config(tmp_path / "sharded", changes % (texts, deepspeed)), 2)
    alone = launch(write_config(tmp_path / "alone", changes % (texts, "backend: 'torch'")), 1)
    for row, expected in zip(metrics_of(sharded), metrics_of(alone), strict=True):
        assert row["sync/mean_abs_dlogp"] < 1e-4
        for name in ("reward/mean", "policy/entropy", "optimizer/grad_norm", "eval/reward"):
            if name in expected:
                assert row[name] == pytest.approx(expected[name], rel=1e-3), name
    noted = torch.load(sharded / "weights_2.rank0.pt")
    assert noted["sharded"] > 0 and noted["version"] == 2
