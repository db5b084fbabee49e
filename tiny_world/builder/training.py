"""The training loop, losses and export to `tiny_world/weights` of all stages of the builder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

WEIGHTS = Path(__file__).resolve().parents[1] / "weights"
LIMIT_BYTES = 6_000_000
KL_WEIGHT = 2e-4


def fit(
    name: str,
    parameters: Iterable[torch.nn.Parameter],
    steps: int,
    peak_rate: float,
    loss_of: Callable[[int], torch.Tensor],
    check: Callable[[], object] = lambda: "done",
    check_every: int = 500,
    weight_decay: float = 0.01,
    warm_up: float = 0.05,
    rate_of: Callable[[int], float] | None = None,
) -> None:
    """Minimizes `loss_of(step)`, from step 1, with AdamW and OneCycleLR (or the learning rate
    `peak_rate * rate_of(steps done)`). Prints `check()` each `check_every` steps and at the end."""
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(parameters, peak_rate, (0.9, 0.98), weight_decay=weight_decay)
    schedule: torch.optim.lr_scheduler.LRScheduler
    if rate_of is None:
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, peak_rate, steps, pct_start=warm_up
        )
    else:
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_of)
    total = 0.0
    for step in range(1, steps + 1):
        loss = loss_of(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        total += loss.item()
        if step % 50 == 0:
            print(f"{name} {step}/{steps} loss {total / 50:.4f}", flush=True)
            total = 0.0
        if step % check_every == 0 or step == steps:
            print(f"{name} {step}/{steps}", check(), flush=True)


def sharp_error(decoded: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The fourth power adds weight to outlines, which have few pixels and large errors."""
    error = (decoded - target).abs()
    return (error + 2 * error**2 + 2 * error**4).mean()


def autoencoder_loss(vae, x: torch.Tensor) -> torch.Tensor:
    """`sharp_error` of a diffusers autoencoder's reconstruction, plus a small KL."""
    posterior = vae.encode(x).latent_dist
    decoded = vae.decode(posterior.sample()).sample
    return sharp_error(decoded, x) + KL_WEIGHT * posterior.kl().mean() / posterior.mean[0].numel()


def flow_loss(
    velocity_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    x0: torch.Tensor,
    share_at_1: float,
    skew: float,
) -> torch.Tensor:
    """Flow matching, x_t = (1 - t) x_0 + t noise, velocity = noise - x_0: the squared error of
    `velocity_of(x_t, t)`, weighted by (t + 0.05)^2: at small t the error is mostly noise.

    `share_at_1`: share of the examples trained at t = 1, where every picture starts, 0..1. The
    larger `skew`, the larger the t of the other examples.
    """
    num = len(x0)
    u = torch.rand(num)
    t = torch.where(torch.rand(num) < share_at_1, torch.ones(num), (1 + skew) * u / (1 + skew * u))
    noise, t_wide = torch.randn_like(x0), t.view(-1, *[1] * (x0.ndim - 1))
    velocity = velocity_of(x0 + t_wide * (noise - x0), t)
    return ((velocity - (noise - x0)) * (t_wide + 0.05)).square().mean()


def export(folder: str, *parts) -> None:
    """Saves models (rounded to fp16), tokenizers and the like into a folder of WEIGHTS."""
    target = WEIGHTS / folder
    shutil.rmtree(target, ignore_errors=True)
    for part in parts:
        (part.half() if isinstance(part, torch.nn.Module) else part).save_pretrained(target)
    # diffusers records the folder that a model was loaded from, which is private.
    for config in target.rglob("config.json"):
        content = json.loads(config.read_text())
        if content.pop("_name_or_path", None):
            config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    num_bytes = sum(file.stat().st_size for file in target.rglob("*"))
    if num_bytes >= LIMIT_BYTES:
        raise ValueError(f"{target} has {num_bytes} bytes, the limit is {LIMIT_BYTES}")
