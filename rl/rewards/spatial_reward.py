"""Reward plugin: the judge marks the edited regions, then scores (SpatialReward, 2602.07458)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from PIL.Image import Image

from rl.api.judge import Question
from rl.api.types import Region
from rl.judge import reply
from rl.judge.reply import UnreadableReplyError, fill_prompt
from rl.rewards.shared.judging import Asked, Marks, PairedQuestions, Pictures, VieScoreConfig

MAX_SCORE = 25
MAX_COORDINATE = 1000
MAX_REGIONS = 32
MAX_LABEL_CHARS = 200

_SCORES = reply.scores_schema(2, 0, MAX_SCORE)
_BOX = reply.numbers_schema(4, 0, MAX_COORDINATE)
_REGION = {"id": {"type": "integer"}, "label": {"type": "string"}, "bbox_2d": _BOX}
_REGIONS = {"type": "array", "items": reply.object_schema(_REGION), "maxItems": MAX_REGIONS}
_GROUNDED = reply.object_schema({"edit_region": _REGIONS, **_SCORES["properties"]})


class Grounded(Marks):
    """Edit success and restraint, each 0 to 25, and where the judge saw the edit."""

    regions: tuple[Region, ...] = ()


class Config(VieScoreConfig):
    """The judge's prompts, and how often it is asked. Pictures precede the text: the sources and
    the edit in the question about meaning, the edit alone in the question about quality. A model
    that was trained on one wording (SpatialReward-8B) does best with files that hold it."""

    own_prompts = {
        "semantics_prompt": "spatial_semantics.txt",
        "perception_prompt": "spatial_perception.txt",
    }


class SpatialReward(PairedQuestions[Config]):
    """Grades one edit in the format that SpatialReward's models are trained on, scores 0 to 25.

    sc = (0.6 edit_success + 0.4 over_edit) / 2.5, pq = (naturalness + artifacts) / 5, both 0 to 10;
    overall = sc^0.8 pq^0.2; value = overall / 10. (Weights instead of VIEScore's minima: fewer ties
    at 0.)
    """

    needs = frozenset({"source", "image"})
    semantic_marks = ("edit_success", "over_edit")

    def questions(self, instruction: str, pictures: Pictures) -> Sequence[Asked]:
        semantics, perception = self.prompts_for(pictures)
        text, [image] = fill_prompt(semantics, instruction), pictures["image"]
        shown: list[str | Image] = [*pictures["source"], image, text]
        meaning = Question(tuple(shown), _GROUNDED, self.temperature)
        quality = Question((image, perception), _SCORES, self.temperature)
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
