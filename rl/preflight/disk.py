"""How much a whole run writes, from sizes alone (GB: 1e9 bytes), and whether the disk has room."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rl import build
from rl.build import Resolved
from rl.preflight import footprint
from rl.record.checkpoint import find, iteration_of

NUM_RESUME_POINTS = 3
"""The newest two, and one that is being written; beside them the best on held-out samples."""
STATE_BYTES = 12
"""Of a trained parameter: float32 value and moments."""
PNG_BYTES = 2.0
"""Of a pixel, at the most: pictures of the world take about 1.5."""
UNKNOWN_AREA_PX = 1024 * 1024
"""Of a picture whose renderer does not say."""
NUM_STOCK_ARMS = 3
"""Of a held-out sample, at the most: the stock pipeline, its variant, the reference's words."""
TRACKER_AREA_PX = 384 * 384
TOKEN_BYTES, EPISODE_BYTES = 24, 3000
"""Of an episode's line: its id, log-prob and mask of each token; its words, marks and replies."""
REPLY_BYTES = 5
"""Of a token of a judge's reply."""


@dataclass(frozen=True)
class DiskNeed:
    """What is still to be written, GB."""

    fixed: Mapping[str, float]
    """By what it is: independent of the number of iterations."""
    per_iteration: Mapping[str, float]
    num_iterations: int | None
    """Still to be done; None: known once the data is loaded."""

    @property
    def total_gb(self) -> float:
        """Of all that is known."""
        return sum(self.fixed.values()) + (self.num_iterations or 0) * sum(
            self.per_iteration.values()
        )


def disk_need(resolved: Resolved) -> DiskNeed:
    """Of the run from where it stands; checkpoints of a policy of unknown size are left out."""
    found = find(resolved.config.run_dir, hashes=False)
    done = 0 if found.path is None else iteration_of(found.path)
    planned = build.planned_iterations(resolved)
    left = None if planned is None else max(0, planned - done)
    fixed, per_iteration = _checkpoints(resolved, done > 0)
    fixed |= {
        "the judge's replies since a checkpoint": _replies_gb(resolved),
        "the stock arm's pictures": 0.0 if done else _stock_gb(resolved),
    }
    trainings_gb, others_gb = _pictures_gb(resolved)
    if num_kept := resolved.config.tracking.keep_images_of_last_n_iterations:
        num_kept = num_kept if left is None else min(num_kept, left)
        fixed |= {"pictures of the last iterations": num_kept * trainings_gb}
        trainings_gb = 0.0
    per_iteration |= {"pictures": trainings_gb + others_gb, "episodes": _episodes_gb(resolved)}
    return DiskNeed(fixed, per_iteration, left)


def free_gb(folder: Path) -> float:
    """On the file system where `folder` is, or will be."""
    places = (folder, *folder.absolute().parents)
    there = next(place for place in places if os.path.exists(place))
    return shutil.disk_usage(there).free / 1e9


def disk_lines(resolved: Resolved) -> list[str]:
    """The need by its parts, and what is free."""
    need, folder = disk_need(resolved), Path(resolved.config.base_exp_dir)
    lines = [f"{what}: {_shown(gb)}" for what, gb in need.fixed.items() if gb]
    for what, gb in need.per_iteration.items():
        if gb and need.num_iterations is None:
            lines.append(f"{what}: {_shown(gb)} an iteration")
        elif gb and need.num_iterations:
            lines.append(f"{what}: {_shown(gb * need.num_iterations)}")
    if footprint.sizes(resolved) is None:
        lines.append("checkpoints: unknown, like the policy's size")
    more = " and what the iterations write" if need.num_iterations is None else ""
    lines.append(
        f"in all up to {_shown(need.total_gb)}{more}; {_shown(free_gb(folder))} are free at "
        f"{folder} on this machine"
    )
    return lines


def disk_problems(resolved: Resolved) -> list[str]:
    """Where the run would fill this machine's disk."""
    need, folder = disk_need(resolved).total_gb, Path(resolved.config.base_exp_dir)
    free = free_gb(folder)
    if need <= free:
        return []
    return [
        f"base_exp_dir: the run writes up to {_shown(need)}, and {_shown(free)} are free at "
        f"{folder}; name a larger disk, or write less: a larger "
        "checkpoint.keep_every_n_iterations (0: none), a smaller tracking.images_per_iteration, "
        "tracking.keep_images_of_last_n_iterations"
    ]


def _checkpoints(resolved: Resolved, resumed: bool) -> tuple[dict[str, float], dict[str, float]]:
    sizes = footprint.sizes(resolved)
    if sizes is None:
        return {}, {}
    model, rank = sizes.model, sizes.lora_rank
    full = rank is None
    trained = model.params if rank is None else model.lora_params(rank, sizes.lora_modules)
    model_gb = trained * (sizes.bytes_per_weight if full else 4) / 1e9
    point_gb = model_gb + trained * STATE_BYTES / 1e9
    config = resolved.config.checkpoint
    measured = resolved.config.evaluation.every_n_iterations and resolved.config.data.validation
    number = 1 if resumed else NUM_RESUME_POINTS + bool(measured)
    fixed = {f"resume points ({_shown(point_gb)} each)": number * point_gb}
    if not config.keep_every_n_iterations:
        return fixed, {}
    every = math.lcm(config.save_every_n_iterations, config.keep_every_n_iterations)
    name = f"resume points kept for ever ({_shown(point_gb)} every {every} iterations)"
    return fixed, {name: point_gb / every}


def _pictures_gb(resolved: Resolved) -> tuple[float, float]:
    """Of an iteration: rendered ones with their groups' sources and targets; and those of held-out
    runs and trackers' pages."""
    config, renderer = resolved.config, resolved.renderer
    area_px = _picture_area_px(resolved)
    provided = [plug.cls.provides(plug.config) for plug in resolved.train]
    beside = int(any("target" in names for names in provided))
    if any("source" in names for names in provided):
        beside += max((plug.cls.most_pictures(plug.config) or 1) for plug in resolved.train)
    groups = config.prompts_per_iteration
    most = min(config.tracking.images_per_iteration, groups * config.generations_per_prompt)
    if renderer.cls.makes_images:
        shown = -(-most // config.generations_per_prompt)
    else:
        shown, most = groups if most else 0, 0
    every = config.tracking.log_episodes_every_n_iterations
    of_group = beside + (config.bare_arm == "always" and renderer.cls.makes_images)
    trainings_px = (most + shown * of_group) * area_px / every if every else 0.0
    others_px = 0.0
    tracking = config.tracking
    if every:
        pages = (tracking.wandb != "off") + tracking.tensorboard + tracking.trackio
        of_rank_0 = groups // config.world_size * config.generations_per_prompt
        shown_px = min(most, of_rank_0) * (1 + beside) * min(area_px, TRACKER_AREA_PX)
        others_px += pages * shown_px / every
    evaluation = config.evaluation
    if evaluation.every_n_iterations:
        arms = 1 + (config.bare_arm != "never") + beside
        others_px += evaluation.num_samples * arms * area_px / evaluation.every_n_iterations
    return trainings_px * PNG_BYTES / 1e9, others_px * PNG_BYTES / 1e9


def _stock_gb(resolved: Resolved) -> float:
    """Drawn once, at the first held-out run; zero where there is none."""
    evaluation = resolved.config.evaluation
    if not (
        evaluation.stock_arm
        and evaluation.every_n_iterations
        and resolved.config.data.validation
        and resolved.renderer.cls.makes_images
    ):
        return 0.0
    pixels = evaluation.num_samples * NUM_STOCK_ARMS * _picture_area_px(resolved)
    return pixels * PNG_BYTES / 1e9


def _picture_area_px(resolved: Resolved) -> int:
    renderer = resolved.renderer
    return build.ask_plug(renderer, "picture_area_px", resolved.config)[0] or UNKNOWN_AREA_PX


def _episodes_gb(resolved: Resolved) -> float:
    config = resolved.config
    every = config.tracking.log_episodes_every_n_iterations
    completions = config.prompts_per_iteration * config.generations_per_prompt
    of_one = TOKEN_BYTES * config.sampling.max_completion_tokens + EPISODE_BYTES
    return completions * of_one / every / 1e9 if every else 0.0


def _replies_gb(resolved: Resolved) -> float:
    config = resolved.config
    questions = sum(plug.cls.num_questions(plug.config) for plug in resolved.rewards.values())
    completions = config.prompts_per_iteration * config.generations_per_prompt
    pictures = completions * config.images_per_completion
    of_one = config.judge.max_tokens * REPLY_BYTES
    return pictures * questions * of_one * config.checkpoint.save_every_n_iterations / 1e9


def _shown(gb: float) -> str:
    return f"{gb:.1f} GB" if gb >= 1 else f"{gb * 1e3:.1f} MB"
