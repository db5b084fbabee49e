"""Publishing a checkpoint's model folder, and the card that says what it is.

What: `model_card` (written into every checkpoint) and `push` (never fatal). What not: when
(`checkpoint.py`). The token is huggingface_hub's own business: HF_TOKEN or a login, never ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl.system.console import warn
from rl.system.scrub import scrub


def model_card(config: Mapping[str, Any], iteration: int, metrics: Mapping[str, float]) -> str:
    """Markdown with the hub's front matter: base model, task, how it was trained, what it scored.

    `config` is the resolved run config, `metrics` the latest scalars of the run.
    """
    policy = config["policy"]
    base = str(policy.get("model_path", ""))
    is_local = base.startswith((".", "/", "~")) or Path(base).exists()
    is_hub_id = base.count("/") == 1 and not is_local
    front = ["---"]
    front += [f"base_model: {base}"] if is_hub_id else []
    front += ["library_name: peft"] if policy.get("lora") else []
    front += ["tags:", "- grpo", "- reinforcement-learning", "---"]
    shown = [name for name in sorted(metrics) if name.startswith(("eval/reward", "reward/mean"))]
    scores = [f"| {name} | {metrics[name]:.4g} |" for name in shown]
    table = ["", "| metric | value |", "|---|---|", *scores] if scores else []
    rewards = ", ".join(f"`{name}` ({plug['type']})" for name, plug in config["rewards"].items())
    body = [
        f"# {config['run_name']}",
        "",
        f"A `{policy['type']}` policy after {iteration} iterations of GRPO. Its completions drive "
        f"the frozen renderer `{config['renderer']['type']}`; rewards: {rewards}.",
        "",
        f"- {config['prompts_per_iteration']} prompts x {config['generations_per_prompt']} "
        f"completions per iteration, seed {config['seed']}",
        f"- loss `{config['algorithm']['loss']}`, KL coefficient "
        f"{config['algorithm']['kl_coeff']}, learning rate {config['optimizer']['learning_rate']}",
        *table,
    ]
    return "\n".join([*front, "", *body]) + "\n"


def push(folder: Path, repo_id: str, iteration: int) -> None:
    """Upload `folder` as one commit, creating the (private) repository if need be.

    Whatever goes wrong is one warning: the checkpoint is on disk, and the run goes on.
    """
    try:
        from huggingface_hub import HfApi

        api = HfApi()
        api.create_repo(repo_id, private=True, exist_ok=True)
        message = f"iteration {iteration}"
        api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message)
    except Exception as error:
        warn(scrub(f"push_to_hub to {repo_id!r} failed, the run goes on: {error!r}"))
