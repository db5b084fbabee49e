"""Rewards by a judge: VIEScore, quality of edits and prompts, references, expectations, rubrics."""

from __future__ import annotations

import asyncio
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from operator import mul
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from PIL.Image import Image
from pydantic import Field, model_validator

from rl.api.judge import Answer, Question
from rl.api.plugin import PluginConfig, Resources
from rl.api.reward import Reward
from rl.api.types import Region, RewardInput, RewardOutput, is_unreadable
from rl.config.schema import MetricName, RunConfig, Section, Unread
from rl.judge import reply
from rl.judge.reply import (
    DIGITS,
    Distribution,
    Ranges,
    UnreadableReplyError,
    expected_minimum,
    fields_schema,
    fill_prompt,
    read_distribution,
    read_fields,
    read_prompt,
    read_scores,
    scores_schema,
)

# ---- repeated judging ----------------------------------------------------------------------------
# Base class of rewards that ask the judge, optionally several times, and average the scores.

PROMPTS = Path(__file__).with_name("prompts")

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
    def _has_its_prompts(self) -> Self:
        self.read_prompts()
        return self

    def read_prompts(self, of_several: bool = False) -> list[str]:
        """The prompt of each of `own_prompts`. Raises ValueError that names the key."""
        files = {**self.own_prompts, **(self.own_prompts_of_several if of_several else {})}
        return [
            read_prompt(getattr(self, key), PROMPTS / file if file else None, key)
            for key, file in files.items()
        ]


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
        super().__init__(config, resources)
        assert resources.judge is not None, "needs_judge is True"
        self.judge = resources.judge
        self._prompts = config.read_prompts()
        self._prompts_of_several = config.read_prompts(of_several=True)

    @classmethod
    def num_questions(cls, config: RepeatsT) -> int:
        return cls.questions_per_reading * config.n_evals

    @classmethod
    def problems(cls, config: RepeatsT, run: RunConfig) -> Iterable[str]:
        """Reports repeats at temperature 0, which would all get the same answer."""
        temperature = run.judge.temperature if config.temperature is None else config.temperature
        if config.n_evals > 1 and temperature == 0:
            yield (
                f"n_evals: n_evals={config.n_evals} at judge temperature 0 gets the same answer "
                f"{config.n_evals} times: set the reward's temperature above 0, or its n_evals to 1"
            )

    @abstractmethod
    def questions(self, instruction: str, pictures: Pictures) -> Sequence[Asked]:
        """The questions of one reading; `pictures` has at least those that the reward `needs`."""

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
        if not readings:
            # A failure of the transport first: it says nothing about the picture.
            failures = [answer.failure for answer in answers if answer.failure]
            failure = min(failures, key=is_unreadable)
            return RewardOutput(None, replies=replies, failure=failure)
        parts = {name: fmean(reading[name] for reading in readings) for name in readings[0]}
        regions = self.regions(*complete[0])
        return RewardOutput(self.value_of(parts), parts, replies, regions=regions)


# ---- viescore base -------------------------------------------------------------------------------
# Base class of the VIEScore rewards (Ku et al. 2023, arXiv 2312.14867).

PERCEPTION_MARKS = ("naturalness", "artifacts")
PERCEPTION = {"perception_prompt": "viescore_perception.txt"}

Marks = tuple[float, ...]


class PairedConfig(RepeatsConfig):
    """The judge's prompts, and how often each question is asked."""

    perception_prompt: str = ""
    """File with the question about the picture alone (picture sent last); '' = the built-in one."""
    semantics_prompt: str = ""
    """File with the question about meaning, with `{instruction}`; '' = the built-in one."""


VieScoreT = TypeVar("VieScoreT", bound=PairedConfig)


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
        question = Question(parts, scores_schema(len(marks), 10), self.config.temperature)
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


# ---- viescore ------------------------------------------------------------------------------------
# Reward plugin: VIEScore (Ku et al. 2023, arXiv 2312.14867) for edits.


class VieScoreConfig(PairedConfig):
    """The judge's prompts, and how often it is asked. The source picture (several: each after
    'Source 1:', ...) precedes the question about meaning, the edit follows it."""

    own_prompts = {"semantics_prompt": "viescore_semantics.txt", **PERCEPTION}
    own_prompts_of_several = {"semantics_prompt": "viescore_semantics_of_several.txt"}


class VieScore(PairedQuestions[VieScoreConfig]):
    """VIEScore of an edit: the judge scores how well the instruction was followed and nothing else
    changed, and the quality of the picture alone. value = overall / 10.

    Parts from 0 (worst) to 10: `edit_success`, `over_edit` (10: nothing else changed) and their
    minimum `sc`; `naturalness`, `artifacts` (10: none) and their minimum `pq`; `overall` = sqrt(sc
    pq). `sc_01` and `pq_01` are sc / 10 and pq / 10. The source picture (several: each after
    'Source 1:', ...) precedes the first question, the edit follows it."""

    needs = frozenset({"source", "image"})
    semantic_marks = ("edit_success", "over_edit")


# ---- viescore t2i --------------------------------------------------------------------------------
# Reward plugin: VIEScore (Ku et al. 2023, arXiv 2312.14867) for text-to-image.


class VieScoreT2IConfig(PairedConfig):
    """The judge's prompts, and how often each is asked. The picture follows each question."""

    own_prompts = {"semantics_prompt": "viescore_t2i_semantics.txt", **PERCEPTION}


class VieScoreT2I(PairedQuestions[VieScoreT2IConfig]):
    """VIEScore of a picture for the user's ORIGINAL prompt, not the policy's rewrite: the judge
    scores how well it shows the prompt, and its quality. value = overall / 10.

    Parts from 0 (worst) to 10: `prompt_following`, equal to `sc`; `naturalness`, `artifacts` (10:
    none) and their minimum `pq`; `overall` = sqrt(sc pq). `sc_01` and `pq_01` are sc / 10 and
    pq / 10. The picture follows each question."""

    needs = frozenset({"image"})
    semantic_marks = ("prompt_following",)


# ---- one question --------------------------------------------------------------------------------
# Base class of rewards whose one question is answered by a number under each of some names.


class OneQuestion(JudgedReward[RepeatsT]):
    """The parts are the judge's numbers."""

    ranges: Ranges
    shows: Sequence[str]
    """What the judge sees, in this order: 'prompt', and names of `Pictures`."""

    def questions(self, instruction: str, pictures: Pictures) -> Sequence[Asked]:
        [prompt] = self.prompts_for(pictures)
        shown: dict[str, Sequence[str | Image]] = {
            **pictures,
            "source": numbered(pictures.get("source", ())),
            "prompt": [fill_prompt(prompt, instruction)],
        }
        parts = tuple(part for name in self.shows for part in shown[name])
        question = Question(parts, fields_schema(self.ranges), self.config.temperature)
        return [(question, partial(read_fields, ranges=self.ranges))]

    def reading(self, marks: Marks) -> Mapping[str, float]:
        return dict(zip(self.ranges, marks, strict=True))


# ---- edit quality --------------------------------------------------------------------------------
# Reward plugin: the judge scores how well an edit follows the instruction, and its quality.


class EditQualityConfig(RepeatsConfig):
    """Weights of both scores, the judge's prompt, and how often the judge is asked."""

    own_prompts = {"prompt": "edit_quality.txt"}
    own_prompts_of_several = {"prompt": "edit_quality_of_several.txt"}
    prompt: str = ""
    """File with the question; the instruction replaces `{instruction}`; '' = the built-in one. The
    source picture (several: each after 'Source 1:', ...) precedes the text, the edit follows it."""
    alignment_weight: Annotated[float, Field(ge=0, le=1e6)] = 0.6
    """Weight of following the instruction."""
    quality_weight: Annotated[float, Field(ge=0, le=1e6)] = 0.4
    """Weight of picture quality."""
    n_evals: Annotated[int, Field(ge=1, le=10_000)] = 3
    """Times each picture is graded; the scores are averaged."""
    temperature: Annotated[float, Field(ge=0, le=100)] | None = 0.7
    """Judge sampling temperature for this reward; null = judge.temperature."""

    @model_validator(mode="after")
    def _one_weight_is_positive(self) -> EditQualityConfig:
        if self.alignment_weight + self.quality_weight == 0:
            raise ValueError("alignment_weight and quality_weight are both 0; raise one")
        return self


class EditQuality(OneQuestion[EditQualityConfig]):
    """The judge scores in one reply how well an edit follows the instruction, and its quality.

    Parts from 0 to 1: `alignment` and `quality`. value = their mean, weighted by
    `alignment_weight` and `quality_weight`."""

    needs = frozenset({"source", "image"})
    ranges = {"alignment": (0.0, 1.0), "quality": (0.0, 1.0)}
    shows = ("source", "prompt", "image")
    unit_parts = frozenset(ranges)

    def value_of(self, parts: Mapping[str, float]) -> float:
        weights = self.config.alignment_weight, self.config.quality_weight
        return (weights[0] * parts["alignment"] + weights[1] * parts["quality"]) / sum(weights)


# ---- ground score --------------------------------------------------------------------------------
# Reward plugin: the judge scores how close an edit is to the reference (EARL's GroundScore).


class GroundScoreConfig(RepeatsConfig):
    """The prompt for the judge, and how often the judge is asked."""

    own_prompts = {"prompt": "ground_score.txt"}
    prompt: str = ""
    """File with the judge's prompt; '' = the built-in one. The judge sees the reference first, then
    the prompt, then the policy's picture."""


class GroundScore(OneQuestion[GroundScoreConfig]):
    """The judge scores how close the picture is to the reference edit, `Sample.target`. It sees
    these two, not the source or the instruction. Part: `score`, 0 to 10; value = score / 10."""

    needs = frozenset({"target", "image"})
    ranges = {"score": (0.0, 10.0)}
    shows = ("target", "prompt", "image")

    def value_of(self, parts: Mapping[str, float]) -> float:
        return parts["score"] / 10


# ---- prompt quality ------------------------------------------------------------------------------
# Reward plugin, a diagnostic: five scores of the policy's rewrite of a prompt, from its text.

NUM_NEW_DETAILS = 5
MIN_SENTENCE_WORDS = 5

_WORD = re.compile(r"[^\W_]+(?:['-][^\W_]+)*")
_FUNCTION_WORDS = frozenset(
    {
        "a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "from", "has",
        "have", "in", "into", "is", "it", "its", "of", "on", "or", "over", "that", "the",
        "their", "there", "this", "to", "under", "up", "was", "were", "which", "while",
        "who", "with",
    }
)  # fmt: skip
_QUALITY_WORDS = re.compile(
    r"\b(?:high[- ]quality|(?:highly |intricately |finely )?detailed|intricate|sharp(?: focus)?|"
    r"4k|8k|hd|uhd|hdr|high[- ]resolution|photo-?realistic|hyper-?realistic|cinematic|"
    r"professional(?:ly)?|masterpiece|masterful|award[- ]winning|studio lighting|soft lighting|"
    r"golden hour|depth of field|bokeh|crisp|vivid|stunning|exquisite)\b"
)


class PromptQuality(Reward):
    """Scores a rewritten prompt by counting its words, without a model. value = the mean of five
    parts, each 0 to 1: `length`, `keywords_kept`, `new_details`, `quality_words`, `structure`;
    part `total_0_5` is their sum. A diagnostic because a rewrite that merely lists quality terms
    scores well, whether or not the pictures get better."""

    needs = frozenset({"text"})
    reads_thoughts = False
    diagnostic = True
    unit_parts = frozenset({"length", "keywords_kept", "new_details", "quality_words", "structure"})

    async def grade(self, reward_input: RewardInput) -> RewardOutput:
        points = score(reward_input.sample.instruction, reward_input.words)
        total = sum(points.values())
        return RewardOutput(total / len(points), {**points, "total_0_5": total})


def score(original: str, enhanced: str) -> dict[str, float]:
    """The five scores, each 0..1, of a rewrite of the user's prompt.

    length         growth in words; 1 if at least twice as long
    keywords_kept  share of the user's content words that the rewrite keeps
    new_details    number of new content words; 1 from five on
    quality_words  1 if the rewrite adds a quality term ("detailed", "4k") that the user did not use
    structure      1 if it has at least five words and at least half of them are distinct
    """
    old_words, new_words = _words(original), _words(enhanced)
    keywords = _content(old_words)
    added_words = _content(new_words) - set(old_words)
    growth = len(new_words) / max(1, len(old_words)) - 1
    added_terms = set(_QUALITY_WORDS.findall(enhanced.casefold())) - set(
        _QUALITY_WORDS.findall(original.casefold())
    )
    is_sentence = len(new_words) >= MIN_SENTENCE_WORDS and 2 * len(set(new_words)) >= len(new_words)
    return {
        "length": min(1.0, max(0.0, growth)),
        "keywords_kept": len(keywords & set(new_words)) / len(keywords) if keywords else 1.0,
        "new_details": min(1.0, len(added_words) / NUM_NEW_DETAILS),
        "quality_words": float(bool(added_terms)),
        "structure": float(is_sentence),
    }


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _content(words: list[str]) -> set[str]:
    return set(words) - _FUNCTION_WORDS


# ---- rubric --------------------------------------------------------------------------------------
# Reward plugin: the judge answers a user's own question with the user's own scores.

Bound = Annotated[float, Field(ge=-1e6, le=1e6)]
REPLY = (
    "Answer with exactly one JSON object and nothing else. Keep the reasoning under 60 words, "
    "without line breaks or curly braces. After it comes a number for each score, in its range:"
)


class Score(Section):
    """A score that the judge gives."""

    low: Bound = 0.0
    """Worst value that the judge may give."""
    high: Bound = 10.0
    """Best value."""
    weight: Annotated[float, Field(ge=0, le=1e6), Unread("combine", "min")] = 1.0
    """Weight of the score in the mean; read only if `combine` is 'weighted'."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low={self.low:g} must be below high={self.high:g}")
        return self


class RubricConfig(RepeatsConfig):
    """The question, its scores, the pictures that the judge sees, and how often it is asked."""

    own_prompts = {"prompt": None}
    prompt: Annotated[str, Field(min_length=1)]
    """File with the question; the instruction replaces `{instruction}`. A sentence that asks for a
    JSON object with these scores and their ranges is appended to it."""
    scores: dict[MetricName, Score]
    """Name -> range and weight, e.g. `{success: {low: 0, high: 5, weight: 2}, identity: {}}`."""
    combine: Literal["weighted", "min"] = "weighted"
    """How scores, each scaled to 0..1, become the reward: by their weighted mean or minimum."""
    shows: list[Literal["source", "prompt", "image", "target"]] = ["source", "prompt", "image"]
    """What the judge gets, in this order: source pictures (several are numbered), question, the
    policy's picture, the data's reference edit."""

    @model_validator(mode="after")
    def _can_be_combined(self) -> Self:
        shown = set(self.shows)
        if reserved := {"reasoning", "overall"} & self.scores.keys():
            raise ValueError(f"scores.{min(reserved)}: this name is used already; choose another")
        if not any(each.weight for each in self.scores.values()):
            raise ValueError("scores: give at least one, with a weight, e.g. { success: {} }")
        if not {"prompt", "image"} <= shown or len(shown) < len(self.shows):
            raise ValueError(f"shows: {self.shows}; needs 'prompt' and 'image', each name once")
        return self


class Rubric(OneQuestion[RubricConfig]):
    """The judge answers a question of your own with scores of your own. It sees the pictures that
    `shows` names. Parts: each of `scores` in its range, and `overall`, 0 to 1, the value."""

    needs = frozenset({"image"})
    unit_parts = frozenset({"overall"})

    def __init__(self, config: RubricConfig, resources: Resources) -> None:
        super().__init__(config, resources)
        self.ranges = {name: (score.low, score.high) for name, score in config.scores.items()}
        self.shows = config.shows
        keys = [f'"{name}": <{low:g} to {high:g}>' for name, (low, high) in self.ranges.items()]
        example = "{" + ", ".join(['"reasoning": "..."', *keys]) + "}"
        prompt = f"{self._prompts[0]}\n\n{REPLY}\n{example}"
        self._prompts = self._prompts_of_several = [prompt]

    @classmethod
    def needs_with(cls, config: RubricConfig) -> Set[str]:
        return set(config.shows) - {"prompt"}

    def reading(self, marks: Marks) -> Mapping[str, float]:
        ranges, weights = self.ranges.values(), [s.weight for s in self.config.scores.values()]
        units = [(m - low) / (high - low) for m, (low, high) in zip(marks, ranges, strict=True)]
        overall = min(units)
        if self.config.combine == "weighted":
            overall = sum(map(mul, weights, units)) / sum(weights)
        return {**super().reading(marks), "overall": min(1.0, overall)}

    def value_of(self, parts: Mapping[str, float]) -> float:
        return parts["overall"]


# ---- expected score ------------------------------------------------------------------------------
# Reward plugin: expected scores of an edit, from the probabilities of the judge's first token.

ANSWER = "Answer with one digit from 0 (worst) to 9 (best) and nothing else."


class ExpectedScoreConfig(RepeatsConfig):
    """The two questions, and the labels with which the judge answers."""

    own_prompts = {
        "success_prompt": "expected_success.txt",
        "restraint_prompt": "expected_restraint.txt",
    }
    success_prompt: str = ""
    """File with the question how well the instruction is followed, with `{instruction}`; '' = the
    built-in one. The sources and then the edit precede it. A sentence that asks for one label is
    appended."""
    restraint_prompt: str = ""
    """The same for what the instruction does not touch."""
    min_legal_mass: Annotated[float, Field(gt=0, le=1)] = 0.9
    """A reply with less probability on all digits together is unreadable: the judge wanted to write
    something else."""
    n_evals: Literal[1] = 1
    """Once: the probabilities are the same each time."""
    temperature: None = None
    """Null: the probabilities do not depend on it."""


class ExpectedScore(JudgedReward[ExpectedScoreConfig]):
    """The mean of two scores of an edit over the judge's probabilities of the digits 0 to 9, one
    token per question. value = E[min(success, restraint)] / 9, with both scores independent. The
    judge has to return log-probs.

    Parts from 0 to 1: `success` and `restraint`, the expected scores / 9; `expected_minimum`, the
    value; `legal_mass`, the smaller probability of all digits. `success_entropy` and
    `restraint_entropy` are the entropies, 0 to 2.3 nats."""

    needs = frozenset({"source", "image"})
    unit_parts = frozenset({"success", "restraint", "legal_mass"})
    questions_per_reading = 2

    def questions(self, instruction: str, pictures: Pictures) -> Sequence[Asked]:
        mass = self.config.min_legal_mass
        shown = (*numbered(pictures["source"]), *pictures["image"])
        read = partial(read_distribution, labels=DIGITS, min_legal_mass=mass)
        prompts = self.prompts_for(pictures)
        texts = (f"{fill_prompt(prompt, instruction)}\n\n{ANSWER}" for prompt in prompts)
        return [(Question((*shown, text), {}, labels=DIGITS), read) for text in texts]

    def reading(self, success: Distribution, restraint: Distribution) -> Mapping[str, float]:
        best = len(success.probs) - 1
        return {
            "success": expected_minimum(success) / best,
            "restraint": expected_minimum(restraint) / best,
            "expected_minimum": expected_minimum(success, restraint) / best,
            "success_entropy": success.entropy,
            "restraint_entropy": restraint.entropy,
            "legal_mass": min(success.legal_mass, restraint.legal_mass),
        }

    def value_of(self, parts: Mapping[str, float]) -> float:
        return parts["expected_minimum"]


# ---- spatial reward ------------------------------------------------------------------------------
# Reward plugin: the judge marks the edited regions, then scores (SpatialReward, 2602.07458).

MAX_SCORE = 25
MAX_COORDINATE = 1000
MAX_REGIONS = 32
MAX_LABEL_CHARS = 200

_SCORES = reply.scores_schema(2, MAX_SCORE)
_BOX = reply.numbers_schema(4, 0, MAX_COORDINATE)
_REGION = {"id": {"type": "integer"}, "label": {"type": "string"}, "bbox_2d": _BOX}
_REGIONS = {"type": "array", "items": reply.object_schema(_REGION), "maxItems": MAX_REGIONS}
_GROUNDED = reply.object_schema({"edit_region": _REGIONS, **_SCORES["properties"]})


class Grounded(Marks):
    """Edit success and restraint, each 0 to 25, and where the judge saw the edit."""

    regions: tuple[Region, ...] = ()


class SpatialRewardConfig(PairedConfig):
    """The judge's prompts, and how often it is asked. Pictures precede the text: the sources and
    the edit in the question about meaning, the edit alone in the question about quality. A model
    that was trained on one wording (SpatialReward-8B) does best with files that hold it."""

    own_prompts = {
        "semantics_prompt": "spatial_semantics.txt",
        "perception_prompt": "spatial_perception.txt",
    }


class SpatialReward(PairedQuestions[SpatialRewardConfig]):
    """The judge marks the edited regions, then scores the edit, as SpatialReward's models are
    trained to. value = overall / 10. The regions are recorded and drawn on the run's page.

    Parts from 0 (worst) to 25: `edit_success`, `over_edit` (25: nothing else changed),
    `naturalness`, `artifacts` (25: none). From 0 to 10: `sc` = (0.6 edit_success + 0.4 over_edit) /
    2.5; `pq` = (naturalness + artifacts) / 5; `overall` = sc^0.8 pq^0.2. (Weights instead of
    VIEScore's minima: fewer ties at 0.) `sc_01` and `pq_01` are sc / 10 and pq / 10."""

    needs = frozenset({"source", "image"})
    semantic_marks = ("edit_success", "over_edit")

    def questions(self, instruction: str, pictures: Pictures) -> Sequence[Asked]:
        semantics, perception = self.prompts_for(pictures)
        text, [image] = fill_prompt(semantics, instruction), pictures["image"]
        shown: list[str | Image] = [*pictures["source"], image, text]
        meaning = Question(tuple(shown), _GROUNDED, self.config.temperature)
        quality = Question((image, perception), _SCORES, self.config.temperature)
        return [(meaning, read_grounded), (quality, _read_marks)]

    def joined(self, semantics: Marks, perception: Marks) -> tuple[float, float, float]:
        sc = (0.6 * semantics[0] + 0.4 * semantics[1]) / 2.5
        pq = sum(perception) / 5
        return sc, pq, min(10.0, sc**0.8 * pq**0.2)

    def regions(self, grounded: Grounded, perception: Marks) -> tuple[Region, ...]:
        return grounded.regions


_read_marks = partial(reply.read_scores, count=2, low=0, high=MAX_SCORE)


def read_grounded(text: str) -> Grounded:
    """The scores and regions of `{"edit_region": [{"label": "...", "bbox_2d": [x1, y1, x2, y2]},
    ...], "score": [s1, s2]}`; coordinates are 0 to 1000 from the left top corner.

    Raises `UnreadableReplyError`, also for a region without area.
    """
    grounded = Grounded(_read_marks(text))
    regions = reply.json_object(text).get("edit_region")
    if not isinstance(regions, list) or len(regions) > MAX_REGIONS:
        raise UnreadableReplyError(f'no list of at most {MAX_REGIONS} under "edit_region"')
    grounded.regions = tuple(map(_region, regions))
    return grounded


def _region(value: Any) -> Region:
    match value:
        case {"label": str(label), "bbox_2d": [_, _, _, _] as corners}:
            box = [reply.number_in(each, "bbox_2d", 0, MAX_COORDINATE) for each in corners]
        case _:
            raise UnreadableReplyError('a region without "label" and four numbers under "bbox_2d"')
    left, top, right, bottom = (each / MAX_COORDINATE for each in box)
    if left >= right or top >= bottom:
        raise UnreadableReplyError('"bbox_2d" without area, or with its corners swapped')
    return Region(label[:MAX_LABEL_CHARS], (left, top, right, bottom))
