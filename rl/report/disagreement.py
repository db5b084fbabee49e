"""How far a judge's readings of one picture lie apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from statistics import fmean, pstdev
from typing import Any

from rl.api.find import import_plug, plugs_in
from rl.api.reward import Reward
from rl.build import module_of, plugs_of
from rl.judge.reply import UnreadableReplyError, json_object
from rl.report.reading import Record, number

KEY = "n_evals"
"""Of a reward's section: how often it asks each of its questions about a picture."""


def num_readings(config: Mapping[str, Any]) -> dict[str, int]:
    """Of each reward of a run's config; what the config does not state is the shipped reward's own
    default. Of one from elsewhere no code is run to learn it."""
    rewards = config.get("rewards")
    counts = {
        str(name): section[KEY] if KEY in section else _default(section.get("type"))
        for name, section in (rewards.items() if isinstance(rewards, Mapping) else ())
        if isinstance(section, Mapping)
    }
    return {name: count for name, count in counts.items() if type(count) is int and count > 0}


def _default(plug: object) -> object:
    if not isinstance(plug, str) or plug not in plugs_of("rewards"):
        return None
    module, _ = import_plug(module_of("rewards", plug))
    for cls in plugs_in(module, Reward) if module else ():
        field = cls.Config.model_fields.get(KEY)
        return None if field is None else field.default
    return None


def disagreement(rows_G: Iterable[Record], num_readings: Mapping[str, int]) -> float | None:
    """Largest standard deviation of the scores that a judge gave one question about one picture,
    in its own units, each named score by itself; None where every question was asked once.
    `num_readings`: of each reward."""
    spreads = []
    for row in rows_G:
        replies = row.get("replies")
        for name, said in replies.items() if isinstance(replies, Mapping) else ():
            readings = num_readings.get(name, 1)
            # Replies that were asked for again stand among the others: then who answers what is
            # not known.
            if readings < 2 or not isinstance(said, list) or not said or len(said) % readings:
                continue
            questions = len(said) // readings
            for question in range(questions):
                by_name = defaultdict(list)
                for reply in said[question::questions]:
                    for score, value in scores_of(reply).items():
                        by_name[score].append(value)
                spreads += [pstdev(known) for known in by_name.values() if len(known) > 1]
    return round(max(spreads), 3) if spreads else None


def scores_of(reply: object) -> dict[str, float]:
    """Name -> mean of the numbers below it, of a judge's reply; {} where it holds none."""
    try:
        found = json_object(reply) if isinstance(reply, str) else {}
    except UnreadableReplyError:
        return {}
    numbers = {name: list(_numbers(value)) for name, value in found.items()}
    return {name: fmean(values) for name, values in numbers.items() if values}


def _numbers(value: Any) -> Iterator[float]:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping | list):
            waiting += one.values() if isinstance(one, Mapping) else one
        elif not isinstance(one, bool) and (found := number(one)) is not None:
            yield found
