"""Pictures that bring no value: a renderer that fails too often, a size that always fails.

What: `LostPictures`, which is shown every iteration's pictures, stops the run above
`max_render_failure_rate`, and says once of a size of picture that none of it gets through. What
not: episodes without a reward, whoever lost it (`episode_metrics.py`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rl.algorithm.metrics import Metrics
from rl.record.console import warn
from rl.record.untrusted import shown
from rl.rollout.episodes import PictureOutcome
from rl.run.episode_metrics import TooManyFailuresError

if TYPE_CHECKING:
    from rl.ranks.dist import Dist

WINDOW_PICTURES = 200
"""The renderer's failures are counted over the last iterations that together have so many. Fewer
pictures are measured as if they were so many: at a limit of 0.05 a run stops at the eleventh lost
one, and neither one failure in a tiny iteration nor one batch that breaks once stops it."""
FEWEST_LOST = 4
"""Pictures of a size, before it is held to fail always."""
FEWEST_ITERATIONS = 2
"""In which they were lost, each with pictures of other sizes that got through."""
SHOWN_CHARS = 200
"""Of a failure."""

Size = tuple[tuple[int, int] | None, int]
"""((width, height), px, as `PictureOutcome` has it; number of source pictures)."""


class TooManyRenderFailuresError(TooManyFailuresError):
    """The renderer fails more often than `max_render_failure_rate` allows."""


@dataclass
class Tally:
    """Of one size's pictures in one iteration, over all ranks."""

    num_good: int = 0
    num_lost: int = 0
    example: str = ""
    """Sample and failure of the first lost one."""


@dataclass
class LossesInRow:
    """Of one size, since a picture of it got through."""

    num_lost: int = 0
    num_iterations: int = 0
    """Of those in which others got through."""
    said: bool = False


@dataclass
class LostPictures:
    """Over a run, on every rank alike."""

    limit: float
    """`max_render_failure_rate`."""
    metrics: Metrics = field(default_factory=Metrics)
    """Of the last iteration; the same on every rank."""
    _window: deque[tuple[int, int]] = field(default_factory=deque)
    """(pictures that the renderer lost, pictures) of each iteration."""
    _losses: dict[Size, LossesInRow] = field(default_factory=dict)

    def add(self, pictures: Sequence[PictureOutcome], dist: Dist) -> None:
        """Show it an iteration's pictures. Collective.

        Raises `TooManyRenderFailuresError` on every rank.
        """
        by_renderer = Counter(
            shown(outcome.failure or "", SHOWN_CHARS) for outcome in pictures if outcome.by_renderer
        )
        ranks = dist.gather((_tallies(pictures), by_renderer, len(pictures)))
        causes = sum((causes for _, causes, _ in ranks), Counter[str]())
        num_pictures = sum(num for _, _, num in ranks)
        self.metrics = Metrics()
        if not num_pictures:
            return
        for sentence in self._add_sizes(_over_ranks([tallies for tallies, _, _ in ranks])):
            if dist.is_main:
                warn(sentence)
        always = sum(losses.said for losses in self._losses.values())
        self.metrics.maximum("pictures/failing_sizes", always)
        self.metrics.maximum("pictures/not_drawn", causes.total() / num_pictures)
        self._check_renderer(causes, num_pictures)

    def _check_renderer(self, causes: Counter[str], num_pictures: int) -> None:
        window = self._window
        window.append((causes.total(), num_pictures))
        while sum(num for _, num in window) - window[0][1] >= WINDOW_PICTURES:
            window.popleft()
        lost, total = (sum(column) for column in zip(*window, strict=True))
        if lost <= self.limit * max(total, WINDOW_PICTURES):
            return
        listed = ", ".join(f"{count} x {cause}" for cause, count in causes.most_common(3))
        raise TooManyRenderFailuresError(
            f"{lost} of the last {total} pictures could not be drawn (in this iteration: "
            f"{listed or 'none'}); the limit is max_render_failure_rate={self.limit:g}, counted "
            f"over {WINDOW_PICTURES} pictures. Mend what is named (an exception's traceback is in "
            "the log), or raise max_render_failure_rate, and start the same command again: it "
            "goes on after the last finished iteration."
        )

    def _add_sizes(self, tallies: Mapping[Size, Tally]) -> Iterator[str]:
        """A sentence for each size that has now failed always."""
        for size, tally in tallies.items():
            if tally.num_good:
                self._losses.pop(size, None)
                continue
            losses = self._losses.setdefault(size, LossesInRow())
            losses.num_lost += tally.num_lost
            losses.num_iterations += any(other.num_good for other in tallies.values())
            lasts = losses.num_lost >= FEWEST_LOST and losses.num_iterations >= FEWEST_ITERATIONS
            if lasts and not losses.said:
                losses.said = True
                yield (
                    f"every picture of one size fails while others get through: {_said(size)}, "
                    f"{losses.num_lost} of {losses.num_lost} lost, so that samples of that shape "
                    f"train nothing; the last is {tally.example}. Leave such pictures out of the "
                    "data, resize them, or change what the renderer or the judge makes of that "
                    "size (pictures/failing_sizes)"
                )


def _said(size: Size) -> str:
    size_px, num_sources = size
    if size_px is None:
        return "those without a source"
    several = f" of {num_sources} source pictures" if num_sources > 1 else ""
    return f"{size_px[0]}x{size_px[1]} px{several}"


def _tallies(pictures: Sequence[PictureOutcome]) -> dict[Size, Tally]:
    found: dict[Size, Tally] = {}
    for outcome in pictures:
        tally = found.setdefault((outcome.size_px, outcome.num_sources), Tally())
        if outcome.failure is None:
            tally.num_good += 1
        else:
            tally.num_lost += 1
            why = shown(outcome.failure, SHOWN_CHARS)
            tally.example = tally.example or f"of sample {shown(outcome.sample_id, 100)}: {why}"
    return found


def _over_ranks(ranks: Sequence[Mapping[Size, Tally]]) -> dict[Size, Tally]:
    merged: dict[Size, Tally] = {}
    for found in ranks:
        for size, own in found.items():
            tally = merged.setdefault(size, Tally())
            tally.num_good += own.num_good
            tally.num_lost += own.num_lost
            tally.example = tally.example or own.example
    return merged
