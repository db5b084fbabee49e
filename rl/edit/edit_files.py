"""Reads the edits that a user asks for, and writes their pictures, sheets and JSON files."""

from __future__ import annotations

import io
import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from importlib.metadata import Distribution, version
from itertools import count, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field, model_validator

from rl import build
from rl.config.loading import not_a_file, printable, validate
from rl.config.schema import RunConfig
from rl.data.shared.rows import Lines, UnusableError
from rl.edit.editor import (
    OWN_WORDS,
    STOCK,
    UNTRAINED,
    Arm,
    Editor,
    EditRequest,
    EditResult,
    sample_of,
)
from rl.files import over_white, png_bytes, write_atomically
from rl.printing import scrubbed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from PIL.Image import Image

PICTURES = frozenset(
    (".avif", ".bmp", ".gif", ".heic", ".heif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
)
"""File name endings of the pictures that are taken from a folder."""
MAX_NAME_CHARS = 60
PACKAGES = ("vlm-edit-rl", "torch", "transformers", "diffusers", "peft")
PANEL_IN, WORDS_IN, TITLE_IN = 3.2, 0.9, 0.9
"""Side of a picture, height of the text below it, height of the title above the row, inches."""
DPI = 110
CRISP_BELOW_PX = 256
"""Pictures smaller than this are enlarged pixel by pixel."""
WORDS_CHARS, WORDS_LINES = 34, 4
"""Limits of the text below a picture."""
TRAINED = ""
TITLES = {
    UNTRAINED: "before training",
    TRAINED: "after training",
    OWN_WORDS: "your words as they are",
    STOCK: "the stock pipeline",
}
FONTS = ("DejaVu Sans", "Noto Sans CJK JP", "Noto Sans CJK SC", "WenQuanYi Zen Hei")
"""Matplotlib looks for each character in those of these fonts that are installed, in order."""


def requests_of(paths: Sequence[Path], instruction: str | None) -> list[EditRequest]:
    """The edits that a user asks for: one edit of one or several pictures, an edit of each picture
    in a folder, an edit per row of a JSONL file, or a picture drawn from an instruction alone.

    A row is `{"image": "photo.jpg", "instruction": "make the sky red"}`, or has `"images": [...]`;
    its paths are relative to the file's folder; a row without an instruction gets `instruction`.

    Raises ValueError, naming the file or row.
    """
    if not paths:
        if instruction is None:
            raise ValueError("nothing to do: give a picture and an instruction, or a .jsonl file")
        return [EditRequest(instruction)]
    [*_, path] = paths
    if len(paths) == 1 and path.suffix == ".jsonl":
        return _requests_in(path, instruction)
    is_picture = Path(instruction or "").suffix.lower() in PICTURES
    if instruction is None or (is_picture and not not_a_file(Path(instruction))):
        if len(paths) == 1 and instruction is not None and not_a_file(path):
            raise ValueError(f"the instruction comes last: {instruction} {str(path)!r}")
        raise ValueError(
            f"{path}: say what to do with it; the instruction comes last: rl edit --run RUN {path} "
            "'your words'"
        )
    if len(paths) == 1 and path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in PICTURES)
        if not files:
            raise ValueError(f"{path} holds no picture ({', '.join(sorted(PICTURES))})")
        return [EditRequest(instruction, file) for file in files]
    for path in paths:
        if why := not_a_file(path):
            raise ValueError(
                f"{path} {why}; paths start at {Path.cwd()}, and several arguments are the "
                "pictures of one edit, with the instruction last, in quotes"
            )
    return [EditRequest(instruction, tuple(paths))]


def unusable(requests: Sequence[EditRequest], config: RunConfig) -> dict[str, str]:
    """Name -> why the request cannot be edited with the run; nothing is loaded."""
    resolved = build.resolve(config)
    reasons = {}
    for number, request in enumerate(requests, 1):
        try:
            sample_of(request, build.row_rules(resolved), resolved.renderer.cls.needs_source)
        except ValueError as error:
            reasons[f"[{number}/{len(requests)}]"] = str(error)
    return reasons


def _requests_in(path: Path, instruction: str | None) -> list[EditRequest]:
    lines, requests, problems = Lines([path]), [], []
    for index, number in enumerate(lines.numbers):
        try:
            values = lines[index]
        except UnusableError as error:
            problems.append(f"{path}, row {number}: {error}")
            continue
        row, row_problems = validate(_Row, {"instruction": instruction, **values}, f"row {number}")
        problems += [f"{path}, {problem}" for problem in row_problems]
        if row is not None:
            images = [row.image] if row.image is not None else row.images or []
            requests.append(EditRequest(row.instruction, [path.parent / name for name in images]))
    if problems:
        raise ValueError("\n".join(problems))
    return requests


class _Row(BaseModel):
    """A line of a JSONL file of edits; other keys are ignored."""

    instruction: str = Field(pattern=r"\S")
    """What to do."""
    image: str | None = None
    """The path of a picture."""
    images: list[str] | None = None
    """The paths of several pictures."""

    @model_validator(mode="after")
    def _refuse_both_keys(self) -> _Row:
        if self.image is not None and self.images is not None:
            raise ValueError("has both 'image' and 'images'; keep one of them")
        return self


def free_stem(folder: Path, request: EditRequest) -> Path:
    """A path `<folder>/<name>`, without an extension, for which no output file exists yet; the name
    is made from the pictures' names or, if there is no picture, from the instruction."""
    stems = [Path(image).stem for image in request.images if isinstance(image, Path | str)]
    name = "-".join(stems) or request.instruction
    name = re.sub(r"[^\w.-]+", "-", name).strip("-._")[:MAX_NAME_CHARS] or "edit"
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    endings = (".png", ".json", "_sheet.png")
    return next(
        folder / name
        for name in names
        if not any((folder / f"{name}{ending}").exists() for ending in endings)
    )


def save(editor: Editor, result: EditResult, stem: Path) -> list[Path]:
    """Write picture, sheet (if arms were drawn) and JSON; returns their paths in this order."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    written: dict[str, Path] = {}
    if result.image is not None:
        written["picture"] = stem.with_name(f"{stem.name}.png")
        write_atomically(written["picture"], png_bytes(result.image))
        if result.arms:
            written["sheet"] = stem.with_name(f"{stem.name}_sheet.png")
            write_atomically(written["sheet"], draw_sheet(result, str(editor.trained or "")))
    files = {name: file.name for name, file in written.items()}
    json_file = stem.with_name(f"{stem.name}.json")
    text = json.dumps(scrubbed(as_json(editor, result, files)), indent=2, ensure_ascii=False)
    write_atomically(json_file, f"{text}\n")
    return [*written.values(), json_file]


def draw_sheet(result: EditResult, made_by: str) -> bytes:
    """PNG: the sources and the drawn pictures, each above its text. `made_by`: the run and how far
    it was trained."""
    import matplotlib

    matplotlib.rcdefaults()  # a `matplotlibrc` in the working folder could start LaTeX
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib import font_manager

    panels: list[tuple[Image | None, str, str | None]] = []
    for number, source in enumerate(result.sources, 1):
        title = "source" if len(result.sources) == 1 else f"source {number}"
        # The instruction is under the last source, next to the drawn pictures.
        text = result.request.instruction if number == len(result.sources) else None
        panels.append((source, title, text))
    edit = Arm(result.words, result.image, result.failure)
    for name, title in TITLES.items():
        arm = edit if name == TRAINED else result.arms.get(name)
        if arm is not None:
            panels.append((arm.image, title, arm.failure or arm.words))
    installed = {font.name for font in font_manager.fontManager.ttflist}
    fonts = [name for name in FONTS if name in installed]
    height_in = TITLE_IN + PANEL_IN + WORDS_IN
    with plt.rc_context({"font.family": fonts or ["sans-serif"]}):
        figure = plt.figure(figsize=(PANEL_IN * len(panels) + 0.4, height_in), dpi=DPI)
        grid = figure.add_gridspec(1, len(panels))
        top, bottom = 1 - TITLE_IN / height_in, WORDS_IN / height_in
        grid.update(left=0.02, right=0.98, top=top, bottom=bottom, wspace=0.06)
        for number, contents in enumerate(panels):
            _draw_panel(figure.add_subplot(grid[0, number]), *contents)
        figure.text(
            0.02,
            1 - 0.32 / height_in,
            printable(f"{made_by}, seed {result.seed}"),
            fontsize=11,
            color="0.35",
            parse_math=False,
        )
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        plt.close(figure)
    return buffer.getvalue()


def _draw_panel(axes: Axes, image: Image | None, title: str, text: str | None) -> None:
    axes.axis("off")
    axes.set_title(printable(title), fontsize=13)
    if image is not None:
        crisp = max(image.size) < CRISP_BELOW_PX
        axes.imshow(over_white(image), interpolation="nearest" if crisp else "antialiased")
    if text is not None:
        words = printable(text, keep="\n\t")
        lines = textwrap.wrap(words, WORDS_CHARS, max_lines=WORDS_LINES, placeholder=" ...")
        shown = "\n".join(lines) or "(no words)"
        place: Any = {"ha": "center", "va": "top", "transform": axes.transAxes}
        # A dollar sign in a user's instruction must not start a formula.
        axes.text(0.5, -0.04, shown, fontsize=11, parse_math=False, **place)


def as_json(editor: Editor, result: EditResult, files: Mapping[str, str]) -> dict[str, Any]:
    """All inputs and settings that determine a result, so that it can be reproduced."""
    config, trained = editor.config, editor.trained
    pictures = [
        {
            "image": str(image) if isinstance(image, Path | str) else None,
            "image_size_px": size_px or (source and source.size),
            "shown_size_px": source and source.size,
        }
        for image, source, size_px in zip_longest(
            result.request.images or [None], result.sources, result.original_sizes_px
        )
    ]
    return {
        "instruction": result.request.instruction,
        **(pictures[0] if len(pictures) == 1 else {"images": pictures}),
        "words": result.words,
        "thought": result.thought,
        "failure": result.failure,
        "files": dict(files),
        "drawn_size_px": result.image and result.image.size,
        "beside": {
            name: {"words": arm.words, "failure": arm.failure} for name, arm in result.arms.items()
        },
        "seed": result.seed,
        "noise_seed": result.noise_seed,
        "token_ids": list(result.token_ids),
        "finish": result.finish,
        "seconds": round(result.seconds, 3),
        "run": trained
        and {
            "folder": str(trained.run_dir or trained.model),
            "checkpoint": trained.model.parent.name,
            "iterations": trained.iterations,
            "held_out_reward": trained.held_out_reward,
        },
        "sampling": {
            "temperature": config.evaluation.temperature,
            "top_k": config.evaluation.top_k,
            "max_completion_tokens": config.sampling.max_completion_tokens,
        },
        "policy": dict(config.policy),
        "renderer": dict(config.renderer),
        "device": editor.device,
        "versions": {
            name: version(name) for name in PACKAGES if any(Distribution.discover(name=name))
        },
    }


def size_messages(result: EditResult) -> Sequence[str]:
    """Messages about each source that was scaled, and about an edit of another size than the last
    source (whose aspect ratio an editor follows)."""
    messages = []
    several = len(result.sources) > 1
    pairs = zip(result.sources, result.original_sizes_px, strict=True)
    for number, (source, original_px) in enumerate(pairs, 1):
        if original_px:
            subject = f"picture {number} " if several else ""
            messages.append(f"{subject}scaled from {_px(original_px)} to {_px(source.size)}")
    last = result.sources[-1] if result.sources else None
    if last and result.image and result.image.size != last.size:
        subject = f"picture {len(result.sources)} is " if several else ""
        messages.append(f"{subject}{_px(last.size)}, drawn at {_px(result.image.size)}")
    return messages


def _px(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]} px"
