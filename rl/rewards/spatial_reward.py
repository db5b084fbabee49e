"""Reward plugin: the judge marks the edited regions, then scores (SpatialReward, 2602.07458)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl.api.judge import Question
from rl.api.types import Region
from rl.judge.question import fill_prompt
from rl.judge.reply import (
    UnreadableReplyError,
    json_object,
    number_in,
    object_schema,
    read_scores,
    scores_schema,
)
from rl.rewards.shared.repeated_judging import Asked, JudgedReward, Pictures
from rl.rewards.shared.viescore_base import PERCEPTION_MARKS, VieScoreConfig

MAX_SCORE = 25
MAX_COORDINATE = 1000
MAX_REGIONS = 32
MAX_LABEL_CHARS = 200
MARKS = ("edit_success", "over_edit", *PERCEPTION_MARKS)

_BOX = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": MAX_COORDINATE},
    "minItems": 4,
    "maxItems": 4,
}
_REGION = {"id": {"type": "integer"}, "label": {"type": "string"}, "bbox_2d": _BOX}
_GROUNDED_SCHEMA = object_schema(
    {
        "edit_region": {
            "type": "array",
            "items": object_schema(_REGION),
            "maxItems": MAX_REGIONS,
        },
        **scores_schema(2, 0, MAX_SCORE)["properties"],
    }
)

Grounded = tuple[tuple[float, ...], tuple[Region, ...]]
"""(edit success and restraint, each 0 to 25; the regions)."""


class Config(VieScoreConfig):
    """The judge's prompts, and how often it is asked. Pictures precede the text: the sources and
    the edit in the question about meaning, the edit alone in the question about quality."""

    own_prompts = {
        "semantics_prompt": "spatial_semantics.txt",
        "perception_prompt": "spatial_perception.txt",
    }


class SpatialReward(JudgedReward[Config]):
    """Grades one edit in the format that SpatialReward's models are trained on. Scores are 0 to 25.

    sc = (0.6 edit_success + 0.4 over_edit) / 2.5, pq = (naturalness + artifacts) / 5, both 0 to 10;
    overall = sc^0.8 pq^0.2; value = overall / 10. (Weights instead of VIEScore's minima: fewer ties
    at 0.)
    """

    needs = frozenset({"source", "image"})
    unit_parts = frozenset({"sc_01", "pq_01"})
    questions_per_reading = 2

    def questions(self, instruction: str, pictures: Pictures) -> Sequence[Asked]:
        semantics, perception = self.prompts_for(pictures)
        image = pictures["image"]
        meaning = (*pictures["source"], *image, fill_prompt(semantics, instruction))
        quality = (*image, perception)
        return [
            (Question(meaning, _GROUNDED_SCHEMA, self.temperature), read_grounded),
            (Question(quality, scores_schema(2, 0, MAX_SCORE), self.temperature), _read_pair),
        ]

    def reading(self, grounded: Grounded, perception: Sequence[float]) -> Mapping[str, float]:
        marks = dict(zip(MARKS, (*grounded[0], *perception), strict=True))
        sc = (0.6 * marks["edit_success"] + 0.4 * marks["over_edit"]) / 2.5
        pq = (marks["naturalness"] + marks["artifacts"]) / 5
        overall = sc**0.8 * pq**0.2
        return {
            **marks,
            "sc": sc,
            "pq": pq,
            "overall": overall,
            "sc_01": sc / 10,
            "pq_01": pq / 10,
        }

    def value_of(self, parts: Mapping[str, float]) -> float:
        return min(1.0, parts["overall"] / 10)

    def regions(self, grounded: Grounded, perception: Sequence[float]) -> tuple[Region, ...]:
        return grounded[1]


def _read_pair(text: str) -> tuple[float, ...]:
    return read_scores(text, 2, 0, MAX_SCORE)


def read_grounded(text: str) -> Grounded:
    """The scores and regions of `{"edit_region": [{"label": "...", "bbox_2d": [x1, y1, x2, y2]},
    ...], "score": [s1, s2]}`; coordinates are 0 to 1000 from the left top corner.

    Raises `UnreadableReplyError`, also for a region without area.
    """
    scores = _read_pair(text)
    regions = json_object(text).get("edit_region")
    if not isinstance(regions, list):
        raise UnreadableReplyError('no list under "edit_region"')
    if len(regions) > MAX_REGIONS:
        raise UnreadableReplyError(f'more than {MAX_REGIONS} regions under "edit_region"')
    return scores, tuple(_region(each) for each in regions)


def _region(value: Any) -> Region:
    match value:
        case {"label": str(label), "bbox_2d": [left, top, right, bottom]}:
            corners = (left, top, right, bottom)
        case _:
            raise UnreadableReplyError('a region without "label" and four numbers under "bbox_2d"')
    x1, y1, x2, y2 = (
        number_in(corner, "bbox_2d", 0, MAX_COORDINATE) / MAX_COORDINATE for corner in corners
    )
    if x1 >= x2 or y1 >= y2:
        raise UnreadableReplyError('"bbox_2d" without area, or with its corners swapped')
    return Region(label[:MAX_LABEL_CHARS], (x1, y1, x2, y2))
