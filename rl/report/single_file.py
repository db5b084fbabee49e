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
from rl.report.folder import locked
from rl.report.page import rendered
from rl.report.pages import CHUNK, PageIndex, call, literal, value_of
from rl.report.reading import picture_of

MAX_BYTES = 5_000_000
_TABLES = 0.4
"""Share of the available bytes that data pages may take; pictures get the rest."""
_AROUND = 30
"""Bytes of markup around a data page or a picture."""
_SIDE_PX = 160
_QUALITY = 70


def write_single_file(run_dir: Path, index: PageIndex, other: Path | None = None) -> str:
    """Write the file from the existing data pages. Returns a message for the user."""
    folder = run_dir / "report"
    with locked(folder):
        page, note = _page(run_dir, index, other)
        write_atomically(folder / "report.html", page)
    size = f"{len(page.encode()) / 1e6:.1f} MB"
    return f"one file: {folder / 'report.html'} ({size}, {note})"


def _page(run_dir: Path, index: PageIndex, other: Path | None) -> tuple[str, str]:
    """(HTML with the newest iterations that fit, a note on how many pictures it holds)."""
    folder = run_dir / "report" / "data"
    smallest = len(rendered(run_dir, index, other, [Markup()], "x" * 400).encode())
    free_bytes = MAX_BYTES - smallest - 20_000
    free_table_bytes = int(free_bytes * _TABLES)
    inside: dict[str, Any] = {}
    sources: dict[str, None] = {}
    """Pictures, by their paths relative to the page."""
    for iteration, _ in [*index.evaluations[:1], *index.evaluations[1:][-1:]]:
        pages = _pages(folder, f"eval_{iteration:06d}")
        if (size := _size(pages)) <= free_table_bytes:
            free_table_bytes, free_bytes = free_table_bytes - size, free_bytes - size
            inside |= pages
            sources |= dict.fromkeys(_pictures(pages, f"../evaluation/it_{iteration:06d}/"))
    iterations = []
    for iteration, _ in reversed(index.iterations):
        pages = _pages(folder, f"it_{iteration:06d}")
        if (size := _size(pages)) > free_table_bytes:
            break
        free_table_bytes, free_bytes = free_table_bytes - size, free_bytes - size
        inside |= pages
        sources |= dict.fromkeys(_pictures(pages, "../"))
        iterations.append(iteration)
    for name in sorted({f"find_{iteration // CHUNK:06d}" for iteration in iterations}):
        rows = _read(folder, name).items()
        finding_page = {name: {it: row for it, row in rows if int(it) in iterations}}
        if (size := _size(finding_page)) <= free_bytes:
            free_bytes -= size
            inside |= finding_page
    pictures: dict[str, str] = {}
    for source in sources:
        # `sources` has no pictures of the other run.
        file = picture_of(run_dir, source.removeprefix("../"))
        data_url = thumbnail(run_dir / file) if file else None
        if data_url is not None and (size := len(data_url) + len(source) + _AROUND) <= free_bytes:
            free_bytes -= size
            pictures[source] = data_url
    left_out = len(sources) - len(pictures)
    note = (
        "A single file, small enough for a mail: it holds the first and the last of "
        f"{len(index.evaluations)} held-out evaluations, {len(iterations)} of "
        f"{len(index.iterations)} training iterations, and {len(pictures)} thumbnails; {left_out} "
        "pictures of its samples did not fit. The report in the run folder has everything."
    )
    scripts = [call(name, value) for name, value in inside.items()]
    scripts.append(f"page.pictures = {literal(pictures)};")
    # Our own scripts, whose data `literal` has escaped.
    page = rendered(run_dir, index, other, list(map(Markup, scripts)), note)  # nosec B704
    return page, f"{len(pictures)} thumbnails inside, {left_out} pictures left out"


def _pages(folder: Path, name: str) -> dict[str, Any]:
    """The data page `name` and the pages that continue its rows."""
    first = _read(folder, name)
    others = [f"{name}_{number}" for number in range(2, len(first["starts"]) + 1)]
    return {name: first, **{other: _read(folder, other) for other in others}}


def _read(folder: Path, name: str) -> Any:
    return value_of((folder / f"{name}.js").read_text("utf-8"))


def _size(pages: Mapping[str, Any]) -> int:
    """Size of the pages' scripts in bytes."""
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
    """A picture as a `data:` URL; None if it cannot be read."""
    try:
        with open_picture(path) as image:
            small = image.convert("RGB")
            small.thumbnail((_SIDE_PX, _SIDE_PX))
    except (OSError, ValueError, DecompressionBombError):
        return None
    encoded = io.BytesIO()
    small.save(encoded, "WEBP", quality=_QUALITY)
    return "data:image/webp;base64," + base64.b64encode(encoded.getvalue()).decode()
