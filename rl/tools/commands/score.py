"""Grade pictures with a config's rewards, and print the judge's words.

    rl score configs/qwen_image_edit.jsonnet red.png \\
        --source photo.jpg --instruction "make the sky red"
    rl score my.jsonnet edits/*.png
    rl score my.jsonnet edits/photo.png judge.model=my-judge

A picture that `rl edit` wrote needs no options: the JSON file beside it has the
source and the instruction. No policy and no renderer is loaded. Several results of
one instruction are compared by rewards that compare. A reward that needs more than
is given is left out. The exit code is 1 if a picture got no final reward.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from rl import build, printing
from rl.algorithm.metrics import compose
from rl.api.data import MAX_IMAGE_SIDE_PX
from rl.api.types import RewardInput, RewardOutput
from rl.build import Resolved
from rl.config.loading import escaped
from rl.data.rows import load_image
from rl.files import append_line, json_line, read_object
from rl.judge.http import BackgroundLoop
from rl.progress import Console, counted, shown_on
from rl.ranks.dist import Dist
from rl.rollout.episodes import scores, values_of
from rl.run.checks import contents_of
from rl.run.set_up import open_judges
from rl.tools.editor import EditRequest, sample_of
from rl.tools.trained import config_for_use, from_config, pick_device

MAX_SHOWN_CHARS = 2000


@printing.program
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 1 if a picture got no final reward."""
    args = _parser().parse_intermixed_args(arguments)
    overrides = [word for word in args.picture if re.match(r"[\w.]+=", word)]
    pictures = [Path(word) for word in args.picture if word not in overrides]
    trained = from_config(args.config, overrides)
    judge = {**trained.config["judge"], "audit": "off"}
    place = {"base_exp_dir": "evals", "run_name": "score"}  # of the log of a judge that is started
    config, _ = config_for_use(trained, device=args.device, replaced={"judge": judge, **place})
    resolved = build.resolve(config)
    given = (args.source, args.instruction, args.words, args.target)
    inputs = [input_of(picture, resolved, *given) for picture in pictures]
    resolved, reasons = gradable(resolved, inputs)
    for reason in reasons:
        printing.complain(reason)
    if not (resolved.rewards and inputs):
        raise ValueError("nothing to grade: give a picture, and what the rewards need")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.open("a").close()  # an unusable file is found before questions cost
    num_ungraded = 0
    for each, grades in zip(inputs, grades_of(resolved, inputs, args.device), strict=True):
        row = {
            "image": each.sample.id,
            "instruction": each.sample.instruction,
            "words": each.text,
            "reward": compose(values_of(grades), resolved.config.final_reward),
            "rewards": {name: asdict(output) for name, output in grades.items()},
        }
        num_ungraded += row["reward"] is None
        print("\n".join(_lines(row)), flush=True)
        if args.out:
            append_line(args.out, json_line(printing.scrubbed(row)))
    return int(num_ungraded > 0)


class _Shown(BaseModel):
    """What an edit was made of, in the JSON file that `rl edit` writes; other keys are ignored."""

    image: str | None = None
    words: str = ""


class _Note(_Shown):
    """That file."""

    files: dict[str, str]
    instruction: str
    images: list[_Shown] = []
    beside: dict[str, _Shown] = {}


def input_of(
    picture: Path,
    resolved: Resolved,
    sources: Sequence[Path] = (),
    instruction: str | None = None,
    words: str | None = None,
    target: Path | None = None,
) -> RewardInput:
    """What rewards read of a picture. Sources, instruction and words that are not given are those
    of the JSON file that `rl edit` wrote beside the picture; without any, the words are the
    instruction. Raises ValueError."""
    note, variant = None, ""
    for stem in (picture.stem, picture.stem.rpartition("_")[0]):
        with suppress(OSError, ValidationError):  # no such file, or not of `rl edit`
            found = _Note.model_validate(read_object(picture.with_name(f"{stem}.json")))
            variants = [name for name, file in found.files.items() if file == picture.name]
            note, variant = (found, variants[0]) if variants else (note, variant)
    if variant == "sheet":
        raise ValueError(f"{picture} shows several pictures side by side: name one of them")
    if note:
        sources = sources or [Path(e.image) for e in note.images or [note] if e.image]
        instruction = instruction or note.instruction
        words = words or note.beside.get(variant, note).words
    if not instruction:
        raise ValueError(f"{picture}: say what was asked for: --instruction 'make the sky red'")
    if missing := [str(source) for source in sources if not source.is_file()]:
        raise ValueError(f"{picture}: its source {missing[0]} is not here: give --source FILE")
    request = EditRequest(instruction, sources, id=str(picture))
    sample = sample_of(request, build.row_rules(resolved), needs_picture=False)
    if target:
        sample = replace(sample, target=load_image(target, MAX_IMAGE_SIDE_PX))
    return RewardInput(sample, words or instruction, load_image(picture, MAX_IMAGE_SIDE_PX))


def gradable(resolved: Resolved, inputs: Sequence[RewardInput]) -> tuple[Resolved, list[str]]:
    """(the config with the rewards that can grade all the inputs, why others cannot). There is no
    final reward if one that counts is left out."""
    kept, reasons = {}, []
    has = {
        "image": True,
        "text": True,
        "source": all(each.sample.sources for each in inputs),
        "target": all(each.sample.target for each in inputs),
    }
    for name, plugin in resolved.rewards.items():
        if lacking := [n for n in plugin.cls.needs_with(plugin.config) if not has.get(n)]:
            remedy = f": --{lacking[0]} FILE" if lacking[0] in has else ", which a picture lacks"
            reasons.append(f"{plugin.key} is left out: it needs {lacking[0]!r}{remedy}")
        else:
            kept[name] = plugin
    final = resolved.config.final_reward
    weights = final.weights or dict.fromkeys(resolved.rewards, 1.0)
    final = final.model_copy(update={"weights": weights})
    config = resolved.config.model_copy(update={"final_reward": final})
    return replace(resolved, config=config, rewards=kept), reasons


def grades_of(
    resolved: Resolved, inputs: Sequence[RewardInput], device: str
) -> Iterator[dict[str, RewardOutput]]:
    """Yield the outputs of all rewards, by name, for each input. Pictures of the same edit are
    compared with each other by rewards that compare. Raises JudgeError, ValueError."""
    dist, console = Dist(device=pick_device(device)), Console(True)
    edits: dict[object, list[int]] = {}
    for number, each in enumerate(inputs):
        edits.setdefault((each.sample.instruction, contents_of(each.sample)), []).append(number)
    with ExitStack() as stack:
        stack.enter_context(shown_on(console))
        loop = stack.enter_context(BackgroundLoop("judge"))
        judges, _ = open_judges(resolved, dist, loop, stack, console, inputs[0].sample)
        calls: list[dict[str, tuple[Future[Sequence[RewardOutput]], int]]] = [{} for _ in inputs]
        for name, reward in build.build_rewards(resolved, judges, dist).items():
            stack.callback(reward.close)
            units = [[number] for number in range(len(inputs))]
            for unit in edits.values() if reward.scores_groups() else units:
                call = loop.submit(scores(reward, [inputs[number] for number in unit]))
                for index, number in enumerate(unit):
                    calls[number][name] = call, index
        with counted("pictures", len(calls)) as progress:
            for of_name in calls:
                yield {name: call.result()[index] for name, (call, index) in of_name.items()}
                progress.step()


def _lines(row: Mapping[str, Any]) -> Iterator[str]:
    """A picture's grades for a terminal of 80 columns."""
    yield f"{row['image']}: {escaped(row['instruction'], MAX_SHOWN_CHARS)}"
    for name, output in row["rewards"].items():
        numbers = ", ".join(f"{part} {value:.4g}" for part, value in output["parts"].items())
        graded = f"not graded, {output['failure']}"
        if output["value"] is not None:
            graded = f"{output['value']:.3f}  {numbers}"
        text = f"{name}: {escaped(graded, MAX_SHOWN_CHARS)}"
        yield printing.folded(text, "  ", 4)
        for reply in output["replies"]:
            text = f"reply: {escaped(reply, MAX_SHOWN_CHARS)}"
            yield printing.folded(text, "    ", 6)
    yield "  reward: none" if row["reward"] is None else f"  reward: {row['reward']:.3f}"


def _parser() -> printing.Parser:
    parser = printing.Parser("rl score", f"{__doc__}{printing.KEY_VALUE}")
    add = parser.add_argument
    add("config", help="a Jsonnet file")
    add("picture", nargs="+", metavar="picture|key=value", help="results to grade; changes of keys")
    add("--source", type=Path, nargs="+", default=[], help="what was edited, in order")
    add("--instruction", help="what was asked for")
    add("--words", help="what the picture was drawn from; default: the instruction")
    add("--target", type=Path, help="a reference edit")
    add("--out", type=Path, metavar="FILE", help="append a line of JSON for each picture")
    add("--device", default="auto", help="of a reward's model; default: CUDA, else the CPU")
    return parser


if __name__ == "__main__":
    sys.exit(main())
