"""Measures the size of a long run's report page, and the time to write and to open it.

    python -m benchmarks.report_page FOLDER [ITERATIONS GROUPS COMPLETIONS]

Writes a run of random data to FOLDER, and its page twice: from scratch, and after a new iteration.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from PIL import Image

from rl.tools.report.page import Page

WORDS = ("turn", "the large", "red", "square", "in the upper left", "into", "a", "blue circle")
NUM_TOKENS = 160
EVALUATE_EVERY = 25
"""Iterations between two evaluations."""
NUM_HELD_OUT = 64


def write_run(folder: Path, iterations: range, num_groups: int, num_completions: int) -> None:
    """Writes metrics and episodes of these iterations; all episodes share two picture files."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(iterations.start)  # nosec B311
    for iteration in iterations:
        rows = [
            episode(rng, iteration, g, m) for g in range(num_groups) for m in range(num_completions)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        path = folder / "episodes" / f"it_{iteration:06d}.rank0.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text(lines)
        line = {"iteration": iteration, "time/iteration_s": 60.0, "time/render_s": 40.0}
        line |= {f"{name}/mean": rng.random() for name in ("reward", "other", "third")}
        line |= {"policy/entropy": rng.random(), "kl/reference_k3": rng.random() / 100}
        line |= {"groups/zero_spread": rng.random(), "tokens/completion_mean": 150 * rng.random()}
        if iteration % EVALUATE_EVERY == 0:
            line["eval/reward"] = rng.random()
            evaluation(rng, folder, iteration)
        with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    images = folder / "images" / "it_000001"
    images.mkdir(parents=True, exist_ok=True)
    for name in ("source", "made"):
        Image.effect_noise((256, 256), 40).save(images / f"{name}.png")


def episode(rng: random.Random, iteration: int, g: int, member: int) -> dict[str, Any]:
    reason = " ".join(rng.choices(WORDS, k=80))
    reply = json.dumps({"reasoning": reason, "score": [rng.randint(0, 10), rng.randint(0, 10)]})
    parts = {f"viescore/part_{n}": rng.random() * 10 for n in range(10)}
    return {
        "sample_id": f"train-{iteration}-{g}",
        "group_id": f"{iteration}/{g}",
        "category": rng.choice(["noun", "erase", "match"]),
        "instruction": " ".join(rng.choices(WORDS, k=14)),
        "completion": " ".join(rng.choices(WORDS, k=110)),
        "finish": "stop",
        "status": rng.choices(["scored", "ungraded"], [50, 1])[0],
        "failure": None,
        "reward": rng.random(),
        "advantage": rng.random() - 0.5,
        "parts": parts,
        "judge_s": rng.random(),
        "replies": {"viescore": [reply, reply]},
        "noise_seed": rng.getrandbits(31),
        "token_ids": [rng.randrange(150_000) for _ in range(NUM_TOKENS)],
        "sampler_logprobs": [-rng.expovariate(3) for _ in range(NUM_TOKENS)],
        "forced": None,
        "rank": 0,
        "member": member,
        "source_file": "images/it_000001/source.png",
        "target_file": None,
        "image_file": "images/it_000001/made.png",
    }


def evaluation(rng: random.Random, folder: Path, iteration: int) -> None:
    path = folder / "evaluation" / f"it_{iteration:06d}" / "records.jsonl"
    path.parent.mkdir(parents=True)
    Image.effect_noise((256, 256), 40).save(path.parent / "made.png")
    rows = []
    for number in range(NUM_HELD_OUT):
        row = {**episode(rng, iteration, number, 0), "id": f"held-out-{number}"}
        row |= {"source_file": "made.png", "image_file": "made.png", "bare_file": None}
        rows.append({name: value for name, value in row.items() if name not in ("token_ids",)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def measure(pages: Page) -> None:
    """Writes the page; prints its size and the seconds."""
    began_s = time.perf_counter()
    page = pages.write()
    seconds = time.perf_counter() - began_s
    data = sorted((page.parent / "data").glob("*.js"), key=lambda path: path.stat().st_size)
    total_mb = sum(path.stat().st_size for path in data) / 1e6
    print(
        f"made in {seconds:.1f} s: index.html "
        f"{page.stat().st_size / 1e6:.2f} MB; {len(data)} data pages, {total_mb:.0f} MB, the "
        f"largest {data[-1].stat().st_size / 1e3:.0f} KB"
    )


def open_page(page: Path) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for view, ready in (
            ("", "#at-overview svg"),
            ("#held-out", "#at-held-out .card"),
            ("#training", "#at-training tbody tr"),
            ("#training&sort=spread", "#at-training tbody tr"),
            ("#it=500&g=3", "#at-sample .member"),
            ("#eval=500&id=held-out-3", "#at-sample .across .pic"),
        ):
            tab = browser.new_page(viewport={"width": 1280, "height": 900})
            began_s = time.perf_counter()
            tab.goto(page.resolve().as_uri() + view, wait_until="domcontentloaded")
            tab.locator(ready).first.wait_for()
            print(f"open {view or 'the overview'}: {time.perf_counter() - began_s:.2f} s")
            tab.close()
        browser.close()


def main(folder: str, *sizes: str) -> None:
    num_iterations, num_groups, num_completions = map(int, sizes or ("1000", "8", "8"))
    run_dir = Path(folder)
    write_run(run_dir, range(1, num_iterations + 1), num_groups, num_completions)
    pages = Page(run_dir)
    measure(pages)
    write_run(run_dir, range(num_iterations + 1, num_iterations + 2), num_groups, num_completions)
    measure(pages)
    open_page(run_dir / "report" / "index.html")


if __name__ == "__main__":
    main(*sys.argv[1:])
