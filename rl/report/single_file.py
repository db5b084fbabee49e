"""Writes `<run>/report/report.html`: the page as one file of at most 5 MB."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup
from PIL.Image import DecompressionBombError

from rl.config.loading import read_bytes
from rl.files import open_picture, write_atomically
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


def write_single_file(run_dir: Path, index: PageIndex) -> str:
    """Write the file from the existing data pages. Returns a message for the user."""
    folder = run_dir / "report"
    with locked(folder):
        page, note = _page(run_dir, index)
        write_atomically(folder / "report.html", page)
    size = f"{len(page.encode()) / 1e6:.1f} MB"
    return f"one file: {folder / 'report.html'} ({size}, {note})"


def _page(run_dir: Path, index: PageIndex) -> tuple[str, str]:
    """(HTML with as much of the run as fits, a note on how many pictures it holds)."""
    folder = run_dir / "report" / "data"
    smallest = len(rendered(run_dir, index, [Markup()], "x" * 400).encode())
    max_bytes = MAX_BYTES - smallest - 20_000
    evaluations = [f"eval_{it:06d}" for it, _ in index.evaluations]
    iterations = [f"it_{it:06d}" for it, _ in reversed(index.iterations)]
    names = [*evaluations[:1], *evaluations[1:][-1:], *iterations, *evaluations[1:-1][::-1]]
    # First as many tables as leave room for pictures, then what is left, one by one.
    rounds = [(names, _TABLES * max_bytes), *(([name], max_bytes) for name in names)]
    inside: dict[str, Any] = {"metrics": _read(folder, "metrics")}
    lists: dict[str, dict[str, Any]] = {}
    """Name of a page for the list of groups -> its rows by iteration."""
    pictures: dict[str, str] = {}
    left_out: set[str] = set()
    used_bytes: float = _size(inside)
    for in_round, limit in rounds:
        if used_bytes > 0.99 * max_bytes:
            break
        sources: dict[str, None] = {}
        """Pictures, by their paths relative to the page."""
        for name in in_round:
            if name in inside:
                continue
            pages, (listing, rows) = _pages(folder, name), _listed(folder, name)
            if used_bytes + (size := _size(pages | rows)) > limit:
                continue
            used_bytes += size
            inside |= pages
            lists[listing] = lists.get(listing, {}) | rows
            is_iteration = name.startswith("it_")
            base = "../" if is_iteration else f"../evaluation/{name.replace('eval', 'it')}/"
            sources |= dict.fromkeys(_pictures((pages | rows).values(), base))
        for source in [source for source in sources if source not in pictures]:
            file = picture_of(run_dir, source.removeprefix("../"))
            data_url = thumbnail(run_dir / file) if file else None
            size = len(data_url or "") + len(source) + _AROUND
            if data_url is None or used_bytes + size > max_bytes:
                left_out.add(source)
                continue
            used_bytes += size
            pictures[source] = data_url
    num_evaluations, num_iterations = (
        sum(name in inside for name in each) for each in (evaluations, iterations)
    )
    note = (
        f"A single file, small enough for a mail: it holds {num_evaluations} of "
        f"{len(evaluations)} held-out evaluations, {num_iterations} of {len(iterations)} training "
        f"iterations, and {len(pictures)} thumbnails; {len(left_out)} pictures of these did not "
        "fit. The report in the run folder has everything."
    )
    scripts = [call(name, value) for name, value in (inside | lists).items() if name]
    scripts.append(f"page.pictures = {literal(pictures)};")
    # Our own scripts, whose data `literal` has escaped.
    page = rendered(run_dir, index, list(map(Markup, scripts)), note)  # nosec B704
    return page, f"{len(pictures)} thumbnails inside, {len(left_out)} pictures left out"


def _listed(folder: Path, name: str) -> tuple[str, dict[str, Any]]:
    """(name of the page for the list of groups, iteration -> its rows there) of the data page
    `name`; ('', {}) if that is an evaluation."""
    kind, _, number = name.partition("_")
    if kind != "it":
        return "", {}
    page, iteration = f"find_{int(number) // CHUNK:06d}", str(int(number))
    return page, {iteration: _read(folder, page)[iteration]}


def _pages(folder: Path, name: str) -> dict[str, Any]:
    """The data page `name` and the pages that continue its rows."""
    first = _read(folder, name)
    others = [f"{name}_{number}" for number in range(2, len(first["starts"]) + 1)]
    return {name: first, **{other: _read(folder, other) for other in others}}


def _read(folder: Path, name: str) -> Any:
    return value_of(read_bytes(folder / f"{name}.js").decode())


def _size(pages: Mapping[str, Any]) -> int:
    """Size of the pages' scripts in bytes."""
    return sum(len(call(name, value).encode()) + _AROUND for name, value in pages.items())


def _pictures(pages: Iterable[Any], base: str) -> Iterator[str]:
    """Picture paths of groups or held-out samples; `base`: the folder they are relative to."""
    for page in pages:
        for row in page["rows"]:
            if isinstance(row, list):  # in the list of groups
                row = {"src": None, "of": [{"img": file} for file in row[-1]], "bare": None}
            files = [row["src"], *row.get("others", []), row.get("goal"), row.get("bimg")]
            members = [*row["of"], row["bare"]] if "of" in row else [row]
            files += [one["img"] for one in members if one]
            yield from (f"{base}{file.partition('#')[0]}" for file in files if file)
            if row.get("simg"):
                yield f"../stock/{row['simg']}"


def thumbnail(path: Path) -> str | None:
    """A picture as a `data:` URL; None if it cannot be read. A sheet of thumbnails stays as it is,
    because its parts are named by their pixels."""
    try:
        if path.suffix == ".webp":
            return "data:image/webp;base64," + base64.b64encode(read_bytes(path)).decode()
        with open_picture(path) as image:
            small = image.convert("RGB")
            small.thumbnail((_SIDE_PX, _SIDE_PX))
    except (OSError, ValueError, DecompressionBombError):
        return None
    encoded = io.BytesIO()
    small.save(encoded, "WEBP", quality=_QUALITY)
    return "data:image/webp;base64," + base64.b64encode(encoded.getvalue()).decode()
