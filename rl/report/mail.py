"""Writes `<run>/report/report.html`: the page as one file of at most 5 MB."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup
from PIL.Image import DecompressionBombError

from rl.files.atomic import write_atomically
from rl.files.images import open_picture
from rl.report.folder import to_oneself
from rl.report.page import rendered
from rl.report.pages import CHUNK, Made, call, literal, value_of
from rl.report.reading import picture_of

MAX_BYTES = 5_000_000
_TABLES = 0.4
"""Share of the available bytes that data pages may take; pictures get the rest."""
_AROUND = 30
"""Bytes of markup around a page, or a picture."""
_SIDE_PX = 160
_QUALITY = 70


def write_single_file(run_dir: Path, made: Made, other: Path | None = None) -> str:
    """Write the file from the existing data pages. Returns a message for the user."""
    folder = run_dir / "report"
    with to_oneself(folder):
        page, told = _page(run_dir, made, other)
        write_atomically(folder / "report.html", page)
    size = f"{len(page.encode()) / 1e6:.1f} MB"
    return f"one file: {folder / 'report.html'} ({size}, {told})"


def _page(run_dir: Path, made: Made, other: Path | None) -> tuple[str, str]:
    """(HTML with the newest iterations that fit, a note on how many pictures it holds)."""
    folder = run_dir / "report" / "data"
    smallest = len(rendered(run_dir, made, other, [Markup()], "x" * 400).encode())
    room = MAX_BYTES - smallest - 20_000
    tables = int(room * _TABLES)
    inside: dict[str, Any] = {}
    wanted: dict[str, None] = {}
    """Pictures, as the page names them from its own folder."""
    for iteration, _ in [*made.evaluations[:1], *made.evaluations[1:][-1:]]:
        pages = _pages(folder, f"eval_{iteration:06d}")
        if (size := _size(pages)) <= tables:
            tables, room = tables - size, room - size
            inside |= pages
            wanted |= dict.fromkeys(_pictures(pages, f"../evaluation/it_{iteration:06d}/"))
    shown = []
    for iteration, _ in reversed(made.iterations):
        pages = _pages(folder, f"it_{iteration:06d}")
        if (size := _size(pages)) > tables:
            break
        tables, room = tables - size, room - size
        inside |= pages
        wanted |= dict.fromkeys(_pictures(pages, "../"))
        shown.append(iteration)
    for name in sorted({f"find_{iteration // CHUNK:06d}" for iteration in shown}):
        rows = _read(folder, name).items()
        found = {name: {it: row for it, row in rows if int(it) in shown}}
        if (size := _size(found)) <= room:
            room -= size
            inside |= found
    pictures: dict[str, str] = {}
    for source in wanted:
        # Those of another run are not asked for.
        there = picture_of(run_dir, source.removeprefix("../"))
        drawn = thumbnail(run_dir / there) if there else None
        if drawn is not None and (size := len(drawn) + len(source) + _AROUND) <= room:
            room -= size
            pictures[source] = drawn
    left_out = len(wanted) - len(pictures)
    note = (
        "One file, for a mail: it holds the first and the last of "
        f"{len(made.evaluations)} held-out evaluations, {len(shown)} of {len(made.iterations)} "
        f"training iterations, and {len(pictures)} thumbnails; {left_out} pictures of what it "
        "shows were left out for want of room. The report beside the run has everything."
    )
    scripts = [call(name, value) for name, value in inside.items()]
    scripts.append(f"page.pictures = {literal(pictures)};")
    # Our own scripts; `literal` has escaped what they hold.
    page = rendered(run_dir, made, other, list(map(Markup, scripts)), note)  # nosec B704
    return page, f"{len(pictures)} thumbnails inside, {left_out} pictures left out"


def _pages(folder: Path, name: str) -> dict[str, Any]:
    """The data page `name` and those that its rows go on in."""
    first = _read(folder, name)
    others = [f"{name}_{number}" for number in range(2, len(first["starts"]) + 1)]
    return {name: first, **{other: _read(folder, other) for other in others}}


def _read(folder: Path, name: str) -> Any:
    return value_of((folder / f"{name}.js").read_text("utf-8"))


def _size(pages: Mapping[str, Any]) -> int:
    """In bytes."""
    return sum(len(call(name, value).encode()) + _AROUND for name, value in pages.items())


def _pictures(pages: Mapping[str, Any], base: str) -> Iterator[str]:
    """Picture paths of groups or held-out samples; `base`: the folder they are relative to."""
    for page in pages.values():
        for row in page["rows"]:
            files = [row["src"], *row.get("others", []), row.get("goal")]
            files += [member["img"] for member in row.get("of", [row])]
            yield from (f"{base}{file}" for file in (*files, row.get("bimg")) if file)
            if row.get("simg"):
                yield f"../stock/{row['simg']}"


def thumbnail(path: Path) -> str | None:
    """A picture as a `data:` address; None for one that cannot be read."""
    try:
        with open_picture(path) as image:
            small = image.convert("RGB")
            small.thumbnail((_SIDE_PX, _SIDE_PX))
    except (OSError, ValueError, DecompressionBombError):
        return None
    written = io.BytesIO()
    small.save(written, "WEBP", quality=_QUALITY)
    return "data:image/webp;base64," + base64.b64encode(written.getvalue()).decode()
