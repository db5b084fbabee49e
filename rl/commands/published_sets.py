"""EARL's published sets made ready: `python -m rl.commands.published_sets <data folder>`.

Unpacks every archive beside itself (nothing can land outside), links each set's `list` into its
`feature` folder, where EARL's configs look for it, and reads every list with the data plug that
will read it in a run.
"""

from __future__ import annotations

import os
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from rl.api.data import RowRules
from rl.data.emu3_tokens import plug as emu3_tokens
from rl.data.shared.rows import BadRowError
from rl.record import terminal

LIST = "tokenized_datalist.json"
ARCHIVES = (".tar", ".tar.gz", ".tgz")
INSIDE_A_SET = {"list", "feature", "train", "validation", "val", "test"}
"""An archive that begins with these has no folder of its own."""


def main() -> int:
    """0 when every list loads; 1 with what is wrong when one does not."""
    terminal.guard()
    data = Path(sys.argv[1])
    try:
        for archive in files_in(data):
            if archive.name.endswith(ARCHIVES):
                unpack(archive)
    except (tarfile.TarError, EOFError, OSError) as error:
        print(f"{archive}: cannot be unpacked: {error}; delete it and fetch it again")
        return 1
    lists = [file for file in files_in(data) if file.name == LIST]
    if not lists:
        print(f"{data}: holds no {LIST}; run scripts/setup_datasets.sh")
        return 1
    for file in lists:
        link_from_feature(file)
    problems = [problem for file in lists for problem in verify(file)]
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def files_in(data: Path) -> Iterator[Path]:
    """Every file but those in `feature` folders, which hold millions, and in hidden ones."""
    for folder, names, files in os.walk(data):
        names[:] = sorted(name for name in names if name != "feature" and name[0] != ".")
        yield from (Path(folder) / name for name in sorted(files))


def unpack(archive: Path) -> None:
    """Once, beside itself, under the folder names it holds, or its own name where it holds none."""
    mark = archive.with_name(f".{archive.name}.unpacked")  # written at the end
    size = str(archive.stat().st_size)
    if mark.is_file() and mark.read_text() == size:
        return
    print(f"unpacking {archive}", flush=True)
    with tarfile.open(archive) as members:
        tops = {Path(name.lstrip("/")).parts[:1] for name in first_names(members)}
        without_folder = {top for parts in tops for top in parts} <= INSIDE_A_SET
        name = archive.name.split(".tar")[0].removesuffix(".tgz")
        members.extractall(
            archive.parent / name if without_folder else archive.parent, filter="data"
        )
    mark.write_text(size)


def first_names(members: tarfile.TarFile, num: int = 100) -> Iterator[str]:
    """Names of the first members; a whole compressed archive would have to be read for all."""
    for _, member in zip(range(num), members, strict=False):
        if member.name != ".":
            yield member.name


def link_from_feature(file: Path) -> None:
    """`<set>/feature/list` -> `../list`, also in place of a link that leads nowhere."""
    feature = file.parent.parent / "feature"
    link = feature / "list"
    if file.parent.name == "list" and feature.is_dir() and not link.exists():
        link.unlink(missing_ok=True)
        link.symlink_to("../list")


def verify(file: Path) -> list[str]:
    """Print how many edits a list names; say what is wrong with it, by reading its first one."""
    config = emu3_tokens.Config(type="emu3_tokens", path=str(file))
    try:
        rows = emu3_tokens.TokenisedEdits(config, RowRules("error", 0))
        codes = rows[0].source_codes
    except BadRowError as error:
        return [str(error)]
    assert codes is not None, "the plug provides them"
    print(f"{len(rows):>9,} edits, codes {codes.shape[0]} x {codes.shape[1]}: {file}", flush=True)
    return []


if __name__ == "__main__":
    sys.exit(main())
