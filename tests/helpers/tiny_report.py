"""Writes run folders with hostile text, as a run would, without any model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from rl.files import json_line

EVIL = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&`${alert(3)}\u2028\u2029"
    "\u202egnp.exe\u202c {{ 7*7 }} <!-- ]]> \\u003c"
)
"""Closes scripts, comments, attributes, strings, templates and lines, and reverses text."""
REWARDS = {0: [0.1, 0.9, None, 0.2, 0.5], 4: [0.9, 0.3, 0.8, 0.2, 0.6]}
"""Finished iterations -> held-out rewards."""
REGIONS = {
    "viescore": [
        {"label": f"hat {EVIL}", "box": [0.25, 0.5, 0.75, 1.0]},
        *({"label": "hat", "box": box} for box in (None, [0, 0, 1], [0, 0, 2, 1], [0, "0", 1, 1])),
        {"box": [0, 0, 1, 1]},
    ],
    EVIL: EVIL,
}
"""Only the first is well-formed."""
NUM_GROUPS, NUM_COMPLETIONS = 3, 2


def write_run(folder: Path, *, name: str = "tiny", num_iterations: int = 4) -> Path:
    folder.mkdir(parents=True)
    config = {
        "format": 3,
        "run_name": name,
        "num_iterations": 4,
        "policy": {"model_path": "pkg://tiny_world/weights/policy"},
        "rewards": {"viescore": {"type": "viescore"}},
        "data": {"train": [{"type": EVIL}]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_lines(folder / "metrics.jsonl", map(metrics, range(num_iterations + 1)))
    for iteration in range(num_iterations + 1):
        if iteration:
            write_episodes(folder, iteration)
        if iteration in REWARDS:
            write_evaluation(folder, iteration, REWARDS[iteration])
    return folder


def draw(stem: Path, **colours: str) -> None:
    """Writes pictures `<stem><name>.png` of 16x16 px."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    for name, colour in colours.items():
        Image.new("RGB", (16, 16), colour).save(f"{stem}{name}.png")


def metrics(iteration: int) -> dict[str, Any]:
    line = {"iteration": iteration, "time/iteration_s": 2.0, "time/render_s": 1.5}
    if iteration:
        line |= {
            "optimizer/steps": 1,
            "reward/mean": iteration / 4,
            "policy/entropy": 1.0,
            "groups/dead": 0.0,
        }
    if iteration in REWARDS:
        line |= {"eval/reward": iteration / 5, "drift/alarm": float(iteration > 0)}
    return line


def write_episodes(folder: Path, iteration: int) -> None:
    rows = []
    for g in range(NUM_GROUPS):
        stem = f"images/it_{iteration:06d}/rank0_g{g:02d}_"
        draw(folder / stem, source="blue", bare="gray", m0="red", m1="red")
        members = [episode(iteration, g, member) for member in range(NUM_COMPLETIONS)]
        bare = {"completion": f"own words {EVIL}", "reward": 0.125, "image_file": f"{stem}bare.png"}
        rows += [members[0] | {"bare": members[0] | bare}, *members[1:]]
    write_lines(folder / "episodes" / f"it_{iteration:06d}.rank0.jsonl", rows)


def episode(iteration: int, g: int, member: int) -> dict[str, Any]:
    """The second completion of group 2 is ungraded; the judge grades each picture twice."""
    stem = f"images/it_{iteration:06d}/rank0_g{g:02d}"
    replies = [
        json.dumps({"reasoning": f"because {EVIL}", "score": score})
        for score in ([8, 8], [8 - 2 * g, 8])
    ]
    row = {
        "sample_id": f"train-{g}",
        "group_id": f"{iteration}/{g}",
        "category": ["noun", EVIL, "erase"][g],
        "instruction": f"instruction {g} {EVIL}",
        "completion": f"completion {EVIL}",
        "finish": "stop",
        "status": "scored",
        "failure": None,
        "reward": (g + member) / 4,
        "advantage": 0.5 - member,
        "parts": {"viescore": (g + member) / 4, EVIL: 1.0},
        "judge_s": 0.25,
        "replies": {"viescore": replies},
        **({"regions": REGIONS} if g == 1 else {}),
        "noise_seed": 77,
        "token_ids": [302, 258, 312],
        "sampler_logprobs": [-0.25, -6.0, -0.001],
        "forced": [0, 0, 1],
        "rank": 0,
        "member": member,
        "source_file": f"{stem}_source.png",
        "target_file": None,
        "image_file": f"{stem}_m{member}.png",
    }
    return row | (ungraded("no_reply") | {"advantage": None} if g == 2 and member == 1 else {})


def ungraded(reason: str) -> dict[str, Any]:
    failure = f"{reason}: {EVIL}"
    return {"status": "ungraded", "failure": failure, "reward": None, "parts": {}}


def write_evaluation(folder: Path, iteration: int, rewards: list[float | None]) -> None:
    directory = folder / "evaluation" / f"it_{iteration:06d}"
    rows = []
    for number, reward in enumerate(rewards):
        draw(directory / f"{number}_", source="blue", image="red", bare="gray")
        row = {
            "id": f"s{number} {EVIL}" if number == 4 else f"s{number}",
            "category": ["noun", "erase"][number % 2],
            "instruction": f"held-out {number} {EVIL}",
            "completion": f"words {iteration} {EVIL}",
            "reference": EVIL,
            "status": "scored",
            "failure": None,
            "reward": reward,
            "parts": {"viescore": reward},
            "replies": {"viescore": [f"it is {EVIL}"]},
            "noise_seed": 78,
            "judge_s": 0.5,
            "token_ids": [302, 258],
            "sampler_logprobs": [-0.25, -6.0],
            "bare_reward": 0.1,
            "stock_reward": 0.2,
            "source_file": f"{number}_source.png",
            "image_file": f"{number}_image.png",
            "bare_file": f"{number}_bare.png",
        }
        rows.append(row | (ungraded("timeout") if reward is None else {}))
    write_lines(directory / "records.jsonl", rows)


def data_of(run_dir: Path, name: str) -> Any:
    """The value that a data file passes to the page's scripts. A file is exactly one call."""
    text = (run_dir / "report/data" / f"{name}.js").read_text("utf-8")
    match = re.fullmatch(r'page\.data\("[a-z0-9_]+",(.*)\);\n', text, re.DOTALL)
    assert match is not None, text[:200]
    return json.loads(match[1])


def facts_of(page: str) -> Any:
    """The value that a page passes to its scripts."""
    return json.loads(page.partition("const page = {facts: ")[2].partition("};\n")[0])


def write_lines(file: Path, rows: Iterable[Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(map(json_line, rows)))


def held_out(i: int, reward: float | None, **changes: Any) -> dict[str, Any]:
    """The record of one held-out sample with harmless text."""
    return {
        "id": f"s{i}",
        "category": "ab"[i % 2],
        "instruction": f"ask {i}",
        "completion": f"write {i}",
        "reward": reward,
        "bare_reward": 0.25,
        "source_file": "source.png",
        "bare_file": None,
        "image_file": "image.png",
        **changes,
    }


def write_held_out(run_dir: Path, iteration: int, records: Sequence[Any]) -> Path:
    """Writes the records of an evaluation; returns its folder."""
    folder = run_dir / "evaluation" / f"it_{iteration:06d}"
    write_lines(folder / "records.jsonl", records)
    return folder
