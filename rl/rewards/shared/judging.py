"""Rewards by a judge's grades, read several times, and VIEScore's questions; tags in answers."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, ClassVar, Self, TypeVar

from PIL.Image import Image
from pydantic import Field, model_validator

from rl.api.judge import Answer, Question
from rl.api.plugin import PluginConfig, Resources
from rl.api.reward import Reward
from rl.api.types import Region, RewardInput, RewardOutput, is_unreadable
from rl.config.schema import RunConfig
from rl.judge.reply import (
    Ranges,
    fields_schema,
    fill_prompt,
    read_fields,
    read_prompt,
    read_scores,
    scores_schema,
)

# ---- repeated judging ----------------------------------------------------------------------------
# Base class of rewards that ask the judge, optionally several times, and average the scores.

PROMPTS = Path(__file__).parents[1] / "prompts"

Pictures = Mapping[str, tuple[Image, ...]]
"""'source', 'target' or 'image' -> those pictures of a sample; only 'source' may have several."""
Asked = tuple[Question, Callable[[str], Any]]
"""A question, and the function that parses its reply."""


class RepeatsConfig(PluginConfig):
    """How often the judge is asked, at which temperature, and with which prompts."""

    own_prompts: ClassVar[Mapping[str, str | None]] = {}
    """Config key of a prompt file -> the file in `prompts/` that is used if the key is ''; None:
    the key must name a file."""
    own_prompts_of_several: ClassVar[Mapping[str, str]] = {}
    """Overrides of `own_prompts` for samples with several source pictures."""
    n_evals: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Times each picture is graded; the readings that succeed are averaged."""
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    """Judge sampling temperature for this reward; null = judge.temperature."""

    @model_validator(mode="after")
    def _can_be_asked(self) -> Self:
        if self.temperature is not None:
            self.temperature_with(self.temperature)
        self.read_prompts()
        return self

    def read_prompts(self, of_several: bool = False) -> list[str]:
        """The prompt of each of `own_prompts`. Raises ValueError that names the key."""
        files = {**self.own_prompts, **(self.own_prompts_of_several if of_several else {})}
        return [
            read_prompt(getattr(self, key), PROMPTS / file if file else None, key)
            for key, file in files.items()
        ]

    def temperature_with(self, judge_temperature: float) -> float:
        """The temperature to ask at. Raises ValueError if it is 0 and makes all repeats equal."""
        temperature = judge_temperature if self.temperature is None else self.temperature
        if self.n_evals > 1 and temperature == 0:
            raise ValueError(
                f"n_evals={self.n_evals} at judge temperature 0 gets the same answer "
                f"{self.n_evals} times: set the reward's temperature above 0, or its n_evals to 1"
            )
        return temperature


def numbered(sources: Sequence[Image]) -> list[str | Image]:
    """Source pictures for a question: one as it is, several each after its number."""
    if len(sources) == 1:
        return [sources[0]]
    return [part for n, source in enumerate(sources, 1) for part in (f"Source {n}:", source)]


RepeatsT = TypeVar("RepeatsT", bound=RepeatsConfig)


class JudgedReward(Reward[RepeatsT]):
    """Asks the judge its questions about each picture, `n_evals` times concurrently."""

    needs_judge = True
    reads_thoughts = False
    questions_per_reading: ClassVar[int] = 1

    def __init__(self, config: RepeatsT, resources: Resources) -> None:
        """Raises ValueError if the judge's temperature makes all repeats equal."""
        super().__init__(config, resources)
        assert resources.judge is not None, "needs_judge is True"
        self.judge = resources.judge
        self.temperature = config.temperature_with(self.judge.config.temperature)
        self._prompts = config.read_prompts()
        self._prompts_of_several = config.read_prompts(of_several=True)

    @classmethod
    def num_questions(cls, config: RepeatsT) -> int:
        return cls.questions_per_reading * config.n_evals

    @classmethod
    def problems(cls, config: RepeatsT, run: RunConfig) -> Iterable[str]:
        """Reports repeats at temperature 0, which would all get the same answer."""
        try:
            config.temperature_with(run.judge.temperature)
        except ValueError as error:
            yield f"n_evals: {error}"

    @abstractmethod
    def questions(self, instruction: str, pictures: Pictures) -> Sequence[Asked]:
        """The questions of one reading; `pictures` has at least those that the reward `needs`."""

    def asked_for(self, ranges: Ranges, *parts: str | Image) -> Asked:
        """A question of these parts; its reply has a number for each name in `ranges`."""
        question = Question(parts, fields_schema(ranges), self.temperature)
        return question, partial(read_fields, ranges=ranges)

    def prompts_for(self, pictures: Pictures) -> list[str]:
        """The prompt of each of the config's `own_prompts`, for one or several sources."""
        several = len(pictures.get("source", ())) > 1
        return self._prompts_of_several if several else self._prompts

    @abstractmethod
    def reading(self, *values: Any) -> Mapping[str, float]:
        """The reward's parts, from the parsed reply to each question."""

    @abstractmethod
    def value_of(self, parts: Mapping[str, float]) -> float:
        """The value in [0, 1], from the parts' means over the readings."""

    def regions(self, *values: Any) -> tuple[Region, ...]:
        """Where the judge looked, from the parsed reply to each question."""
        return ()

    async def grade(self, reward_input: RewardInput) -> RewardOutput:
        """Returns a RewardOutput without value if the judge fails; raises only `JudgeRefused`, if
        the judge is set up wrongly."""
        sample = reward_input.sample
        pictures = {"source": sample.sources} if sample.sources else {}
        for name, picture in (("target", sample.target), ("image", reward_input.image)):
            if picture is not None:
                pictures[name] = (picture,)
        if missing := self.needs_with(self.config) - pictures.keys():
            return RewardOutput(None, failure=f"no_image: there is no {', '.join(sorted(missing))}")
        questions = self.questions(sample.instruction, pictures)
        answers: list[Answer[Any]] = await asyncio.gather(
            *(
                self.judge.ask(question, parse, repeat)
                for repeat in range(self.config.n_evals)
                for question, parse in questions
            )
        )
        values = [answer.value for answer in answers]
        rows = [values[i : i + len(questions)] for i in range(0, len(values), len(questions))]
        complete = [row for row in rows if None not in row]
        readings = [self.reading(*row) for row in complete]
        replies = tuple(reply for answer in answers for reply in answer.replies)
        seconds = max(answer.seconds for answer in answers)
        if not readings:
            # A failure of the transport first: it says nothing about the picture.
            failures = [answer.failure for answer in answers if answer.failure]
            failure = min(failures, key=is_unreadable)
            return RewardOutput(None, replies=replies, failure=failure, seconds=seconds)
        parts = {name: fmean(reading[name] for reading in readings) for name in readings[0]}
        values_K = tuple(map(self.value_of, readings)) if self.config.n_evals > 1 else ()
        return RewardOutput(
            self.value_of(parts),
            parts,
            replies,
            seconds=seconds,
            readings=values_K,
            regions=self.regions(*complete[0]),
        )


# ---- viescore base -------------------------------------------------------------------------------
# Base class of the VIEScore rewards (Ku et al. 2023, arXiv 2312.14867).

PERCEPTION_MARKS = ("naturalness", "artifacts")
PERCEPTION = {"perception_prompt": "viescore_perception.txt"}

Marks = tuple[float, ...]


class VieScoreConfig(RepeatsConfig):
    """The judge's prompts, and how often each question is asked."""

    perception_prompt: str = ""
    """File with the question about the picture alone (picture sent last); '' = the built-in one."""
    semantics_prompt: str = ""
    """File with the question about meaning, with `{instruction}`; '' = the built-in one."""


VieScoreT = TypeVar("VieScoreT", bound=VieScoreConfig)


class PairedQuestions(JudgedReward[VieScoreT]):
    """Asks two questions per picture: semantic consistency (SC), whose scores depend on the task,
    and perceptual quality (PQ) of the picture alone: `naturalness`, and absence of `artifacts`. SC
    and PQ are the minima of their scores, overall = sqrt(SC * PQ), all 0-10; value = overall / 10.
    """

    unit_parts = frozenset({"sc_01", "pq_01"})
    questions_per_reading = 2
    semantic_marks: ClassVar[tuple[str, ...]]
    """Names of the scores that the semantic question asks for, in order."""

    def questions(self, instruction: str, pictures: Pictures) -> Sequence[Asked]:
        prompts = self.prompts_for(pictures)
        semantics, perception = (fill_prompt(prompt, instruction) for prompt in prompts)
        sources = numbered(pictures["source"]) if "source" in self.needs else []
        return [
            self._asked(self.semantic_marks, *sources, semantics, *pictures["image"]),
            self._asked(PERCEPTION_MARKS, perception, *pictures["image"]),
        ]

    def _asked(self, marks: Sequence[str], *parts: str | Image) -> Asked:
        question = Question(parts, scores_schema(len(marks), 0, 10), self.temperature)
        return question, partial(read_scores, count=len(marks), low=0, high=10)

    def reading(self, semantics: Marks, perception: Marks) -> Mapping[str, float]:
        sc, pq, overall = self.joined(semantics, perception)
        return {
            **dict(zip(self.semantic_marks, semantics, strict=True)),
            **dict(zip(PERCEPTION_MARKS, perception, strict=True)),
            "sc": sc,
            "pq": pq,
            "overall": overall,
            "sc_01": sc / 10,
            "pq_01": pq / 10,
        }

    def joined(self, semantics: Marks, perception: Marks) -> tuple[float, float, float]:
        """(SC, PQ, overall), each 0-10, from the scores of both questions."""
        sc, pq = min(semantics), min(perception)
        return sc, pq, (sc * pq) ** 0.5

    def value_of(self, parts: Mapping[str, float]) -> float:
        return parts["overall"] / 10


# ---- tags ----------------------------------------------------------------------------------------
# Finds `<name>...</name>` blocks in a completion.

TagName = Annotated[str, Field(pattern=r"^[A-Za-z][\w-]*$")]
"""A tag's name, without the angle brackets."""


def last_block(text: str, name: str) -> str | None:
    """The content of the last complete block of this name; None if there is none."""
    end = text.rfind(f"</{name}>")
    start = text.rfind(f"<{name}>", 0, max(end, 0))
    return None if start < 0 else text[start + len(name) + 2 : end]
