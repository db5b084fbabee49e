"""Better prompts for pictures: `rl enhance [--adapter <run>] "a cat made of rain" ...`.

Prompts from the command line, a file (`.txt`, a prompt per line; `.jsonl`, an object per line
with `prompt` and perhaps `image`, a path) or standard input; one JSON object per prompt to standard
output or `--out`, as each batch is done. `--adapter` takes a run, a checkpoint or its `model`
folder; the run's own system prompt is then used.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from PIL.Image import Image

from rl.api.data import RowRules
from rl.commands.edit import at_least_one
from rl.config.messages import validate
from rl.data import prompts as prompt_files
from rl.data.shared.jsonl import numbered_lines, read_rows
from rl.enhance import DEFAULT_MODEL, MAX_NEW_TOKENS, Enhanced, Enhancer
from rl.files.atomic import json_line
from rl.record import terminal

MAX_PICTURE_SIDE_PX = 8192


def main(arguments: Sequence[str] | None = None) -> None:
    terminal.guard()
    args = _parser().parse_args(arguments)
    try:
        prompts, pictures = read_prompts(args)
        enhancer = Enhancer(
            args.model, args.adapter, args.device, args.dtype, system_prompt=args.system_prompt
        )
        results = enhancer.enhance_stream(
            prompts,
            pictures,
            batch_size=args.batch_size,
            temperature=args.temperature,
            max_new_tokens=args.max_new_tokens,
            seed=args.seed,
        )
        to_file = args.out and args.out.open("w", encoding="utf-8")
        with to_file or nullcontext(terminal.for_data()) as out:
            for result in results:
                print(json_line(as_row(result)), end="", file=out, flush=True)
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rl enhance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompts", nargs="*", help="none, and no --file: one per line of stdin")
    parser.add_argument("--file", type=Path, help=".txt or .jsonl")
    parser.add_argument("--out", type=Path, help="file to write; default: standard output")
    parser.add_argument("--adapter", type=Path, help="run, checkpoint or its 'model' folder")
    parser.add_argument("--model", help=f"default: the adapter's base, else {DEFAULT_MODEL}")
    parser.add_argument("--system-prompt", help="default: the run's")
    parser.add_argument("--device", default="auto", help="default: CUDA, else the CPU")
    parser.add_argument("--dtype", default="auto", help="default: bfloat16, on the CPU float32")
    parser.add_argument("--batch-size", type=at_least_one, default=8)
    parser.add_argument("--temperature", type=float, default=0.7, help="0: the likeliest words")
    parser.add_argument(
        "--max-new-tokens",
        type=at_least_one,
        help=f"default: {MAX_NEW_TOKENS}; of a run that thinks, as many as it trained with",
    )
    parser.add_argument("--seed", type=int, default=0, help="another one gives other words")
    return parser


def read_prompts(args: argparse.Namespace) -> tuple[list[str], list[Image | None]]:
    """Prompts and the pictures that go with them. Raises ValueError when there are none."""
    if args.file is None:
        prompts = args.prompts or _read_stdin()
        if not prompts:
            raise ValueError("no prompts: give them as arguments, by --file, or on stdin")
        return prompts, [None] * len(prompts)
    if args.prompts:
        raise ValueError("prompts on the command line and --file: give one of them")
    section: dict[str, Any] = {"type": "prompts", "path": str(args.file)}
    if args.file.suffix == ".jsonl":
        section["picture_key"] = "image"
    config, problems = validate(prompt_files.Config, section)
    if config is None:
        raise ValueError("\n".join(problems))
    rules = RowRules("error", MAX_PICTURE_SIDE_PX, 1, "a prompt goes with one: give fewer")
    rows = prompt_files.Prompts(config, rules)
    samples = [rows[index] for index in range(len(rows))]
    return [sample.instruction for sample in samples], [sample.source for sample in samples]


def _read_stdin() -> list[str]:
    lines = numbered_lines(sys.stdin.buffer.read())
    rows, _, unreadable = read_rows(lines, "standard input", prompt_files.as_row)
    if unreadable:
        raise ValueError("\n".join(unreadable))
    return [row["prompt"] for row in rows]


def as_row(result: Enhanced) -> dict[str, Any]:
    return {
        "original": result.original,
        "enhanced": result.enhanced,
        **({"thought": result.thought} if result.thought else {}),
        "num_tokens": result.num_tokens,
        "finish": result.finish,
        **({"failure": result.failure} if result.failure else {}),
        "quality_0_5": round(result.quality_0_5, 3),
        "quality": {name: round(points, 3) for name, points in result.quality.items()},
    }


if __name__ == "__main__":
    main()
