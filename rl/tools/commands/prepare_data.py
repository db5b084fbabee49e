"""Encode the pictures of an edit data set as Emu3 codes, which EARL's configs train on.

rl prepare tokenize --dataset-name my/edits --output-path data/mine
rl prepare tokenize --dataset-name edits.jsonl --output-path x --id-key id
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from rl import printing
from rl.api.data import RowRules
from rl.data.emu3_tokens import SUFFIX, TokenisedEdit, write
from rl.data.rows import BadRowError, Columns
from rl.data.sources import HfDataset, HfDatasetConfig
from rl.files import read_object, write_atomically
from rl.model_files import model_problems
from rl.progress import counted
from rl.renderers.emu3_vq import Config as VqConfig
from rl.renderers.emu3_vq import Emu3Vq
from rl.tools.commands.edit import at_least_one
from rl.tools.trained import pick_device

if TYPE_CHECKING:
    from rl.renderers.emu3_vq_loop import Emu3Codec

MAX_IMAGE_SIDE_PX = 16384
_BOX = re.compile(r"\[" + ",".join([r"\s*(-?\d+(?:\.\d+)?)\s*"] * 4) + r"\]")


@printing.program
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 if all edits are encoded and listed, 1 with a message if not; then the same
    command continues."""
    tokenize(parse(arguments))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; option names are those of the script in EARL's repository."""
    parser = printing.Parser("rl prepare", __doc__)
    add = parser.add_argument
    add("task", choices=["tokenize"], metavar="tokenize", help="pictures to codes")
    add("--output-path", type=Path, required=True)
    add("--device", default="auto", help="auto = the GPU, or the CPU")
    add("--batch-size", type=at_least_one, default=8, help="pictures encoded together")
    add("--on-bad-row", default="error", choices=["error", "skip"])
    # An output folder can be continued only with the same values of these options.
    codes = parser.add_argument_group("options that determine the codes")
    add = codes.add_argument
    add("--dataset-name", required=True, help="hub id, or a parquet, JSONL, ... file or folder")
    add("--split", default="train")
    add("--original-image-key", default="image", help="column of the source picture")
    add("--edited-image-key", default="target_image", help="column of the edited picture")
    add("--edit-instruction-key", default="instruction", help="column of the user's words")
    add("--id-key", default="", help="column with a row's id; '' = the row's number")
    add("--CoT-keys", dest="cot_keys", nargs="+", default=[], help="columns with reasoning text")
    add(
        "--image-area",
        type=at_least_one,
        default=256 * 256,
        help="area each picture is scaled to, px^2",
    )
    add("--model-path", default="BAAI/Emu3-VisionTokenizer", help="the tokenizer: id or folder")
    add("--revision", default=None, help="of --model-path on the hub")
    add("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    options = parser.parse_args(arguments)
    names = [action.dest for action in codes._group_actions]
    options.made_from = {name: getattr(options, name) for name in names}
    return options


def tokenize(options: argparse.Namespace) -> None:
    """Encode each edit into a file in `<output>/feature/` (existing files are kept), then list all
    in `<output>/list/tokenized_datalist.json`. Raises ValueError."""
    from rl.renderers.emu3_vq_loop import load_codec

    tokenizer = VqConfig(model_path=options.model_path, revision=options.revision)
    for problem in model_problems(Emu3Vq.models(tokenizer)):
        raise ValueError(problem.replace("model_path", "--model-path", 1))
    rows = open_rows(options)
    feature_dir, list_dir = options.output_path / "feature", options.output_path / "list"
    open_output(feature_dir, list_dir / "made_from.json", options.made_from)
    numbers = range(len(rows))
    names = [f"{rows.number_of(index):08d}" for index in numbers]
    if options.id_key:
        names = [quote(rows.id_of(index), safe="") for index in numbers]
    files = [feature_dir / f"{name}{SUFFIX}" for name in names]
    missing = [index for index, file in enumerate(files) if not file.is_file()]
    device = pick_device(options.device)
    codec = load_codec(options.model_path, options.revision, options.dtype, device)
    reasons: list[str] = []
    with counted("edits", len(missing)) as progress:
        for start in range(0, len(missing), options.batch_size):
            batch = missing[start : start + options.batch_size]
            reasons += encode(options, rows, codec, {index: files[index] for index in batch})
            progress.step(len(batch))
    for reason in [*rows.findings.left_out, *reasons][:10]:
        print(f"left out: {reason}")
    entries = [file.name for file in files if file.is_file()]
    if not entries:
        raise ValueError(f"no row is left, e.g. {reasons[0]}")
    content = {"prefix": str(feature_dir.resolve()), "path_list": entries}
    write_atomically(list_dir / "tokenized_datalist.json", json.dumps(content))
    num_left_out = rows.num_skipped + len(reasons)
    print(f"{list_dir / 'tokenized_datalist.json'}: {len(entries)} edits, {num_left_out} left out")


def open_rows(options: argparse.Namespace) -> HfDataset:
    """The rows of the data set; a bad row raises ValueError, or is left out (--on-bad-row)."""
    columns = Columns(
        instruction=options.edit_instruction_key,
        source=options.original_image_key,
        target=options.edited_image_key,
        id=options.id_key,
        category="",
        hidden={key: key for key in options.cot_keys},
        hidden_optional=True,
    )
    config = HfDatasetConfig(
        type="hf_dataset", path=options.dataset_name, split=options.split, columns=columns
    )
    rules = RowRules(options.on_bad_row, MAX_IMAGE_SIDE_PX, max_pictures=1)
    try:
        return HfDataset(config, rules)
    except BadRowError as error:
        message = str(error).replace("data.on_bad_row: 'skip'", "--on-bad-row skip")
        raise ValueError(message) from error


def open_output(feature: Path, option_file: Path, made_from: Mapping[str, object]) -> None:
    """Create the folder and record the options. Raises ValueError if it holds edits that were
    encoded with other options, or files without recorded options."""
    feature.mkdir(parents=True, exist_ok=True)
    before = read_object(option_file) if option_file.exists() else None
    if before is None and any(feature.iterdir()):
        raise ValueError(f"{feature} holds other files; choose another --output-path")
    if before not in (None, made_from):
        raise ValueError(
            f"{feature.parent} was begun with other options: {before}, now {dict(made_from)}; use "
            "the same, or choose another --output-path"
        )
    write_atomically(option_file, json.dumps(made_from, indent=2))


def encode(
    options: argparse.Namespace, rows: HfDataset, codec: Emu3Codec, files: Mapping[int, Path]
) -> list[str]:
    """Encode the rows and write each to its file; returns a reason for each row left out."""
    samples, reasons = {}, []
    for index in files:
        try:
            samples[index] = rows[index]
        except BadRowError as error:
            if options.on_bad_row == "error":
                raise ValueError(f"{error}\nFix it, or add --on-bad-row skip") from error
            reasons.append(str(error))
    pictures = [p for s in samples.values() for p in (s.source, s.target) if p is not None]
    codes = iter(codec.encode(pictures, options.image_area, options.batch_size))
    for index, sample in samples.items():
        source_codes, target_codes = next(codes), next(codes)
        assert sample.source is not None
        (height, width), (width_px, height_px) = source_codes.shape, sample.source.size
        scale = (width * codec.patch_px / width_px, height * codec.patch_px / height_px)
        thoughts = {
            key: with_scaled_boxes(text, scale)
            for key, text in sample.hidden.items()
            if isinstance(text, str) and text.strip()
        }
        identity = sample.id if options.id_key else files[index].stem
        edit = TokenisedEdit(identity, sample.instruction, source_codes, target_codes, thoughts)
        write(files[index], edit)
    return reasons


def with_scaled_boxes(text: str, scale: tuple[float, float]) -> str:
    """`text` with its boxes `[x1, y1, x2, y2]` in px of the encoded picture, rounded. `scale`:
    (factor of x, factor of y) from the source picture to the encoded one."""

    def scaled(box: re.Match[str]) -> str:
        pairs = zip(box.groups(), scale * 2, strict=True)
        return str([round(float(side) * factor) for side, factor in pairs])

    return _BOX.sub(scaled, text)


if __name__ == "__main__":
    sys.exit(main())
