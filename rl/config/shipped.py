"""Finds the shipped configs, in a clone or a wheel, and resolves `pkg://` paths."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from rl.config.paths import GONE, not_a_file

SCHEME = "pkg://"
_PACKAGE = Path(__file__).parents[1]


def configs_folder() -> Path:
    """`configs/` of a clone; a wheel carries it inside the package."""
    inside = _PACKAGE / "configs"
    return inside if inside.is_dir() else _PACKAGE.parent / "configs"


def shipped_configs() -> list[str]:
    """Names of the shipped configs, `configs/quickstart.jsonnet` ..., valid in any folder."""
    return [f"configs/{file.name}" for file in sorted(configs_folder().glob("*.jsonnet"))]


def find_config(path: str | Path) -> Path | None:
    """The file at `path`; if there is none, the shipped `configs/...` of that name; else None."""
    path = Path(path)
    if not not_a_file(path):
        return path
    shipped = configs_folder().joinpath(*path.parts[1:])
    names_shipped = path.parts[:1] == ("configs",) and ".." not in path.parts
    return shipped if names_shipped and not not_a_file(shipped) else None


def located(text: str) -> str:
    """`pkg://package/path/inside` as the path where that package is installed; else `text`.

    Raises ValueError if there is no such package.
    """
    if not text.startswith(SCHEME):
        return text
    package, _, inside = text.removeprefix(SCHEME).partition("/")
    spec = find_spec(package) if package.isidentifier() else None
    folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    if not folders:
        raise ValueError(
            f"{text!r} given, but no package {package!r} is installed here; write "
            f"{SCHEME}<package>/<path inside it>, or a path"
        )
    paths = [folder / inside for folder in folders]
    return str(next((path for path in paths if not_a_file(path) != GONE), paths[0]))
