"""Writes `trl_losses.json`: what TRL's own `GRPOTrainer` computes on planted log-probs.

    uv pip install -r benchmarks/requirements.txt
    PYTHONPATH=. .venv/bin/python tests/algorithm/make_trl_fixture.py

Axes: `_B` completions of the step, `_C` completion tokens, right-padded.
"""

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
TOKENIZER = HERE.parents[1] / "tiny_world" / "weights" / "reasoner"

SEEDS = (0, 1, 2)
LENGTHS_B = (5, 1, 7, 3, 4, 6, 2, 7)
GROUP = 4
MICRO_BATCHES = 2
MAX_COMPLETION_TOKENS = 16
MASKED_OUT = 5
"""Index of the completion without loss tokens."""
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
IMPORTANCE_CAP = 1.3

LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dapo": {"loss_type": "dapo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    # TRL's bound is the ratio itself, not its distance from 1; cispo has no lower bound.
    "cispo": {"loss_type": "cispo", "epsilon_high": 1 + CLIP_HIGH},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
}
MODES = {"none": None, "token": "token_truncate", "sequence": "sequence_truncate"}
SETTINGS = ((0.0, "none"), (0.1, "none"), (0.1, "token"), (0.0, "sequence"))
"""(KL coefficient beta, correction of the engine's log-prob mismatch)."""


@dataclass(frozen=True)
class Planted:
    """Log-probs of the models, [B, C] float32, nats. The prompt of row i is the token i."""

    new: torch.Tensor
    old: torch.Tensor
    sampler: torch.Tensor
    reference: torch.Tensor
    mask: torch.Tensor
    """[B, C] int64: 1 for tokens with loss, 0 for padding and TRL's environment tokens."""
    rewards: list[float]

    @classmethod
    def random(cls, seed: int) -> "Planted":
        generator = torch.Generator().manual_seed(seed)
        shape = (len(LENGTHS_B), max(LENGTHS_B))

        def noisy(logprobs: torch.Tensor, scale: float) -> torch.Tensor:
            return (logprobs + scale * torch.randn(shape, generator=generator)).clamp(max=-0.01)

        old = noisy(torch.full(shape, -2.0), 0.7)
        mask = (torch.rand(shape, generator=generator) < 0.8).long()
        mask[:, 0] = 1
        for row, length in enumerate(LENGTHS_B):
            mask[row, length:] = 0
        mask[MASKED_OUT] = 0
        rewards = torch.rand(shape[0], generator=generator).tolist()
        return cls(noisy(old, 0.3), old, noisy(old, 0.3), noisy(old, 0.5), mask, rewards)


def make_trainer(
    planted: Planted, loss: dict[str, Any], beta: float, correction: str, folder: Path
) -> tuple[Any, torch.Tensor]:
    """TRL's trainer, unchanged but for the planted log-probs, and its [B, C] float64 leaf `new`."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    new = planted.new.double().requires_grad_()

    class Trainer(GRPOTrainer):
        def _get_per_token_logps_and_entropies(
            self,
            model: Any,
            input_ids: torch.Tensor,
            *_: Any,
            compute_entropy: bool = False,
            **__: Any,
        ) -> tuple[torch.Tensor, torch.Tensor, None]:
            """The planted log-probs of the trained policy, the old policy or the reference."""
            rows = input_ids[:, 0]
            logprobs = new if compute_entropy else planted.old.double()
            if model is self.ref_model:
                logprobs = planted.reference.double()
            return logprobs[rows], torch.zeros_like(logprobs[rows]), None

    def roll_out(prompts: list[str], _: Any) -> dict[str, Any]:
        def ragged(rows: torch.Tensor) -> list[list[float]]:
            return [row[:n].tolist() for row, n in zip(rows, LENGTHS_B, strict=True)]

        return {
            "prompt_ids": [[row] for row in range(len(prompts))],
            "completion_ids": [[1] * length for length in LENGTHS_B],
            "logprobs": ragged(planted.sampler),
            "env_mask": ragged(planted.mask),
        }

    micro_batches = 1 if loss["loss_type"] == "bnpo" else MICRO_BATCHES
    config = GRPOConfig(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=len(LENGTHS_B) // micro_batches,
        gradient_accumulation_steps=micro_batches,
        num_generations=GROUP,
        num_iterations=2,  # with 1, TRL computes no log-probs of the old policy
        max_completion_length=MAX_COMPLETION_TOKENS,
        beta=beta,
        use_bias_correction_kl=False,  # GRPO's own k3; TRL would weight it by the ratio
        **{"epsilon": CLIP_LOW, "epsilon_high": CLIP_HIGH, **loss},
        vllm_importance_sampling_mode=MODES[correction] or "token_truncate",
        vllm_importance_sampling_clip_max=IMPORTANCE_CAP,
        use_cpu=True,
        bf16=False,
        report_to="none",
    )
    prompts = [str(row) for row in range(len(LENGTHS_B))]
    trainer = Trainer(
        model=str(folder),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=AutoTokenizer.from_pretrained(TOKENIZER),
        reward_funcs=lambda **_: planted.rewards,
        rollout_func=roll_out,
    )
    trainer.current_gradient_accumulation_steps = micro_batches
    trainer.model.train()
    # No engine samples here; these two make the trainer use the engine's log-probs.
    trainer.use_vllm, trainer._last_loaded_step = correction != "none", 0
    return trainer, new


def one_step(planted: Planted, name: str, beta: float, correction: str, folder: Path) -> Any:
    """TRL's loss and gradient of one optimizer step, and the advantages that TRL computed."""
    from trl.trainer.utils import split_tensor_dict

    trainer, new = make_trainer(planted, LOSSES[name], beta, correction, folder)
    step = trainer._generate_and_score_completions(
        [{"prompt": str(row)} for row in range(len(LENGTHS_B))]
    )
    assert torch.equal(step["completion_mask"] * step["tool_mask"], planted.mask)
    micro_batches = split_tensor_dict(step, trainer.args.gradient_accumulation_steps)
    loss = torch.stack([trainer._compute_loss(trainer.model, each) for each in micro_batches]).sum()
    loss.backward()
    case = {"loss": name, "beta": beta, "correction": correction, "value": loss.item()}
    return {**case, "gradient": rounded(new.grad)}, step["advantages"]


def rounded(rows: torch.Tensor) -> list[list[float]]:
    """The rows with ten digits, which is more than float32 has."""
    return [[float(f"{x:.10g}") for x in row] for row in rows.tolist()]


def tiny_model(folder: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=8192, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)


def main() -> None:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    import transformers
    import trl

    transformers.utils.logging.disable_progress_bar()
    batches = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny_model(folder)
        for seed in SEEDS:
            planted = Planted.random(seed)
            cases = []
            for loss in LOSSES:
                for beta, correction in SETTINGS:
                    if loss == "gspo" and correction == "token":
                        continue  # not the same arithmetic as ours
                    case, advantages = one_step(planted, loss, beta, correction, folder)
                    cases.append(case)
            tensors = {
                field: rounded(getattr(planted, field))
                for field in ("new", "old", "sampler", "reference", "mask")
            }
            batches.append(
                {**tensors, "rewards": planted.rewards, "advantages": advantages.tolist()}
                | {"cases": cases}
            )
    fixture = {
        "made_with": {"trl": trl.__version__, "torch": torch.__version__},
        "clip_low": CLIP_LOW,
        "clip_high": CLIP_HIGH,
        "importance_cap": IMPORTANCE_CAP,
        "max_completion_tokens": MAX_COMPLETION_TOKENS,
        "group": GROUP,
        "batches": batches,
    }
    lines = json.dumps(fixture).replace("}, {", "},\n{")  # one line per case
    (HERE / "trl_losses.json").write_text(lines + "\n")


if __name__ == "__main__":
    main()
