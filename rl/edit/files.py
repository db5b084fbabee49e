"""Pictures from where users keep them, and what was made of them where they find it.

edits/photo.png          the edited picture
edits/photo_sheet.png    the sources, the edit, and what was drawn beside it
edits/photo.json         the words, and everything that made the picture
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Any

from rl.config.paths import not_a_file
from rl.data.shared.jsonl import read_lines, read_rows
from rl.edit.editor import Arm, Editor, EditRequest, EditResult
from rl.files.atomic import write_atomically
from rl.files.images import png_bytes
from rl.record.scrub import scrubbed

PICTURES = frozenset(
    (".avif", ".bmp", ".gif", ".heic", ".heif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
)
"""Endings of what is taken from a folder."""
MAX_NAME_CHARS = 60
PACKAGES = ("vlm-edit-rl", "torch", "transformers", "diffusers", "peft")


def requests_of(paths: Sequence[Path], instruction: str | None) -> list[EditRequest]:
    """What a user asks for: one edit of a picture or of several together, one of each of a folder's
    pictures, a JSONL file's rows, or words alone.

    A row is `{"image": "photo.jpg", "instruction": "make the sky red"}`, or has `"images": [...]`;
    its paths count from the file's folder, and `instruction` stands for the one that it lacks.

    Raises ValueError, naming the file or row.
    """
    if not paths:
        if instruction is None:
            raise ValueError("nothing to do: give a picture and an instruction, or a .jsonl file")
        return [EditRequest(instruction)]
    if len(paths) > 1:
        return [_together(paths, instruction)]
    [path] = paths
    if path.suffix == ".jsonl":
        return _rows(path, instruction)
    if instruction is None:
        raise ValueError(f"{path}: say what to do with it: rl edit --run RUN {path} 'your words'")
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in PICTURES)
        if not files:
            raise ValueError(f"{path} holds no picture ({', '.join(sorted(PICTURES))})")
        return [EditRequest(instruction, file) for file in files]
    if why := not_a_file(path):
        raise ValueError(f"{path} {why}; paths count from {Path.cwd()}")
    return [EditRequest(instruction, path)]


def _together(paths: Sequence[Path], instruction: str | None) -> EditRequest:
    is_picture = instruction is not None and Path(instruction).suffix.lower() in PICTURES
    if instruction is None or (is_picture and not not_a_file(instruction)):
        raise ValueError(
            "say what to do with these pictures: the instruction comes last, in quotes"
        )
    for path in paths:
        if why := not_a_file(path):
            raise ValueError(
                f"{path} {why}; several arguments are the pictures of one edit, and the last is "
                "the instruction, in quotes"
            )
    return EditRequest(instruction, tuple(paths))


def _rows(path: Path, instruction: str | None) -> list[EditRequest]:
    rows, numbers, problems = read_rows(read_lines(path), str(path))
    asked = []
    for number, row in zip(numbers, rows, strict=True):
        words = row.get("instruction", instruction)
        image, images = row.get("image"), row.get("images")
        if not isinstance(words, str) or not words.strip():
            problems.append(f"{path}, row {number}: has no 'instruction'; write what to do")
        elif image is not None and images is not None:
            problems.append(
                f"{path}, row {number}: has both 'image' and 'images'; keep one of them"
            )
        elif image is not None and not isinstance(image, str):
            problems.append(f"{path}, row {number}: 'image' is {image!r:.60}; give a file's path")
        elif images is not None and not _are_paths(images):
            problems.append(
                f"{path}, row {number}: 'images' is {images!r:.60}; give a list of files' paths"
            )
        else:
            named = [image] if image is not None else images or []
            files = [path.parent / name for name in named]
            asked.append(EditRequest(words, files[0] if len(files) == 1 else files or None))
    if problems:
        raise ValueError("\n".join(problems))
    return asked


def _are_paths(found: object) -> bool:
    return isinstance(found, list) and all(isinstance(name, str) for name in found)


def free_stem(folder: Path, request: EditRequest) -> Path:
    """`<folder>/<name>` without an ending, of the pictures' names or else of the words, such that
    nothing bears it yet."""
    given = [Path(image).stem for image in request.images if isinstance(image, Path | str)]
    name = "-".join(given) or request.instruction
    name = re.sub(r"[^\w.-]+", "-", name).strip("-._")[:MAX_NAME_CHARS] or "edit"
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    endings = (".png", ".json", "_sheet.png")
    return next(
        folder / name
        for name in names
        if not any((folder / f"{name}{ending}").exists() for ending in endings)
    )


def save(editor: Editor, result: EditResult, stem: Path) -> list[Path]:
    """Write the picture, the sheet (where more than the picture was drawn) and the JSON; returns
    what was written, the JSON last."""
    from rl.edit.sheet import draw_sheet

    stem.parent.mkdir(parents=True, exist_ok=True)
    written: dict[str, Path] = {}
    if result.image is not None:
        written["picture"] = stem.with_name(f"{stem.name}.png")
        write_atomically(written["picture"], png_bytes(result.image))
        if result.arms:
            written["sheet"] = stem.with_name(f"{stem.name}_sheet.png")
            write_atomically(written["sheet"], draw_sheet(result, str(editor.trained or "")))
    files = {name: file.name for name, file in written.items()}
    note = stem.with_name(f"{stem.name}.json")
    text = json.dumps(scrubbed(as_json(editor, result, files)), indent=2, ensure_ascii=False)
    write_atomically(note, f"{text}\n")
    return [*written.values(), note]


def as_json(editor: Editor, result: EditResult, files: Mapping[str, str]) -> dict[str, Any]:
    """Everything that made a result; the same command makes it again."""
    config, ready = editor.config, editor.trained
    run = ready and {
        "folder": str(ready.run_dir),
        "checkpoint": ready.checkpoint.name,
        "iterations": ready.iterations,
        "held_out_reward": ready.held_out_reward,
    }
    return {
        "instruction": result.request.instruction,
        **_shown(result),
        "words": result.words,
        "thought": result.thought,
        "failure": result.failure,
        "files": dict(files),
        "drawn_size_px": result.image and result.image.size,
        "beside": {name: _arm(arm) for name, arm in result.arms.items()},
        "seed": result.seed,
        "noise_seed": result.noise_seed,
        "token_ids": list(result.token_ids),
        "finish": result.finish,
        "seconds": round(result.seconds, 3),
        "run": run,
        "sampling": {
            "temperature": config.evaluation.temperature,
            "top_k": config.evaluation.top_k,
            "max_completion_tokens": config.sampling.max_completion_tokens,
        },
        "policy": dict(config.policy),
        "renderer": dict(config.renderer),
        "device": editor.device,
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _shown(result: EditResult) -> dict[str, Any]:
    """Of the picture; `images` of several."""
    images = result.request.images or (None,)
    sources: Sequence[Any] = result.sources or [None] * len(images)
    sizes_px = result.original_sizes_px or [None] * len(images)
    told = [
        {
            "image": str(image) if isinstance(image, Path | str) else None,
            "image_size_px": size_px or (source and source.size),
            "shown_size_px": source and source.size,
        }
        for image, source, size_px in zip(images, sources, sizes_px, strict=True)
    ]
    return told[0] if len(told) == 1 else {"images": told}


def _arm(arm: Arm) -> dict[str, Any]:
    return {"words": arm.words, "failure": arm.failure}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # a clone that nobody installed
        return None


def sizes_said(result: EditResult) -> Sequence[str]:
    """What to tell of the pictures' sizes: that one was scaled, that the edit has another than the
    last of them, whose aspect an editor follows."""
    said = []
    several = len(result.sources) > 1
    pairs = zip(result.sources, result.original_sizes_px, strict=True)
    for number, (source, original_px) in enumerate(pairs, 1):
        if original_px:
            which = f"picture {number} " if several else ""
            said.append(f"{which}scaled from {_px(original_px)} to {_px(source.size)}")
    last = result.sources[-1] if result.sources else None
    if last and result.image and result.image.size != last.size:
        which = f"picture {len(result.sources)} is " if several else ""
        said.append(f"{which}{_px(last.size)}, drawn at {_px(result.image.size)}")
    return said


def _px(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]} px"
