"""Letters for completions and grey levels for pictures: a rollout without models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from PIL import Image

from rl.api.types import Completion, RenderFailure, RenderJob, Sample
from rl.config.schema import RunConfig


def run_config(**changes: object) -> RunConfig:
    fields = {
        "run_name": "r",
        "base_exp_dir": "unused",
        "num_iterations": 1,
        "prompts_per_iteration": 1,
        "generations_per_prompt": 2,
        "policy": {"type": "p"},
        "engine": {"type": "e"},
        "renderer": {"type": "r"},
        "rewards": {},
        "data": {"train": []},
    }
    return RunConfig.model_validate(fields | changes)


class Painter:
    """Paints the noise seed; words beginning with 'x' break it, 'y' is the policy's fault."""

    def __init__(self) -> None:
        self.jobs: list[RenderJob] = []

    def decode_sources(self, samples: Sequence[Sample]) -> list[Sample]:
        return list(samples)

    def take_metrics(self) -> dict[str, float]:
        return {"clip_cut_share": 0.5}

    def size_bucket(self, sample: Sample) -> tuple[int, int] | None:
        return None

    def render(
        self, jobs: Iterable[RenderJob]
    ) -> Iterator[tuple[int, Image.Image | RenderFailure]]:
        taken = list(jobs)
        self.jobs += taken
        for index in reversed(range(len(taken))):
            job = taken[index]
            if job.payload[0] in "xy":
                blame = "policy" if job.payload[0] == "y" else "renderer"
                yield index, RenderFailure("ragged", blame)
            else:
                yield index, Image.new("L", (1, 1), job.noise_seed % 256)


def word(text: str, finish: str = "stop", forced: tuple[bool, ...] | None = None) -> Completion:
    ids = tuple(ord(letter) - 96 for letter in text) or (0,)
    return Completion(ids, (-0.5,) * len(ids), finish, forced)
