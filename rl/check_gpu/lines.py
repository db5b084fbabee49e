"""One line of `rl check-gpu`, and what every step of it is given."""

from __future__ import annotations

import os
import platform
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rl.config.schema import RunConfig, load_config
from rl.text.scrub import scrub

Status = Literal["PASS", "FAIL", "SKIPPED"]
WIDTH = 80
NEEDS_CUDA = "needs a GPU (CUDA)"
_FOLDERS = re.compile(r"(?<![\w/])(?:~|\.{1,2})?(?:/[\w.@+~-]+)+/")
KEPT_PATHS = ("/dev/shm", "/proc/")  # nosec B108


@dataclass(frozen=True)
class Line:
    """The result of one check."""

    status: Status
    what: str
    note: str = ""
    fix: str = ""
    """What to do about a FAIL."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Config key -> the value that this result recommends."""

    def text(self) -> str:
        """At most 80 columns; a second line starts under the first one's words."""
        told = f"{self.status:<8} {self.what}" + (f": {self.note}" if self.note else "")
        indent = " " * 9
        shown = textwrap.wrap(told, WIDTH, subsequent_indent=indent, break_on_hyphens=False)
        if self.fix:
            fix = f"{indent}fix: {self.fix}"
            shown += textwrap.wrap(
                fix, WIDTH, subsequent_indent=indent + " " * 5, break_on_hyphens=False
            )
        return "\n".join(shown)


def ok(what: str, note: str = "", **keys: str) -> Line:
    return Line("PASS", what, note, keys=_keys(keys))


def failed(what: str, note: str, fix: str, **keys: str) -> Line:
    return Line("FAIL", what, note, fix, _keys(keys))


def skipped(what: str, why: str) -> Line:
    return Line("SKIPPED", what, why)


def _keys(keys: Mapping[str, str]) -> dict[str, str]:
    """`policy__dtype` -> `policy.dtype`."""
    return {name.replace("__", "."): value for name, value in keys.items()}


def shareable(text: str) -> str:
    """`text` without keys, the name of this machine, and the folders of paths."""
    found = scrub(text)
    for name in {platform.node(), platform.node().partition(".")[0]}:
        if len(name) > 2:
            found = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "<host>", found)

    def shorter(match: re.Match[str]) -> str:
        return match[0] if match[0].startswith(KEPT_PATHS) else ""

    return _FOLDERS.sub(shorter, found)


@dataclass(frozen=True)
class Asked:
    """What the command was asked for; travels to each step as JSON."""

    folder: str
    """Temporary: runs and their logs."""
    tiny: bool = False
    """On the CPU: gloo, eager mode."""
    num_gpus: int = 0
    gpu_gb: float = 0.0
    """Of the smallest GPU; 0 if unknown."""
    config: str = ""
    overrides: Sequence[str] = ()
    limit_s: float = 600.0

    @property
    def device(self) -> str:
        return "cpu" if self.tiny else "cuda:0"

    @property
    def dtype(self) -> str:
        """Of all weights and activations."""
        return "float32" if self.tiny else "bfloat16"

    @property
    def num_ranks(self) -> int:
        return 2 if self.tiny else max(1, self.num_gpus)

    def words_of(self, name: str) -> list[str]:
        """The shipped small config `name`, and overrides that put it on this device."""
        words = [f"base_exp_dir={self.folder}/runs", "tracking.page=false"]
        if not self.tiny:
            words += ["policy.device=auto", "policy.dtype=bfloat16", "renderer.dtype=bfloat16"]
            words += ["engine.type=vllm", f"gpu_gb={self.gpu_gb:.0f}"]
        return [f"configs/{name}.jsonnet", *words]

    def config_of(self, name: str, *more: str) -> RunConfig:
        path, *overrides = self.words_of(name)
        return load_config(path, [*overrides, *more])


@contextmanager
def closing() -> Iterator[ExitStack]:
    """Closes what was opened, also when the step fails."""
    with ExitStack() as stack:
        yield stack


def work_folder(asked: Asked, name: str) -> Path:
    folder = Path(asked.folder, name)
    os.makedirs(folder, exist_ok=True)
    return folder
