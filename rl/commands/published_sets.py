"""Unpacks EARL's published sets and checks that they load: `scripts/setup_datasets.sh` runs it."""

from __future__ import annotations

import os
import sys
import tarfile
from pathlib import Path

from rl.api.data import RowRules
from rl.data.emu3_tokens.emu3_tokens import Config, TokenisedEdits
from rl.text import terminal

INSIDE_A_SET = ("list", "feature", "train", "validation", "val", "test")
"""An archive that begins with one of these has no folder of its own."""


def main() -> int:
    """Exit code: 0 when every list loads; 1 with what is wrong when one does not."""
    terminal.guard()
    data = Path(sys.argv[1])
    for archive in files_in(data):
        try:
            if archive.name.endswith((".tar", ".tar.gz", ".tgz")):
                unpack(archive)
        except (tarfile.TarError, EOFError, OSError) as error:
            print(f"{archive}: cannot be unpacked: {error}; delete it and fetch it again")
            return 1
    lists = [file for file in files_in(data) if file.name == "tokenized_datalist.json"]
    if not lists:
        print(f"{data}: holds no tokenized_datalist.json; run scripts/setup_datasets.sh")
        return 1
    for file in lists:
        try:
            rows = TokenisedEdits(Config(type="emu3_tokens", path=str(file)), RowRules("error", 0))
            codes = rows[0].source_codes
        except ValueError as error:
            print(error)
            return 1
        assert codes is not None, "the plugin provides them"
        height, width = codes.shape
        print(f"{len(rows):>9,} edits, codes {height} x {width}: {file}", flush=True)
    return 0


def files_in(data: Path) -> list[Path]:
    """Without hidden folders, and without `feature` folders, which hold millions of files."""
    found: list[Path] = []
    for folder, names, files in os.walk(data):
        names[:] = [name for name in names if name != "feature" and name[0] != "."]
        found += [Path(folder) / name for name in files]
    return sorted(found)


def unpack(archive: Path) -> None:
    """Once, beside itself, under the archive's own name where it holds no folder of its own."""
    mark = archive.with_name(f".{archive.name}.unpacked")  # written at the end
    size = str(archive.stat().st_size)
    if mark.is_file() and mark.read_text() == size:
        return
    print(f"unpacking {archive}", flush=True)
    folder = archive.parent
    with tarfile.open(archive) as members:
        first = next((m.name for m in members if m.name != "."), "")
        if first.removeprefix("./").partition("/")[0] in INSIDE_A_SET:
            folder /= archive.name.split(".tar")[0].removesuffix(".tgz")
        members.extractall(folder, filter="data")
    mark.write_text(size)


if __name__ == "__main__":
    sys.exit(main())
