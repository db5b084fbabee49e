"""Build `tiny_world/weights` from scratch: python -m tiny_world.builder --work /tmp/world

Everything is seeded and runs on one CPU thread; tests/tiny_world checks the result. Stages, and
minutes on one core:

    vae         8   AutoencoderKLQwenImage on drawn scenes
    policy     10   Qwen2.5-VL that describes edits, often wrongly
    drift       2   short LoRA fine-tunings that imitate how training changes the policy
    editor     35   QwenImageTransformer2DModel, conditioned on the (drifted) policy's states
    reasoner    5   a policy that answers questions, initialised from the shipped policy
    emu3_vq     6   Emu3VQVAE with the codes of `token_scenes.py`
    emu3        7   Emu3 that reads and writes those codes, often wrongly
    sd3_vae    12   AutoencoderKL on pictures of one shape
    clip        3   CLIP that knows plain captions and users' prompts
    sd3         8   SD3Transformer2DModel and its text encoders on plain captions
    rewriter    2   a policy that rewrites users' prompts as captions, often wrongly
    thinker     5   a policy that solves riddles in two look-ups, often wrongly

For Qwen3-VL and Qwen-Image-2.1, with one source picture and with two:

    image21_vae     11   AutoencoderKLQwenImage21 on the same scenes
    image21_policy   6   Qwen3-VL, trained as `policy`
    image21_drift    1   as `drift`
    image21_editor  20   QwenImage21Transformer2DModel

For FLUX.2-klein, a stock pipeline that reads the policy's text:

    klein_vae        8   AutoencoderKLFlux2 on the same scenes
    klein_editor    11   Flux2Transformer2DModel and its Qwen3 text encoder on plain descriptions

A finished stage writes `<work>/<stage>.done` and is skipped the next time. `vae` does not depend on
`policy` and `drift`: with two cores, run `--only vae` in parallel with `--only policy drift`, and
the `image21` stages likewise.
"""

from __future__ import annotations

import argparse
import importlib
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

STAGES = (
    *("vae", "policy", "drift", "editor", "reasoner", "emu3_vq", "emu3"),
    *("sd3_vae", "clip", "sd3", "rewriter", "thinker"),
    *("image21_vae", "image21_policy", "image21_drift", "image21_editor"),
    *("klein_vae", "klein_editor"),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tiny_world.builder",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--work", type=Path, default=Path("runs/tiny_world"))
    parser.add_argument("--only", nargs="+", choices=STAGES, default=STAGES, metavar="STAGE")
    parser.add_argument("--again", action="store_true", help="run stages that are done, too")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)

    import torch

    torch.set_num_threads(1)
    for stage in STAGES:
        done = args.work / f"{stage}.done"
        if stage not in args.only or (done.exists() and not args.again):
            continue
        start_s = time.time()
        importlib.import_module(f"tiny_world.builder.{stage}").build(args.work)
        minutes = f"{(time.time() - start_s) / 60:.1f} minutes"
        print(f"{stage}: {minutes}", flush=True)
        done.write_text(minutes + "\n")


if __name__ == "__main__":
    main()
