"""The worker of `side_by_side.py` for this project: `rl.train` on `toy.py`'s data and models."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import toy
from benchmarks.link import (
    JUDGE_WAIT,
    POLICY,
    RENDER,
    SAMPLING,
    TOWER,
    VAE_DECODE,
    VAE_ENCODE,
    Link,
    watch_models,
)
from benchmarks.toy import Shape, renderer_section
from rl.api.engine import Engine
from rl.api.types import Completion, PolicyWeights, Prompt, SamplingParams

if TYPE_CHECKING:
    from rl.run.run import Run

PART_OF_PHASE = {
    "prompts": POLICY,
    "condition": POLICY,
    "learn": POLICY,
    "generate": SAMPLING,
    "render": RENDER,
    "judge_wait": JUDGE_WAIT,
    **{part: part for part in (POLICY, TOWER, SAMPLING, VAE_ENCODE, VAE_DECODE)},
}
SAMPLER_LOGPROB = -6.0
"""Sampler's log-prob of every token of the fixed completions, nats; the same for TRL."""


def run(
    connection: Connection,
    folder: Path,
    shape: Shape,
    api_base: str,
    runs: Path,
    samples: bool,
    overrides: Sequence[str] = (),
) -> None:
    """Trains without weight sync, bare arm, evaluations and checkpoints. `folder`: models of
    `toy.py`; `runs`: parent of the run folder; `samples`: also sample (the tokens are not used);
    `overrides`: `key=value`."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    import rl.train as train
    from rl import build
    from rl.algorithm.metrics import Metrics
    from rl.learner import learner
    from rl.run.run import Run

    link = Link(connection, PART_OF_PHASE)
    # The first iterations of a run take one forward more. A usual iteration is measured.
    learner.NUM_MEASURED = 0
    watch_models(link.meter)
    link.meter.watch_phases()
    sampler = toy.StockSampler(folder) if samples else None
    build.build_engine = lambda resolved, policy, *rest: ScriptedEngine(
        link, policy, shape, sampler
    )
    setattr(Run, "sync_engine", lambda self: Metrics())  # noqa: B010 (mypy sees no method replaced)
    loop = train.train

    def flushing(opened: Run) -> None:
        link.flush = opened.checkpointing.writer.flush
        loop(opened)

    setattr(train, "train", flushing)  # noqa: B010 (as above)
    runs.mkdir(parents=True, exist_ok=True)
    config = runs / "config.jsonnet"
    config.write_text(json.dumps(config_of(folder, shape, api_base, runs)))
    train.main([str(config), *overrides])


def config_of(folder: Path, shape: Shape, api_base: str, runs: Path) -> dict[str, Any]:
    """This project's config, with the settings that `trl_worker.py` gives to TRL."""
    num_rows = toy.MAX_ITERATIONS * shape.num_groups
    samples = {"type": "benchmarks.toy", "num_samples": num_rows, "shape": vars(shape)}
    return {
        "run_name": "toy",
        "base_exp_dir": str(runs),
        "num_iterations": toy.MAX_ITERATIONS,
        "prompts_per_iteration": shape.num_groups,
        "generations_per_prompt": shape.group,
        "bare_arm": "never",
        "policy": {
            "type": "qwen2_5_vl",
            "model_path": str(folder / "policy"),
            "dtype": "float32",
            "lora": toy.LORA,
        },
        "engine": {"type": "transformers"},
        "renderer": renderer_section(folder, shape),
        "rewards": {"viescore": {"type": "viescore"}},
        "judge": {"api_base": api_base, "model": "stub-judge", "max_concurrency": 64},
        "data": {"train": [samples]},
        "sampling": {"max_completion_tokens": shape.completion_tokens},
        "algorithm": {"loss": "grpo", "kl_coeff": 0.04, "zero_spread_groups": "keep"},
        "optimizer": {"backend": "torch", "learning_rate": 1e-4},
        "evaluation": {"every_n_iterations": 0},
        "checkpoint": {"save_every_n_iterations": 10**6},
    }


class ScriptedEngine(Engine):
    """Returns fixed completions; every call of `generate` begins an iteration."""

    def __init__(
        self, link: Link, policy: Any, shape: Shape, sampler: toy.StockSampler | None
    ) -> None:
        self._link = link
        self._policy = policy
        self._shape = shape
        self._sampler = sampler
        self._begun = False

    def generate(
        self, prompts_P: Sequence[Prompt], params: SamplingParams, seeds_P: Sequence[int]
    ) -> list[list[Completion]]:
        """The completions of `toy.py`; samples as well if the cost of sampling is measured."""
        if self._begun:
            self._link.end()
        self._begun = True
        self._link.begin()
        with self._link.meter.span(SAMPLING):
            if self._sampler is not None:
                for prompt in prompts_P:
                    self._sampler.sample(self._inputs(prompt), self._shape)
            return [completions_of(self._policy, prompt, self._shape) for prompt in prompts_P]

    def _inputs(self, prompt: Prompt) -> dict[str, torch.Tensor]:
        ids = torch.tensor([prompt.token_ids])
        image_id = self._policy.prompts.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": (ids == image_id).long(),
            **prompt.model_inputs,
        }

    def load_weights(self, weights: PolicyWeights) -> None:
        """Does nothing: the weights are not used."""


def completions_of(policy: Any, prompt: Prompt, shape: Shape) -> list[Completion]:
    """The completions of `toy.py` for a prompt, one for each member of the group."""
    texts = toy.make_completions(prompt.sample.instruction, shape)
    ids_G = [policy.encode_completion(text).token_ids for text in texts]
    return [Completion(ids, (SAMPLER_LOGPROB,) * len(ids), "stop") for ids in ids_G]
