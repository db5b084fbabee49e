"""What a config may read: the files of its own project, and what is shipped.

What: `Importer`, which Jsonnet asks for every `import`, `importstr` and `importbin`. With it, what
a config sees of a machine is `APP__` variables and these files. What not: the config itself, which
the user names; programs that a config names (`judge.start_command`, plugs by dotted path).
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from rl.config.shipped import configs_folder

ROOT_VARIABLE = "RL_JSONNET_ROOT"
"""What `--jsonnet-root` sets, so that ranks and further commands read a config as the launcher
did."""
MAX_FILE_BYTES = 16 << 20
_PACKAGE = Path(__file__).parents[1]


class Importer:
    """Call it with the importing file's folder and the path as it is written there."""

    def __init__(self, config: Path, env: Mapping[str, str]) -> None:
        """`config`: existing file. Raises ValueError when `ROOT_VARIABLE` names no folder."""
        self._config = config.resolve()
        self._library = configs_folder().resolve()
        named = env.get(ROOT_VARIABLE, "")
        if named and not os.path.isdir(named):
            raise ValueError(f"--jsonnet-root ({ROOT_VARIABLE}): {named!r} is no folder")
        self._root = Path(named).resolve() if named else project_of(self._config)
        own = (self._config.parent,) if self._config.is_relative_to(self._root) else ()
        self._allowed = (self._root, *own, self._library, _PACKAGE.resolve())

    def __call__(self, folder: str, path: str) -> tuple[str, bytes]:
        """The place and the bytes of a file. RuntimeError, as Jsonnet wants it, when there is none
        or it lies elsewhere, wherever links lead."""
        for place in (Path(folder, path), self._library / path):
            try:
                file = place.resolve()
                if not file.exists():
                    continue
                if not self._may_read(file):
                    raise RuntimeError(self._refusal(file))
                if file.stat().st_size > MAX_FILE_BYTES:
                    raise ValueError(f"more than {MAX_FILE_BYTES >> 20} MiB, which no config has")
                content = file.read_bytes().removeprefix(codecs.BOM_UTF8)
                if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    raise ValueError("UTF-16; save it as UTF-8")
                return str(place), content
            except (OSError, ValueError) as error:
                raise RuntimeError(f"it cannot be read ({error})") from None
        raise RuntimeError("no match locally or in the Jsonnet library paths.")

    def _may_read(self, file: Path) -> bool:
        """Hidden files are nobody's config: `.git/config`, `.env` and `~/.ssh` hold keys."""
        if file == self._config:
            return True
        inside = (file.relative_to(f).parts for f in self._allowed if file.is_relative_to(f))
        is_seen = any(not any(part.startswith(".") for part in parts) for parts in inside)
        return is_seen and file.is_file()

    def _refusal(self, file: Path) -> str:
        if any(file.is_relative_to(folder) for folder in self._allowed):
            return (
                f"{str(file)!r} is hidden or no file, which no config may read; move what it needs"
            )
        return (
            f"{str(file)!r} lies outside {str(self._root)!r}, which is all that this config may "
            "read beside the shipped configs; move it there, or name a folder that holds both with "
            "--jsonnet-root"
        )


def project_of(config: Path) -> Path:
    """The root of the git clone that `config` lies in; its own folder where there is none."""
    folder = config.resolve().parent
    return next(_clones(folder), folder)


def _clones(folder: Path) -> Iterator[Path]:
    return (each for each in (folder, *folder.parents) if os.path.lexists(each / ".git"))
