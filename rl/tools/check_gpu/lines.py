"""One line of a step's results, and what each step gets."""

from __future__ import annotations

import platform
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rl.config.schema import load_config
from rl.printing import scrub

NEEDS_CUDA = "needs a GPU (CUDA)"
_FOLDERS = re.compile(r"(?<![\w/:])(?:~|\.{1,2})?(?:/(?!dev/shm|proc/)[\w.@+~-]+)+/")


@dataclass(frozen=True)
class Line:
    """The result of one check, or one measurement."""

    status: str
    """PASS, FAIL, SKIPPED, NO TIME (the deadline came first) or MEASURED (a number without limit).
    """
    what: str
    note: str = ""
    fix: str = ""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Config key -> the value that this result recommends."""
    data: Mapping[str, float] = field(default_factory=dict)
    """Numbers of a measurement, all digits."""

    def text(self) -> str:
        """At most 80 columns."""
        parts = [(9, f"{self.status:<8} {self.what}" + f": {self.note}" * bool(self.note))]
        parts += [(14, f"{'':9}fix: {self.fix}")] if self.fix else []
        return "\n".join(
            textwrap.fill(text, 80, subsequent_indent=" " * indent, break_on_hyphens=False)
            for indent, text in parts
        )


def result(
    what: str, good: bool, note: str = "", fix: str = "", keys: Mapping[str, str] | None = None
) -> Line:
    """PASS if `good`; else FAIL with the fix, and the keys that avoid it."""
    return Line("PASS", what, note) if good else Line("FAIL", what, note, fix, keys or {})


def skipped(what: str, why: str = NEEDS_CUDA) -> Line:
    return Line("SKIPPED", what, why)


def measured(what: str, note: str, **data: float) -> Line:
    return Line("MEASURED", what, note, data=data)


def shareable(text: str) -> str:
    """`text` without keys, this machine's name, and the folders of paths."""
    name = platform.node()
    text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "<host>", scrub(text)) if name else text
    return _FOLDERS.sub("", text)


@dataclass(frozen=True)
class Setup:
    """What a step gets, as JSON."""

    folder: str
    """Temporary, for runs and logs."""
    out: str
    """The folder of the results."""
    tiny: bool = False
    """On the CPU: gloo, eager mode, tiny sizes."""
    num_gpus: int = 0
    gpu_gb: float = 0.0
    """Of the smallest GPU."""
    config: str = ""
    overrides: Sequence[str] = ()

    @property
    def device(self) -> str:
        return "cpu" if self.tiny else "cuda:0"

    @property
    def dtype(self) -> str:
        return "float32" if self.tiny else "bfloat16"

    def words(self, name: str, *more: str) -> list[str]:
        """The shipped small config `name`, and overrides that put it on this device."""
        path = f"configs/{name}.jsonnet"
        words = [f"base_exp_dir={self.folder}/runs"]
        draws = load_config(path).renderer["type"] != "none"
        if draws:
            words += ["renderer.batch_size=8"]
        if not self.tiny:
            words += ["policy.device=auto", "policy.dtype=bfloat16", "engine.type=vllm"]
            words += [f"gpu_gb={int(self.gpu_gb)}", *["renderer.dtype=bfloat16"] * draws]
        return [path, *words, *more]
