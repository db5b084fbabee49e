"""`<run>/report/report.html`: the page as one file of at most 5 MB, with what has room in it."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from markupsafe import Markup
from PIL.Image import DecompressionBombError

from rl.files.atomic import write_atomically
from rl.files.images import open_picture
from rl.report.folder import to_oneself
from rl.report.page import rendered
from rl.report.pages import CHUNK, Made
from rl.report.reading import picture_of
from rl.report.script import call, literal, value_of

MAX_BYTES = 5_000_000
_TABLES = 0.4
"""Of the room: what data pages may take, so that pictures have the rest."""
_AROUND = 30
"""Bytes of what stands around a page, or a picture."""
_SIDE_PX = 160
_QUALITY = 70


class _Mail:
    """What goes inside, and how much room is left."""

    def __init__(self, folder: Path, room: int) -> None:
        self.folder = folder
        self.room = room
        self.pages: list[str] = []
        self.pictures: dict[str, str] = {}
        self.num_left_out = 0

    def add(self, pages: Mapping[str, Any], most: int) -> int | None:
        """The bytes of these pages, which are in now; None, and they are not, where it were more
        than `most`."""
        scripts = [call(name, value) for name, value in pages.items()]
        size = sum(len(script.encode()) + _AROUND for script in scripts)
        if size > most:
            return None
        self.room -= size
        self.pages += scripts
        return size

    def draw(self, wanted: Iterable[str]) -> None:
        """The thumbnails of these pictures, as far as there is room; `wanted` as the page names
        them, from its own folder."""
        for source in wanted:
            if source in self.pictures:
                continue
            # Those of another run are not asked for.
            there = picture_of(self.folder.parent, source.removeprefix("../"))
            inside = thumbnail(self.folder.parent / there) if there else None
            if inside is None or len(inside) + len(source) + _AROUND > self.room:
                self.num_left_out += 1
                continue
            self.room -= len(inside) + len(source) + _AROUND
            self.pictures[source] = inside


def write_single_file(run_dir: Path, made: Made, other: Path | None = None) -> str:
    """Writes it; returns what to tell the user. The data pages lie there."""
    folder = run_dir / "report"
    with to_oneself(folder):
        return _write(folder, run_dir, made, other)


def _write(folder: Path, run_dir: Path, made: Made, other: Path | None) -> str:
    smallest = len(rendered(run_dir, made, other, [Markup()], "x" * 400).encode())
    mail = _Mail(folder, MAX_BYTES - smallest - 20_000)
    tables = int(mail.room * _TABLES)
    wanted: list[Iterator[str]] = []
    for iteration, num_files in [*made.evaluations[:1], *made.evaluations[1:][-1:]]:
        pages = _pages(folder, f"eval_{iteration:06d}", num_files)
        if (size := mail.add(pages, tables)) is not None:
            tables -= size
            wanted.append(_held_out_pictures(pages, iteration))
    shown = []
    for iteration, _ in reversed(made.iterations):
        found = _iteration(folder, iteration)
        if (size := mail.add(found, tables)) is None:
            break
        tables -= size
        shown.append(iteration)
        wanted += [_training_pictures(page) for page in found.values()]
    _regroup(mail, folder, shown)
    mail.draw(chain.from_iterable(wanted))
    note = (
        "One file, for a mail: it holds the first and the last of "
        f"{len(made.evaluations)} held-out evaluations, {len(shown)} of {len(made.iterations)} "
        "training iterations, and "
        f"{len(mail.pictures)} thumbnails; {mail.num_left_out} pictures of what it shows were "
        "left out for want of room. The report beside the run has everything."
    )
    pictures = f"page.pictures = {literal(mail.pictures)};"
    # Our own scripts; `literal` has spelt what they hold.
    inside = [Markup(script) for script in [*mail.pages, pictures]]  # nosec B704
    page = rendered(run_dir, made, other, inside, note)
    path = folder / "report.html"
    write_atomically(path, page)
    return (
        f"one file: {path} ({len(page.encode()) / 1e6:.1f} MB, {len(mail.pictures)} thumbnails "
        f"inside, {mail.num_left_out} pictures left out)"
    )


def _pages(folder: Path, name: str, num_files: int) -> dict[str, Any]:
    names = [name, *(f"{name}_{number}" for number in range(2, num_files + 1))]
    return {name: value_of((folder / "data" / f"{name}.js").read_text("utf-8")) for name in names}


def _iteration(folder: Path, iteration: int) -> dict[str, Any]:
    name = f"it_{iteration:06d}"
    first = _pages(folder, name, 1)
    return _pages(folder, name, len(first[name]["starts"]))


def _regroup(mail: _Mail, folder: Path, shown: list[int]) -> None:
    """What the training list finds: the iterations that are inside."""
    for chunk in sorted({iteration // CHUNK for iteration in shown}):
        name = f"find_{chunk:06d}"
        rows = _pages(folder, name, 1)[name]
        mail.add({name: {it: row for it, row in rows.items() if int(it) in shown}}, mail.room)


def _held_out_pictures(pages: Mapping[str, Any], iteration: int) -> Iterator[str]:
    for page in pages.values():
        for row in page["rows"]:
            files = [row["src"], *row.get("others", []), row["img"], row["bimg"]]
            for file in filter(None, files):
                yield f"../evaluation/it_{iteration:06d}/{file}"
            if row["simg"]:
                yield f"../stock/{row['simg']}"


def _training_pictures(page: Mapping[str, Any]) -> Iterator[str]:
    for group in page["rows"]:
        beside = [group["src"], *group.get("others", []), group["goal"]]
        files = [*beside, *(member["img"] for member in group["of"])]
        yield from (f"../{file}" for file in files if file)


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
