"""Edit pictures with the policy that a run has trained.

    rl edit --run runs/my-run photo.jpg "make the sky red"
    rl edit --run runs/my-run --checkpoint best photos/ "make the sky red"
    rl edit --run runs/my-run room.jpg lamp.jpg "put the lamp into picture 1"
    rl edit --run runs/my-run edits.jsonl
    rl edit --run runs/my-run photo.jpg "dusk" --set renderer.num_steps=8
    rl edit --run runs/my-prompts "a cat made of rain"     (draws from text)
    rl edit --config configs/quickstart.jsonnet photo.jpg "dusk"    (untrained)
    rl edit --config my.jsonnet --adapter me/my-adapter photo.jpg "dusk"

A line of a .jsonl file is {"image": "a.jpg", "instruction": "..."}, or has
"images": ["a.jpg", "b.jpg"]. Prints the words that the policy wrote. Writes into
--out the picture and a JSON file of all its inputs; for comparison also the
pictures of the untrained policy (_before), of the user's own words (_bare) and of
the stock pipeline (_stock), and all in a row, the sources first (_sheet;
--only-edit: none of these, so one picture is drawn instead of four).
Nothing is overwritten. The same command draws the same picture. The judge is not
asked.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rl import printing
from rl.config.loading import escaped
from rl.config.schema import ConfigError

MAX_WORDS_SHOWN = 2000
ENHANCE_OPTION = "--only-words"
"""What `rl enhance` places before its arguments."""
ENHANCE_DOC = """Rewrite prompts with the policy that a run has trained.

    rl enhance --run runs/my-prompts "a cat made of rain"
    rl enhance --run runs/my-run photo.jpg "make the sky red"
    rl enhance --run runs/my-run edits.jsonl
    rl enhance --config configs/tiny_prompts.jsonnet "a cat"   (untrained)
    rl enhance --config my.jsonnet --adapter me/my-adapter "a cat"

Prints the words that the policy wrote, and writes each request's into --out as a JSON file. It
draws nothing and loads no renderer. The same command writes the same words. (rl edit draws, too.)
"""


@printing.program
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 1 when something could not be edited."""
    arguments = sys.argv[1:] if arguments is None else arguments
    is_enhance = arguments[:1] == [ENHANCE_OPTION]
    parser = _parser(is_enhance)
    args = parser.parse_intermixed_args(arguments)
    if bool(args.config) == bool(args.run) and (args.config or not args.adapter):
        parser.error("give --run RUN or --config CONFIG")
    from rl import build
    from rl.check.this_machine import fetch_small_files, fetch_weights
    from rl.tools.editor import Editor, free_stem, requests_of, save, unusable
    from rl.tools.trained import config_for_use, load, pick_device

    if args.only_words and (args.only_edit or args.steps or args.size):
        name = "rl enhance" if is_enhance else ENHANCE_OPTION
        raise ValueError(f"{name} draws nothing: leave out --only-edit, --steps and --size")
    *first, last = args.what
    is_path = not first and (last.endswith(".jsonl") or Path(last).exists())
    for url in [word for word in args.what if "://" in word and " " not in word]:
        raise ValueError(f"{url} is a URL: download the picture, and give its path")
    paths = [Path(path) for path in ([last] if is_path else first)]
    requests = requests_of(paths, None if is_path else last)
    if args.out.exists() and not args.out.is_dir():
        raise ValueError(f"--out {args.out} is a file; name a folder")
    args.out.mkdir(parents=True, exist_ok=True)
    pick_device(args.device)
    settings = [*args.set, *(f"policy.type={name}" for name in args.policy)]
    source = args.config or args.run or args.adapter
    adapter = args.adapter if source != args.adapter else ""
    trained = load(source, bool(args.config), args.checkpoint, adapter)
    config, base_policy = config_for_use(
        trained, settings, args.device, args.steps, args.size, args.only_words
    )
    # Before the models, which may load for minutes.
    reasons = unusable(requests, config)
    for name, reason in reasons.items():
        printing.complain(f"{name}: {reason}" if len(requests) > 1 else reason)
    if len(reasons) == len(requests):
        return 1
    resolved = build.resolve(config)
    if "source_codes" in resolved.policy.cls.needs and not (args.size or args.only_words):
        trained.source_area_px()  # raises if the size is unknown
    if problems := fetch_small_files(resolved) or fetch_weights(resolved):
        raise ConfigError(problems)
    print(f"loading {trained.name}", flush=True)
    with Editor(config, args.device, trained, base_policy, args.size, args.only_words) as editor:
        print(f"{editor.trained}, on {editor.device}{'' if editor.draws else '; no pictures'}")
        began = time.monotonic()
        failed = 0
        variants = not (args.only_edit or args.only_words)
        stream = editor.edit_stream(
            requests, batch_size=args.batch_size, seed=args.seed, variants=variants
        )
        for number, result in enumerate(stream, 1):
            failed += result.failure is not None
            try:
                written = save(editor, result, free_stem(args.out, result.request))
            except OSError as error:
                raise ValueError(f"{error}; the edits before this one are written") from error
            images = result.request.images
            heading = [] if len(requests) == 1 else [f"[{number}/{len(requests)}]"]
            heading += [" ".join(map(str, images)) + ":"] if images else []
            print(" ".join([*heading, escaped(result.request.instruction, MAX_WORDS_SHOWN)]))
            for name, text in (
                ("thought", result.thought),
                ("words", result.words),
                ("failed", result.failure),
            ):
                if text:
                    print(f"  {name + ':':8} {escaped(text, MAX_WORDS_SHOWN)}")
            remaining_s = (time.monotonic() - began) / number * (len(requests) - number)
            remaining = f", {remaining_s:.0f} s left" if number < len(requests) else ""
            files = ", ".join(map(str, written))
            print(f"  wrote:   {files} ({result.seconds:.1f} s{remaining})", flush=True)
    return int(failed > 0)


def _parser(is_enhance: bool) -> argparse.ArgumentParser:
    name, doc = ("rl enhance", ENHANCE_DOC) if is_enhance else ("rl edit", __doc__)
    parser = printing.Parser(name, doc)
    add = parser.add_argument

    def drawing(text: str) -> str:
        return argparse.SUPPRESS if is_enhance else text

    add("what", nargs="+", help="pictures of one edit, a folder or a .jsonl file; instruction last")
    add("--run", help="run folder, or a checkpoint of it")
    add("--config", help="a config file: its policy as it is, untrained, or with --adapter")
    add("--adapter", default="", help="PEFT folder, run, or hub id; without --config: as --run")
    add(
        "--checkpoint",
        default="",
        help="latest, best (on held-out samples), or a number of iterations; default: latest",
    )
    add(
        "--policy",
        nargs=1,
        default=[],
        metavar="TYPE",
        help="the run's policy plugin, whose code you trust",
    )
    add("--out", type=Path, default=Path("edits"), help="default: edits/")
    add("--seed", type=int, default=0, help="another seed gives another picture")
    add("--steps", type=at_least_one, help=drawing("denoising steps; default: the run's"))
    add(
        "--size",
        type=_size,
        default=(),
        help=drawing(
            "1024x768, or 1024: area about 1024 x 1024, the source's aspect; default: the run's"
        ),
    )
    add("--only-edit", action="store_true", help=drawing("draw only the edit: no comparison sheet"))
    add(
        ENHANCE_OPTION,
        action="store_true",
        help=drawing("draw no picture, and load no renderer; as rl enhance"),
    )
    add("--batch-size", type=at_least_one, default=4, help="requests at once")
    add("--device", default="auto", help="default: CUDA, else the CPU")
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a key of the run's config: --set renderer.true_cfg_scale=1",
    )
    return parser


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def _size(text: str) -> tuple[int, ...]:
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write 1024x768, or 1024")
    return tuple(map(int, sides))


if __name__ == "__main__":
    sys.exit(main())
