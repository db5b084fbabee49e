"""Edit pictures with what a run has trained.

    rl edit --run runs/my-run photo.jpg "make the sky red"
    rl edit --run runs/my-run --checkpoint best photos/ "make the sky red"
    rl edit --run runs/my-run room.jpg lamp.jpg "put the lamp of picture 2 into picture 1"
    rl edit --run runs/my-run edits.jsonl          {"image": "a.jpg", "instruction": "..."} a line,
                                                   {"images": ["a.jpg", "b.jpg"], ...} of several
    rl edit --run runs/my-prompts "a cat made of rain"          where a picture is drawn of words

Prints the words that the policy wrote and writes, into `--out`, the picture, a sheet that shows it
beside what the untrained policy, the user's own words and the stock pipeline give (`--only-edit`:
no sheet, one picture instead of four), and a JSON with everything that made it. Nothing is
overwritten. The same command makes the same picture. No judge is asked.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rl.config.printing import shown
from rl.record import terminal

if TYPE_CHECKING:
    from rl.edit.editor import Editor, EditResult

MAX_WORDS_SHOWN = 2000


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 1 when something could not be edited."""
    terminal.guard()
    args = _parser().parse_args(arguments)
    from rl.edit import files
    from rl.edit.editor import Editor

    try:
        requests = files.requests_of(*_asked(args.what))
        args.out.mkdir(parents=True, exist_ok=True)
        print(f"loading {args.run}", flush=True)
        editor = Editor.from_run(
            args.run,
            args.checkpoint,
            settings=args.set,
            device=args.device,
            num_steps=args.steps,
            size_px=args.size,
        )
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from error
    with editor:
        print(f"{editor.trained}, on {editor.device}{'' if editor.draws else _NOT_DRAWN}")
        began = time.monotonic()
        failed = 0
        stream = editor.edit_stream(
            requests, batch_size=args.batch_size, seed=args.seed, arms=not args.only_edit
        )
        for number, result in enumerate(stream, 1):
            failed += result.failure is not None
            try:
                written = files.save(editor, result, files.free_stem(args.out, result.request))
            except OSError as error:
                raise SystemExit(f"{error}; the edits before this one are written") from error
            _say(editor, result, written, number, len(requests), time.monotonic() - began)
    return int(failed > 0)


_NOT_DRAWN = "; this run's renderer draws nothing: the words are all there is"


def _say(
    editor: Editor,
    result: EditResult,
    written: Sequence[Path],
    number: int,
    num: int,
    seconds: float,
) -> None:
    from rl.edit.files import sizes_said

    head = [] if num == 1 else [f"[{number}/{num}]"]
    head += [str(image) for image in result.request.images if isinstance(image, Path | str)]
    asked = shown(result.request.instruction, MAX_WORDS_SHOWN)
    print(f"{' '.join(head)}{': ' if head else ''}{asked}")
    if result.thought:
        print(f"  thought: {shown(result.thought, MAX_WORDS_SHOWN)}")
    if result.words:
        print(f"  words:   {shown(result.words, MAX_WORDS_SHOWN)}")
    if result.failure is not None:
        print(f"  failed:  {shown(result.failure, MAX_WORDS_SHOWN)}")
    for said in sizes_said(result):
        print(f"  size:    {said}")
    left = "" if number == num else f", {seconds / number * (num - number):.0f} s left"
    print(f"  wrote:   {', '.join(map(str, written))} ({result.seconds:.1f} s{left})", flush=True)


def _asked(what: Sequence[str]) -> tuple[list[Path], str | None]:
    """(pictures, a folder or a JSONL file; instruction). One argument that is no file is words."""
    if len(what) > 1:
        return [Path(path) for path in what[:-1]], what[-1]
    is_path = what[0].endswith(".jsonl") or Path(what[0]).exists()
    return ([Path(what[0])], None) if is_path else ([], what[0])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rl edit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "what", nargs="+", help="pictures of one edit, a folder or a .jsonl file; instruction last"
    )
    parser.add_argument("--run", type=Path, required=True, help="run folder, runs/my-run")
    parser.add_argument(
        "--checkpoint",
        default="latest",
        help="latest, best (on held-out samples), or a number of iterations; default: latest",
    )
    parser.add_argument("--out", type=Path, default=Path("edits"), help="default: edits/")
    parser.add_argument("--seed", type=int, default=0, help="another one gives another picture")
    parser.add_argument("--steps", type=at_least_one, help="denoising steps; default: the run's")
    parser.add_argument(
        "--size",
        type=_size,
        default=(),
        help="1024x768, or 1024: about so many squared in the source's aspect; default: the run's",
    )
    parser.add_argument("--only-edit", action="store_true", help="draw nothing beside: no sheet")
    parser.add_argument("--batch-size", type=at_least_one, default=4, help="pictures at once")
    parser.add_argument("--device", default="auto", help="default: CUDA, else the CPU")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a key of the run's config: --set renderer.true_cfg_scale=1",
    )
    return parser


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(text)


def _size(text: str) -> tuple[int, ...]:
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 1024x768, or 1024")
    return tuple(map(int, sides))


if __name__ == "__main__":
    sys.exit(main())
