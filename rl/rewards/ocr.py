"""Reward plugin: how well the asked text can be read in the picture.

The value is that of the text-rendering recipes of Flow-GRPO (arXiv 2505.05470, `flow_grpo/ocr.py`)
and verl-omni (`reward_score/genrm_ocr.py`).
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
    re.compile(r'(?<!\d)"([^"]*)"'),  # after a digit it is an inch
    re.compile(r"(?<!\w)'((?:[^']|(?<=\w)'(?=\w))+)'(?!\w)"),  # within a word: an apostrophe
)
"""Double quotes, and single ones, which are looked for in a text without double ones."""


class Config(PluginConfig):
    """Where the asked text is, and what a difference is."""

    text_column: str | None = None
    """Key of `columns.hidden` with the asked text; null = what the instruction has in quotes ("",
    “”, „“, «», 「」, and '' if there are no others), one after the other."""
    ignore_case: bool = True
    """Whether upper and lower case are the same, as in Flow-GRPO."""
    other_text: Literal["counts", "ignored"] = "counts"
    """Text beside the asked one. counts: as in Flow-GRPO, free if all that was asked is read, else
    each character is an error; ignored: only the part that is most like the asked text is compared,
    for pictures with text of their own, such as a photograph's signs."""
    num_threads: Annotated[int, Field(ge=1, le=256)] = 1
    """Pictures that a rank reads at a time, a CPU core each."""


class Ocr(Reward[Config]):
    """How well the asked text can be read in the picture: value = 1 - distance / length of the
    asked text, at least 0. The distance is the number of wrong, missing and superfluous characters
    (Levenshtein), white space ignored; 0 if the asked text is within what is read.

    RapidOCR's PP-OCRv6 reads on the CPU (pip install 'vlm-edit-rl[ocr]'): Latin letters with
    their accents, Chinese and Japanese; words in reading order if turned by up to 30 degrees. What
    it reads is recorded, with its places. Part `exact`: 1 if the whole asked text is read without
    an error, else 0."""

    needs = frozenset({"image"})
    reads_thoughts = False

    def __init__(self, config: Config, resources: Resources) -> None:
        """The first picture loads the network."""
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
        if not asked_text(config, sample):
            raise UnusableSampleError(
                "has no text that the reward ocr could look for: put it in quotes in the "
                "instruction, or as a string in a hidden column that the reward's text_column names"
            )

    async def grade(self, reward_input: RewardInput) -> RewardOutput:
        """No value (UNGRADED) without an asked text."""
        started = time.monotonic()
        asked = asked_text(self.config, reward_input.sample)
        if not asked or reward_input.image is None:
            return RewardOutput(None, failure="no_text: none is asked for, or nothing is drawn")
        regions = await asyncio.get_running_loop().run_in_executor(
            self._threads, read, reward_input.image
        )
        seen = " ".join(region.label for region in regions)
        value = similarity(
            asked, comparable(self.config, seen), self.config.other_text == "ignored"
        )
        return RewardOutput(
            value,
            {"exact": float(value == 1)},
            replies=(seen,),
            seconds=time.monotonic() - started,
            regions=regions,
        )


# ---- asked text ----------------------------------------------------------------------------------


def asked_text(config: Config, sample: Sample) -> str:
    """The text that the picture should show, as it is compared; '' if there is none."""
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
    """1 - distance / length of `asked`, from 0 to 1. `ignores_other`: the distance to the part of
    `seen` that is nearest."""
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
    """The process's OCR engine. A call of it takes one CPU core: ranks share a machine."""
    from rapidocr import RapidOCR

    return RapidOCR(
        params={
            "Global.log_level": "critical",  # to it, a picture without text is a warning
            "Det.box_thresh": 0.7,  # with its default, 0.5, it finds digits in fur and wood
            "EngineConfig.onnxruntime.intra_op_num_threads": 1,
        }
    )


def in_reading_order(regions: Sequence[Region]) -> tuple[Region, ...]:
    """Lines from top to bottom, each from left to right. A region whose middle is above the bottom
    of a line's highest region is on that line."""
    lines: list[list[Region]] = []
    for region in sorted(regions, key=lambda region: region.box[1]):
        if not lines or (region.box[1] + region.box[3]) / 2 > lines[-1][0].box[3]:
            lines.append([])
        lines[-1].append(region)
    return tuple(region for line in lines for region in sorted(line, key=lambda each: each.box[0]))
