"""Reward plugin: how well the target text can be read in the picture.

The value is computed as in the text-rendering recipes of Flow-GRPO (arXiv 2505.05470,
`flow_grpo/ocr.py`) and verl-omni (`reward_score/genrm_ocr.py`).
"""

from __future__ import annotations

import asyncio
import re
import time
import unicodedata
from collections.abc import Iterable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from typing import Annotated, Any, Literal

from PIL.Image import Image
from pydantic import Field

from rl.api.plugin import PluginConfig, Resources
from rl.api.reward import Reward
from rl.api.types import Region, RewardInput, RewardOutput, Sample, UnusableSampleError
from rl.config.schema import RunConfig

SAME = str.maketrans(
    dict.fromkeys("“”„«»「」", '"')
    | dict.fromkeys("\u2018\u2019", "'")  # typographic quotes
    | dict.fromkeys("\u2013\u2014", "-")  # dashes
)
QUOTES = (
    re.compile(r'(?<!\d)"([^"]*)"'),  # after a digit, " means inches
    re.compile(r"(?<!\w)'((?:[^']|(?<=\w)'(?=\w)){2,})'(?!\w)"),  # not it's, rock 'n' roll
)
"""Double quotes; single quotes, which count only in a text without double ones."""


class Config(PluginConfig):
    """Where the target text is, and which differences count."""

    text_column: Annotated[str, Field(min_length=1)] | None = None
    """Key of `columns.hidden` that holds the target text; null = the texts in quotes in the
    instruction ("", “”, „“, «», 「」, or '' if there are no others), in order."""
    ignore_case: bool = True
    """Whether upper and lower case count as the same, as in Flow-GRPO."""
    other_text: Literal["counts", "ignored"] = "counts"
    """Other text in the picture. counts: each of its characters is an error, unless what is read
    contains the target text (as in Flow-GRPO). ignored: only the part of what is read that is most
    like the target text is compared: for pictures with text of their own, such as signs."""
    num_threads: Annotated[int, Field(ge=1, le=256)] = 1
    """Pictures that a rank reads at the same time, each on one CPU core."""


class Ocr(Reward[Config]):
    """How well the target text can be read in the picture: value = 1 - distance / length of the
    target text, at least 0. The distance is the Levenshtein distance to what is read, in
    characters, white space ignored; it is 0 if what is read contains the target text.

    RapidOCR's PP-OCRv6 reads on the CPU (pip install 'vlm-edit-rl[ocr]'): Latin letters with
    accents, Chinese and Japanese, in reading order if turned by up to 30 degrees. The episode has
    what is read, and where. Part `exact`: 1 if what is read contains the target text without an
    error, else 0."""

    needs = frozenset({"image"})
    reads_thoughts = False

    def __init__(self, config: Config, resources: Resources) -> None:
        """Loads nothing; the first picture loads the network."""
        super().__init__(config, resources)
        self._threads = ThreadPoolExecutor(config.num_threads, thread_name_prefix="ocr")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    @classmethod
    def needs_with(cls, config: Config) -> Set[str]:
        return cls.needs if config.text_column is None else cls.needs | {config.text_column}

    @classmethod
    def problems(cls, config: Config, run: RunConfig) -> Iterable[str]:
        if missing := [name for name in ("rapidocr", "onnxruntime") if find_spec(name) is None]:
            yield f"type: needs {' and '.join(missing)}: pip install 'vlm-edit-rl[ocr]'"

    @classmethod
    def check_sample(cls, config: Config, sample: Sample) -> None:
        if not target_text(config, sample):
            raise UnusableSampleError(
                "has no target text for the reward ocr: put it in quotes in the instruction, or as "
                "a string in a hidden column that the reward's text_column names"
            )

    async def grade(self, reward_input: RewardInput) -> RewardOutput:
        """No value (UNGRADED) without a target text."""
        started = time.monotonic()
        asked = target_text(self.config, reward_input.sample)
        if not asked or reward_input.image is None:
            return RewardOutput(None, failure="no_text: none is asked for, or nothing is drawn")
        value, regions = await asyncio.get_running_loop().run_in_executor(
            self._threads, self._compared, asked, reward_input.image
        )
        return RewardOutput(
            value,
            {"exact": float(value == 1)},
            replies=(text_of(regions),),
            seconds=time.monotonic() - started,
            regions=regions,
        )

    def _compared(self, asked: str, picture: Image) -> tuple[float, tuple[Region, ...]]:
        """(similarity of the target text and what is read, the pieces of text). In a thread: both
        take long for much text, and judge requests share the event loop."""
        regions = read(picture)
        seen = comparable(self.config, text_of(regions))
        return similarity(asked, seen, self.config.other_text == "ignored"), regions


# ---- target text ---------------------------------------------------------------------------------


def target_text(config: Config, sample: Sample) -> str:
    """The text that the picture should show, in the form that is compared; '' if there is none."""
    text = (
        " ".join(quoted(sample.instruction))
        if config.text_column is None
        else sample.hidden.get(config.text_column)
    )
    return comparable(config, text) if isinstance(text, str) else ""


def quoted(instruction: str) -> list[str]:
    """The quoted parts of an instruction, in order."""
    double, single = (pattern.findall(instruction.translate(SAME)) for pattern in QUOTES)
    return double or single


def comparable(config: Config, text: str) -> str:
    """The text without white space and with one form for each character (NFKC, straight quotes)."""
    text = unicodedata.normalize("NFKC", text).translate(SAME)
    return "".join((text.casefold() if config.ignore_case else text).split())


def similarity(asked: str, seen: str, ignores_other: bool) -> float:
    """1 - distance / length of `asked`, from 0 to 1. `ignores_other`: the distance to the most
    similar part of `seen`."""
    if asked in seen:
        return 1.0
    row = [0 if ignores_other else count for count in range(len(seen) + 1)]
    for count, wanted in enumerate(asked, 1):
        above, row = row, [count]
        for i, letter in enumerate(seen):
            row.append(min(above[i] + (wanted != letter), above[i + 1] + 1, row[i] + 1))
    distance = min(row) if ignores_other else row[-1]
    return 1 - min(distance, len(asked)) / len(asked)


# ---- reading -------------------------------------------------------------------------------------


def text_of(regions: Sequence[Region]) -> str:
    """What is read, in one line."""
    return " ".join(region.label for region in regions)


def read(picture: Image) -> tuple[Region, ...]:
    """The pieces of text in the picture, in reading order."""
    found = _engine()(picture.convert("RGB"))
    if found.txts is None:
        return ()
    corners = found.boxes / picture.size  # [pieces, 4, xy]
    pieces = zip(found.txts, corners.min(1).tolist(), corners.max(1).tolist(), strict=True)
    return in_reading_order([Region(text, (*low, *high)) for text, low, high in pieces])


@cache
def _engine() -> Any:
    """The process's OCR engine. A call takes one CPU core, because ranks share a machine."""
    from rapidocr import RapidOCR

    return RapidOCR(
        params={
            "Global.log_level": "critical",  # it warns at each picture without text
            "Det.box_thresh": 0.7,  # at the default, 0.5, it reads digits in fur and wood
            "EngineConfig.onnxruntime.intra_op_num_threads": 1,
        }
    )


def in_reading_order(regions: Sequence[Region]) -> tuple[Region, ...]:
    """Lines from top to bottom, each from left to right. A region belongs to the line before it if
    its middle is higher than the bottom of that line's topmost region."""
    lines: list[list[Region]] = []
    for region in sorted(regions, key=lambda region: region.box[1]):
        if not lines or (region.box[1] + region.box[3]) / 2 > lines[-1][0].box[3]:
            lines.append([])
        lines[-1].append(region)
    return tuple(region for line in lines for region in sorted(line, key=lambda each: each.box[0]))
