"""Edit sets as Emu3's codes: `rl prepare tokenize ...`.

    rl prepare tokenize --dataset-name owner/edits --split train \\
        --original-image-key source --edited-image-key edited --edit-instruction-key instruction \\
        --output-path data/mine/train --num-workers 4

Reads a hub set, parquet, JSONL, ... and encodes both pictures of every row: `<output>/feature/`
gets one file per edit and `<output>/list/tokenized_datalist.json` names them.

Every file appears whole or not at all, and belongs to one worker; the list is written once, at the
end, by one process. So a run that was killed is simply started again: what is done is kept.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import numpy as np

from rl.api.data import RowRules
from rl.api.types import Sample
from rl.commands.edit_shards import (
    LIST,
    CannotPrepare,
    Edit,
    Maker,
    continue_only_the_same,
    locked,
    make_all,
)
from rl.data import edit_jsonl, hf_dataset
from rl.data.emu3_tokens.files import TokenisedEdit
from rl.data.shared.rows import BadRowError, Columns, Rows
from rl.files.model_files import model_problems
from rl.record import terminal
from rl.renderers.emu3_vq.plug import Config as VqConfig
from rl.renderers.emu3_vq.plug import Emu3Vq

if TYPE_CHECKING:
    from rl.renderers.emu3_vq.codec import Emu3Codec

ROW_RULES = RowRules(
    max_image_side_px=16384,
    max_pictures=1,
    pictures_remedy="EARL's models read one: give fewer, or leave the row out",
)
"""Longer pictures are refused, as damaged or absurd."""

_BOX = re.compile(r"\[" + ",".join([r"\s*(-?\d+(?:\.\d+)?)\s*"] * 4) + r"\]")


@dataclass(frozen=True)
class Tokenising:
    """What decides the codes; a started output folder is only ever continued with the same."""

    dataset_name: str
    split: str
    original_image_key: str
    edited_image_key: str
    edit_instruction_key: str
    id_key: str
    cot_keys: list[str]
    image_area: int
    model_path: str
    revision: str | None
    dtype: str


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when the list is written; 1 with a message when it cannot be."""
    terminal.guard()
    options = parse(arguments)
    try:
        with locked(options.output_path):
            num_done, skipped = run_tokenize(options)
    except (CannotPrepare, BadRowError) as error:
        print(f"rl prepare: {error}", file=sys.stderr)
        return 1
    for reason in skipped[:10]:
        print(f"left out: {reason}")
    print(f"{options.output_path / 'list' / LIST}: {num_done} edits, {len(skipped)} left out")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; the keys are named as EARL's own script names them."""
    parser = argparse.ArgumentParser("rl prepare", description=(__doc__ or "").partition("\n")[0])
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    add = parser.add_argument
    add("task", choices=["tokenize"], help="pictures to codes")
    add("--dataset-name", required=True, help="hub id, or a parquet, JSONL, ... file or folder")
    add("--split", default="train")
    add("--original-image-key", default="image", help="column of the source picture")
    add("--edited-image-key", default="target_image", help="column of the edited picture")
    add("--edit-instruction-key", default="instruction", help="column of the user's words")
    add("--id-key", default="", help="column that names a row; '' = its number")
    add("--CoT-keys", dest="cot_keys", nargs="+", default=[], help="columns of written reasoning")
    add("--image-area", type=positive, default=256 * 256, help="of a picture before coding, px^2")
    add("--model-path", default="BAAI/Emu3-VisionTokenizer", help="the tokenizer: id or folder")
    add("--revision", default=None, help="of --model-path on the hub")
    add("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    add("--device", default="auto", help="auto = every GPU in turn, or the CPU")
    add("--batch-size", type=positive, default=8, help="pictures encoded together")
    add("--output-path", type=Path, required=True)
    add("--num-workers", type=positive, default=1, help="processes")
    add("--on-bad-row", default="error", choices=["error", "skip"])
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} given, must be >= 1")
    return value


def run_tokenize(options: argparse.Namespace) -> tuple[int, list[str]]:
    names = Tokenising.__dataclass_fields__
    task = Tokenising(**{name: getattr(options, name) for name in names})
    tokenizer = VqConfig(model_path=task.model_path, revision=task.revision)
    for problem in model_problems(Emu3Vq.models(tokenizer)):
        raise CannotPrepare(problem.replace("model_path", "--model-path", 1))
    rows = open_rows(task)
    continue_only_the_same(options.output_path, asdict(task))
    names_of_rows = row_names(task, len(rows), options.on_bad_row)
    edits = [Edit(number, name) for number, name in names_of_rows if name is not None]
    places = worker_places(options.device, options.num_workers)
    makers = [partial(make_tokeniser, task, options.batch_size, place) for place in places]
    num_done, skipped = make_all(
        options.output_path, edits, makers, options.batch_size, options.on_bad_row
    )
    unnamed = [f"row {n}: no usable instruction or id" for n, name in names_of_rows if name is None]
    return num_done, unnamed + skipped


def open_rows(task: Tokenising, with_pictures: bool = True) -> Rows:
    keys = {"instruction": task.edit_instruction_key, "source": "", "target": "", "category": ""}
    if task.id_key:
        keys["id"] = task.id_key
    if with_pictures:
        keys |= {"source": task.original_image_key, "target": task.edited_image_key}
    thoughts = task.cot_keys if with_pictures else []
    columns = Columns.model_validate(
        {**keys, "hidden": {key: key for key in thoughts}, "hidden_optional": True}
    )
    if task.dataset_name.endswith(".jsonl"):
        config = edit_jsonl.Config(type="edit_jsonl", path=task.dataset_name, columns=columns)
        rows, unreadable = edit_jsonl.EditJsonl.read(config, ROW_RULES)
    else:
        section = hf_dataset.Config(
            type="hf_dataset", path=task.dataset_name, split=task.split, columns=columns
        )
        rows, unreadable = hf_dataset.HfDataset.read(section, ROW_RULES)
    if unreadable:
        raise CannotPrepare(unreadable[0])
    return rows


def row_names(task: Tokenising, num_rows: int, on_bad_row: str) -> list[tuple[int, str | None]]:
    """(row number, its file's name); None where the row has no usable text. Reads text alone."""
    if not task.id_key:
        return [(number, f"{number:08d}") for number in range(num_rows)]
    rows = open_rows(task, with_pictures=False)
    names: list[tuple[int, str | None]] = []
    for number in range(num_rows):
        try:
            names.append((number, quote(rows[number].id, safe="")))
        except BadRowError:
            if on_bad_row == "error":
                raise
            names.append((number, None))
    owners: dict[str, int] = {}
    for number, name in names:
        if name is not None and (owner := owners.setdefault(name, number)) != number:
            raise CannotPrepare(
                f"--id-key {task.id_key}: not unique; leave it out, or name another column "
                f"({name!r} is row {owner} and row {number})"
            )
    return names


def worker_places(device: str, num_workers: int) -> list[str]:
    import torch

    num_gpus = torch.cuda.device_count() if device == "auto" else 0
    named = "cpu" if device == "auto" else device
    return [f"cuda:{k % num_gpus}" if num_gpus else named for k in range(num_workers)]


def make_tokeniser(task: Tokenising, batch_size: int, device: str) -> Maker:
    import torch

    from rl.renderers.emu3_vq.codec import load_codec

    if device == "cpu":
        torch.set_num_threads(1)
    rows = open_rows(task)
    codec = load_codec(task.model_path, task.revision, task.dtype, device)
    return partial(tokenise, task, rows, codec, batch_size)


def tokenise(
    task: Tokenising, rows: Rows, codec: Emu3Codec, batch_size: int, edits: Sequence[Edit]
) -> list[TokenisedEdit | str]:
    outcomes: list[Sample | str] = []
    for edit in edits:
        try:
            outcomes.append(rows[edit.number])
        except BadRowError as error:
            outcomes.append(str(error))
    samples = [sample for sample in outcomes if not isinstance(sample, str)]
    pictures = [p for s in samples for p in (s.source, s.target) if p is not None]
    assert len(pictures) == 2 * len(samples), "both columns are required of every row"
    codes = iter(codec.encode(pictures, task.image_area, batch_size))
    return [
        outcome
        if isinstance(outcome, str)
        else tokenised(task, edit, outcome, (next(codes), next(codes)), codec.patch_px)
        for edit, outcome in zip(edits, outcomes, strict=True)
    ]


def tokenised(
    task: Tokenising,
    edit: Edit,
    sample: Sample,
    codes: tuple[np.ndarray, np.ndarray],
    patch_px: int,
) -> TokenisedEdit:
    """`codes`: of source and target."""
    assert sample.source is not None
    height, width = codes[0].shape
    scale = (width * patch_px / sample.source.width, height * patch_px / sample.source.height)
    texts = {key: sample.hidden[key] for key in task.cot_keys}
    return TokenisedEdit(
        id=sample.id if task.id_key else edit.name,
        instruction=sample.instruction,
        source_codes=codes[0],
        target_codes=codes[1],
        thoughts={
            key: with_scaled_boxes(text, scale)
            for key, text in texts.items()
            if isinstance(text, str) and text.strip()
        },
    )


def with_scaled_boxes(text: str, scale: tuple[float, float]) -> str:
    """Boxes `[x1, y1, x2, y2]`, px of the original, in px of the coded picture (rounded)."""

    def scaled(box: re.Match[str]) -> str:
        pairs = zip(box.groups(), scale * 2, strict=True)
        return str([round(float(side) * factor) for side, factor in pairs])

    return _BOX.sub(scaled, text)


if __name__ == "__main__":
    sys.exit(main())
