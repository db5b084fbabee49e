"""Stand-ins for programs that a machine may have."""

from __future__ import annotations

from pathlib import Path


def write_programs(folder: Path, scripts: dict[str, str]) -> str:
    """Writes executable files, name -> text; returns their folder for `PATH`."""
    folder.mkdir(exist_ok=True)
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return str(folder)
