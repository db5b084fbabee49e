"""The base class of data sources: finite lists of samples (example: docs/plugins.md)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rl.api.plugin import ConfigT, Count, PluginBase, brief
from rl.api.types import Sample

if TYPE_CHECKING:
    import numpy as np

OnBadRow = Literal["error", "skip"]

MAX_IMAGE_SIDE_PX = 8192

RowCheck = Callable[[str, str, Sequence[tuple[int, int] | None], "np.ndarray | None"], bool]
"""(a sample's id, instruction, (width, height) in px of each of its pictures, None if unknown, and
its source codes) -> whether its prompt is known to be possible. Raises UnusableSampleError if it is
not."""


@dataclass(frozen=True)
class RowRules:
    """The run's requirements for the rows of every data source."""

    on_bad_row: OnBadRow = "error"
    """`data.on_bad_row`: raise ValueError naming the row, or leave it out and count it."""
    max_image_side_px: int = MAX_IMAGE_SIDE_PX
    """A picture with a longer side is a bad row."""
    max_pictures: int | None = None
    """A row with more source pictures than this is bad; None: no limit."""
    keeps_transparency: bool = False
    """True: a transparent source picture stays RGBA. False: it is composited onto white."""
    check: RowCheck = lambda *sample: True
    """Raises UnusableSampleError for a row that the policy or the renderer would refuse."""
    sample_checks: Sequence[Callable[[Sample], None]] = ()
    """Each raises UnusableSampleError for a row that a reward could never grade."""
    opens: int | None = None
    """Limit of pictures and other files beside the rows that are opened; None: all. With a limit,
    `rl check` is reading, and opens the source once."""
    checked: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Versions of data that this start has checked -> indices of their bad rows."""


@dataclass(frozen=True)
class Findings:
    """What a source found in its rows when it opened them."""

    left_out: Sequence[str] = ()
    """Why the first bad rows are bad."""
    unread: Sequence[str] = ()
    """What was not looked at."""
    checked: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """For `RowRules.checked` of another process."""
    most_pictures: int = 1
    """Largest number of source pictures of a row."""


class DataSource(PluginBase[ConfigT]):
    """A plugin of `rl/data`: a finite, indexable list of samples, the same in every run."""

    reads_much: ClassVar[bool] = False
    """Whether opening the source takes long or asks another machine. If not, `rl check` opens it
    and reads some of its rows."""
    num_skipped: Count = 0
    """Rows left out at the start because they cannot be used."""
    findings: Findings = Findings()

    def __init__(self, config: ConfigT, rules: RowRules) -> None:
        """Once per rank. Raises ValueError, which names file, row and remedy."""
        self.config = config

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Sample:
        """Sample `index`, 0 <= index < len(self). Raises `UnusableSampleError`."""

    @classmethod
    def provides(cls, config: ConfigT) -> Set[str]:
        """Names of what every sample holds besides its instruction, as in a reward's `needs`:
        'source', 'target', 'reference', 'source_codes', 'target_codes', 'hidden:<key>'."""
        return frozenset()

    @classmethod
    def is_here(cls, config: ConfigT) -> bool:
        """Whether `rl check` opens the source."""
        return not cls.reads_much


def read_row(source: DataSource, index: int, key: str) -> Sample:
    """`source[index]`. Raises ValueError, which begins with `key`, if that is no usable sample."""
    from PIL.Image import Image

    sample = source[index]
    if not isinstance(sample, Sample):
        raise ValueError(f"{key}: row {index} is {brief(sample)}; expected rl.api.types.Sample")
    kinds: Mapping[str, Any] = {
        "id": str,
        "instruction": str,
        "sources": tuple,
        "target": Image | None,
        "reference": str | None,
        "hidden": Mapping,
    }
    for name, kind in kinds.items():
        value = getattr(sample, name)
        if not isinstance(value, kind):
            expected = f"expected {getattr(kind, '__name__', kind)}"
            raise ValueError(f"{key}: row {index} has {name} {brief(value)}; {expected}")
    if not all(isinstance(picture, Image) for picture in sample.sources):
        raise ValueError(
            f"{key}: row {index} has sources {brief(sample.sources)}; expected pictures"
        )
    return sample
