"""Stand-ins for programs and packages that a machine may have."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path


def installed(versions: dict[str, str]) -> Callable[[str], str]:
    """`importlib.metadata.version` where only these packages are installed."""

    def version(package: str) -> str:
        if package not in versions:
            raise PackageNotFoundError(package)
        return versions[package]

    return version


def write_programs(folder: Path, scripts: dict[str, str]) -> str:
    """Writes executable files, name -> text; returns their folder for `PATH`."""
    folder.mkdir(exist_ok=True)
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return str(folder)
