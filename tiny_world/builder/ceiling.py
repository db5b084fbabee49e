"""Best score on riddles without a thought: python -m tiny_world.builder.ceiling --out DIR

Counted: a single look-up does not tell which of the named colours is asked for, so it is right once
in `NUM_CHAINS`. Trained: a policy of the thinker's size learns only right captions, without
thoughts, until it stops improving. (It starts without the thinker's heads that look back, with
which it takes longer to reach the counted share.) The policy is saved in the folder, and a run
measures its reward before the first update:

    python -m rl.simple_launch configs/tiny_thinking_twin.jsonnet policy.model_path=DIR
"""

from __future__ import annotations

import argparse
from pathlib import Path

STEPS = 1000


def main() -> None:
    """Trains the policy and prints how often its likeliest caption is right."""
    parser = argparse.ArgumentParser(prog="python -m tiny_world.builder.ceiling")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()

    import torch

    torch.set_num_threads(1)
    from tiny_world.builder import thinker
    from tiny_world.builder.tokenizer import image_processor
    from tiny_world.riddles import NUM_CHAINS

    writer = thinker.new_writer(3, args.layers, looks_back=False)
    thinker.learn(writer, "at once", args.steps, 2e-3, thinker.right, share_thinking=0)
    for part in (writer.policy, writer.tokenizer, image_processor()):
        part.save_pretrained(args.out)
    print(f"counted {1 / NUM_CHAINS:.3f}, trained {writer.share_right(False, 1024):.3f} right")


if __name__ == "__main__":
    main()
