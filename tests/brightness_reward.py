"""A user's own reward, named in the config by its dotted path: how bright the picture is."""

from __future__ import annotations

import numpy as np

from rl.api.types import Evidence, Grade
from rl.config.schema import Section

NEEDS = frozenset({"image"})
NEEDS_JUDGE = False


class Config(Section):
    """No knobs."""

    type: str
    """'tests.brightness_reward'."""


class Brightness:
    """Continuous, so that random models have something to climb."""

    async def grade(self, evidence: Evidence) -> Grade:
        level = float(np.asarray(evidence.image, dtype=np.float64).mean() / 255)
        return Grade(value=level, parts={"level": level})


def build(config: Config, judge: object, device: object) -> Brightness:
    return Brightness()
