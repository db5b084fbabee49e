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
    """Reward of a run's config -> how often it reads; by default as the shipped reward does. Of a
    reward from elsewhere no code is run to learn it."""
    rewards = config.get("rewards")
    counts = {}
    for name, section in rewards.items() if isinstance(rewards, Mapping) else ():
        if not isinstance(section, Mapping):
            continue
        count, plug = section.get(KEY), section.get("type")
        if KEY not in section and isinstance(plug, str) and plug in plugs_of("rewards"):
            module, _ = import_plug(module_of("rewards", plug))
            for cls in plugs_in(module, Reward) if module else ():
                count = getattr(cls.Config.model_fields.get(KEY), "default", None)
        if type(count) is int and count > 0:
            counts[str(name)] = count
    return counts


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
