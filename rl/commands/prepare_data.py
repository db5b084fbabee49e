"""Encodes the pictures of an edit set as Emu3's codes: `rl prepare tokenize ...`.

    rl prepare tokenize --dataset-name owner/edits --split train \\
        --original-image-key source --edited-image-key edited --edit-instruction-key instruction \\
        --output-path data/mine/train --num-workers 4

Reads a hub set, parquet, JSONL, ... and writes one file per edit into `<output>/feature/`, then
`<output>/list/tokenized_datalist.json`, which names them. The same command continues a run that was
killed: it encodes only the edits whose files are missing.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rl.api.data import RowRules
from rl.commands.edit import at_least_one
from rl.console.progress import counted
from rl.data import hf_dataset
from rl.data.emu3_tokens.token_files import SUFFIX, TokenisedEdit, write
from rl.data.shared.sample_rows import BadRowError, Columns, Rows
from rl.files.atomic import write_atomically
from rl.files.model_files import model_problems
from rl.ranks.signals import die_with_parent
from rl.renderers.emu3_vq.emu3_vq import Config as VqConfig
from rl.renderers.emu3_vq.emu3_vq import Emu3Vq
from rl.text import terminal

MAX_IMAGE_SIDE_PX = 16384
_BOX = re.compile(r"\[" + ",".join([r"\s*(-?\d+(?:\.\d+)?)\s*"] * 4) + r"\]")
_worker: tuple[argparse.Namespace, Rows, Any]
"""In a worker process: (options, rows, Emu3Codec)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 when the list is written; 1 with a message when it cannot be."""
    terminal.guard()
    options = parse(arguments)
    try:
        num_done, num_skipped, bad = run_tokenize(options)
    except (ValueError, BrokenProcessPool) as error:
        print(
            f"rl prepare: {error}\nFinished edits are kept: the same command continues",
            file=sys.stderr,
        )
        return 1
    for reason in bad[:10]:
        print(f"left out: {reason}")
    file = list_of(options.output_path)
    print(f"{file}: {num_done} edits, {num_skipped + len(bad)} left out")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; the keys have the names of EARL's own script."""
    parser = argparse.ArgumentParser("rl prepare", description=(__doc__ or "").partition("\n")[0])
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    add = parser.add_argument
    add("task", choices=["tokenize"], help="pictures to codes")
    add("--output-path", type=Path, required=True)
    add("--device", default="auto", help="auto = every GPU in turn, or the CPU")
    add("--batch-size", type=at_least_one, default=8, help="pictures encoded together")
    add("--num-workers", type=at_least_one, default=1, help="processes")
    add("--on-bad-row", default="error", choices=["error", "skip"])
    # A folder is continued only with the same values of what follows.
    codes = parser.add_argument_group("what decides the codes")
    add = codes.add_argument
    add("--dataset-name", required=True, help="hub id, or a parquet, JSONL, ... file or folder")
    add("--split", default="train")
    add("--original-image-key", default="image", help="column of the source picture")
    add("--edited-image-key", default="target_image", help="column of the edited picture")
    add("--edit-instruction-key", default="instruction", help="column of the user's words")
    add("--id-key", default="", help="column that names a row; '' = its number")
    add("--CoT-keys", dest="cot_keys", nargs="+", default=[], help="columns of written reasoning")
    add(
        "--image-area",
        type=at_least_one,
        default=256 * 256,
        help="of a picture before coding, px^2",
    )
    add("--model-path", default="BAAI/Emu3-VisionTokenizer", help="the tokenizer: id or folder")
    add("--revision", default=None, help="of --model-path on the hub")
    add("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    options = parser.parse_args(arguments)
    names = [action.dest for action in codes._group_actions]
    options.made_from = {name: getattr(options, name) for name in names}
    return options


def list_of(output: Path) -> Path:
    return output / "list" / "tokenized_datalist.json"


def run_tokenize(options: argparse.Namespace) -> tuple[int, int, list[str]]:
    """(edits in the list, bad rows, why other rows could not be encoded). Raises ValueError."""
    import torch

    tokenizer = VqConfig(model_path=options.model_path, revision=options.revision)
    for problem in model_problems(Emu3Vq.models(tokenizer)):
        raise ValueError(problem.replace("model_path", "--model-path", 1))
    rows = open_rows(options)
    continue_only_the_same(options.output_path, options.made_from)
    files = [file_of(options, rows, index) for index in range(len(rows))]
    missing = [index for index, file in enumerate(files) if not file.is_file()]
    size = options.batch_size
    batches = [missing[start : start + size] for start in range(0, len(missing), size)]
    num_gpus = torch.cuda.device_count() if options.device == "auto" else 0
    device = "cpu" if options.device == "auto" else options.device
    context = get_context("spawn")
    devices = context.SimpleQueue()
    for worker in range(options.num_workers):
        devices.put(f"cuda:{worker % num_gpus}" if num_gpus else device)
    bad: list[str] = []
    with (
        ProcessPoolExecutor(options.num_workers, context, begin, (options, devices)) as pool,
        counted("edits", len(missing)) as progress,
    ):
        for batch, bad_of_batch in zip(batches, pool.map(work, batches), strict=True):
            bad += bad_of_batch
            progress.step(len(batch))
    entries = [file.name for file in files if file.is_file()]
    if not entries:
        raise ValueError(f"no row is left, e.g. {bad[0]}")
    content = {"prefix": str((options.output_path / "feature").resolve()), "path_list": entries}
    write_atomically(list_of(options.output_path), json.dumps(content))
    return len(entries), rows.num_skipped, bad


def open_rows(options: argparse.Namespace) -> Rows:
    """The rows of the set; raises BadRowError for bad ones, or leaves them out."""
    columns = Columns(
        instruction=options.edit_instruction_key,
        source=options.original_image_key,
        target=options.edited_image_key,
        id=options.id_key,
        category="",
        hidden={key: key for key in options.cot_keys},
        hidden_optional=True,
    )
    config = hf_dataset.Config(
        type="hf_dataset",
        path=options.dataset_name,
        split=options.split,
        columns=columns,
        picture_check="exists",
    )
    remedy = "EARL's models read one: give fewer, or leave the row out"
    rules = RowRules(options.on_bad_row, MAX_IMAGE_SIDE_PX, 1, remedy)
    rows = hf_dataset.HfDataset.read(config, rules)
    try:
        rows.keep_good()
    except BadRowError as error:
        message = str(error).replace("data.on_bad_row: 'skip'", "--on-bad-row skip")
        raise ValueError(message) from error
    return rows


def continue_only_the_same(output: Path, made_from: dict[str, Any]) -> None:
    """Raises ValueError where the folder holds edits that were encoded with other options."""
    file = output / "list" / "made_from.json"
    feature = output / "feature"
    feature.mkdir(parents=True, exist_ok=True)
    if file.is_file():
        before = json.loads(file.read_text())
        for key in {**made_from, **before}:
            if made_from.get(key) != before.get(key):
                raise ValueError(
                    f"{output} was begun with {key} {before.get(key)!r}, not "
                    f"{made_from.get(key)!r}; use the same, or choose another --output-path"
                )
    elif any(feature.iterdir()):
        raise ValueError(f"{output} holds another set; choose another --output-path")
    write_atomically(file, json.dumps(made_from, indent=2))


def file_of(options: argparse.Namespace, rows: Rows, index: int) -> Path:
    number = f"{rows.number_of(index):08d}"
    name = quote(rows.id_of(index), safe="") if options.id_key else number
    return Path(options.output_path / "feature" / (name + SUFFIX))


def begin(options: argparse.Namespace, devices: Any) -> None:
    """In a worker: opens the set and the tokenizer, on the next of `devices`."""
    global _worker
    import torch

    from rl.renderers.emu3_vq.codec import load_codec

    die_with_parent()
    device = devices.get()
    if device == "cpu":
        torch.set_num_threads(1)
    codec = load_codec(options.model_path, options.revision, options.dtype, device)
    _worker = options, open_rows(options), codec


def work(indices: Sequence[int]) -> list[str]:
    """In a worker: encodes and writes these rows; returns why some of them could not be."""
    options, rows, codec = _worker
    samples, bad = {}, []
    for index in indices:
        try:
            samples[index] = rows[index]
        except BadRowError as error:
            if options.on_bad_row == "error":
                raise ValueError(f"{error}\nFix it, or add --on-bad-row skip") from error
            bad.append(str(error))
    pictures = [p for sample in samples.values() for p in (sample.source, sample.target)]
    codes = iter(codec.encode(pictures, options.image_area, options.batch_size))
    for index, sample in samples.items():
        source_codes, target_codes = next(codes), next(codes)
        assert sample.source is not None
        (height, width), (width_px, height_px) = source_codes.shape, sample.source.size
        scale = (width * codec.patch_px / width_px, height * codec.patch_px / height_px)
        file = file_of(options, rows, index)
        thoughts = {
            key: with_scaled_boxes(text, scale)
            for key, text in sample.hidden.items()
            if isinstance(text, str) and text.strip()
        }
        identity = sample.id if options.id_key else file.stem
        write(
            file, TokenisedEdit(identity, sample.instruction, source_codes, target_codes, thoughts)
        )
    return bad


def with_scaled_boxes(text: str, scale: tuple[float, float]) -> str:
    """Boxes `[x1, y1, x2, y2]`, px of the original, in px of the coded picture (rounded)."""

    def scaled(box: re.Match[str]) -> str:
        pairs = zip(box.groups(), scale * 2, strict=True)
        return str([round(float(side) * factor) for side, factor in pairs])

    return _BOX.sub(scaled, text)


if __name__ == "__main__":
    sys.exit(main())
