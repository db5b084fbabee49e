"""Stops a run whose renderer fails too often; warns of a size of which every picture fails."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rl.algorithm.metrics import Metrics
from rl.console.console import warn
from rl.rollout.episodes import PictureOutcome
from rl.run.episode_metrics import TooManyFailuresError
from rl.text.untrusted import shown

if TYPE_CHECKING:
    from rl.ranks.dist import Dist

WINDOW_PICTURES = 200
"""The last iterations with so many pictures together are judged; fewer pictures count as so many,
so that one failure in a tiny iteration, or one batch that breaks once, stops no run."""
FEWEST_LOST = 4
"""Pictures of a size, before it is held to fail always."""
FEWEST_ITERATIONS = 2
"""Iterations with such losses, each with pictures of other sizes that got through."""
SHOWN_CHARS = 200

Size = tuple[tuple[int, int] | None, int]
"""((width, height), px, as `PictureOutcome` has it; number of source pictures)."""


class TooManyRenderFailuresError(TooManyFailuresError):
    """The renderer fails more often than `max_render_failure_rate` allows."""


class LostPictures:
    """Sees every iteration's pictures of all ranks, and is the same on each."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.metrics = Metrics()
        self._window: deque[tuple[int, int]] = deque()
        """(pictures that the renderer lost, pictures) of each iteration."""
        self._lost: Counter[Size] = Counter()
        """Pictures lost of a size since one of it got through."""
        self._iterations: Counter[Size] = Counter()
        """Iterations with such losses in which pictures of other sizes got through."""
        self._named: set[Size] = set()

    def add(self, pictures: Sequence[PictureOutcome], dist: Dist) -> None:
        """Take in an iteration's pictures. Raises `TooManyRenderFailuresError` on every rank.
        Collective."""
        local = [replace(p, failure=p.failure and shown(p.failure, SHOWN_CHARS)) for p in pictures]
        everywhere = [picture for of_rank in dist.gather(local) for picture in of_rank]
        self.metrics = Metrics()
        if not everywhere:
            return
        for sentence in self._add_sizes(everywhere):
            if dist.is_main:
                warn(sentence)
        causes = Counter(picture.failure or "" for picture in everywhere if picture.by_renderer)
        self.metrics.maximum("pictures/failing_sizes", len(self._named))
        self.metrics.maximum("pictures/not_drawn", causes.total() / len(everywhere))
        window = self._window
        window.append((causes.total(), len(everywhere)))
        while sum(num for _, num in window) - window[0][1] >= WINDOW_PICTURES:
            window.popleft()
        lost, total = (sum(column) for column in zip(*window, strict=True))
        if lost > self.limit * max(total, WINDOW_PICTURES):
            listed = ", ".join(f"{count} x {cause}" for cause, count in causes.most_common(3))
            raise TooManyRenderFailuresError(
                f"{lost} of the last {total} pictures could not be drawn (in this iteration: "
                f"{listed or 'none'}); the limit is max_render_failure_rate={self.limit:g}, "
                f"counted over {WINDOW_PICTURES} pictures. Fix the cause (an exception's traceback "
                "is in the log), or raise max_render_failure_rate, and start the same command "
                "again: it goes on after the last finished iteration."
            )

    def _add_sizes(self, pictures: Sequence[PictureOutcome]) -> Iterator[str]:
        """A sentence for each size of which every picture has failed by now."""
        good = {_size(picture) for picture in pictures if picture.failure is None}
        for size in good:
            self._lost.pop(size, None)
            self._iterations.pop(size, None)
        self._named -= good
        bad: dict[Size, PictureOutcome] = {}
        for picture in pictures:
            if (size := _size(picture)) not in good:
                self._lost[size] += 1
                bad.setdefault(size, picture)
        self._iterations.update(list(bad) if good else ())
        for size, example in bad.items():
            num_lost = self._lost[size]
            lasts = num_lost >= FEWEST_LOST and self._iterations[size] >= FEWEST_ITERATIONS
            if lasts and size not in self._named:
                self._named.add(size)
                size_px, num_sources = size
                what = f"{size_px[0]}x{size_px[1]} px" if size_px else "those without a source"
                what += f" of {num_sources} source pictures" if num_sources > 1 else ""
                yield (
                    f"every picture of one size fails while others get through: {what}, "
                    f"{num_lost} of {num_lost} lost, so samples of that shape train nothing; "
                    f"the last is of sample {shown(example.sample_id, 100)}: {example.failure}. "
                    "Leave such pictures out of the data, resize them, or change what the renderer "
                    "or the judge does with that size (pictures/failing_sizes)"
                )


def _size(picture: PictureOutcome) -> Size:
    return picture.size_px, picture.num_sources
