"""Writes a run's config, metrics, episodes and pictures to the run folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from rl.api.types import Episode, Sample
from rl.config.schema import RunConfig
from rl.files import (
    append_line,
    digest,
    hold,
    json_line,
    png_bytes,
    private,
    read_rows,
    release,
    require_not_moved,
    write_atomically,
)
from rl.printing import remember, scrubbed
from rl.ranks.dist import Dist
from rl.record.rewind import ENTRY_NAMES, PICTURE_NAME, rewind
from rl.record.thumbnails import GroupPictures, Thumbnails, interest
from rl.record.writer import MAX_WAITING

if TYPE_CHECKING:
    from PIL.Image import Image

_LOGPROB_DIGITS = 6
"""Float32 log-probs carry no more digits; all digits of a float64 take three times the space."""


class RunRecord:
    """The files of one run, as one rank writes them:

    <run>/config.json                        resolved config, environment secrets scrubbed
    <run>/metrics.jsonl                      one line per iteration, reduced over all ranks
    <run>/episodes/it_000012.rank0.jsonl     one line per episode of that rank (`provenance`)
    <run>/images/it_000012/rank0_g03_m5.png  pictures; `..._source.png` (`..._source2.png`, ...) and
                                             `..._target.png`: the group's sources and target
    <run>/thumbnails/it_000012/rank0_g03.webp  small pictures of a group (`thumbnails.py`)
    <run>/set_aside/                         records of iterations that were repeated (`rewind.py`)

    Iterations count from 1; iteration 0 is the evaluation before training.
    """

    def __init__(self, run_dir: Path, config: RunConfig, dist: Dist) -> None:
        self.run_dir = run_dir
        self._dist = dist
        self._tracking = config.tracking
        for judge in config.judges:
            remember(judge.api_key_env)
        self.config: dict[str, Any] = scrubbed(config.model_dump(mode="json"))
        """The resolved config, scrubbed, so that it may be published."""
        self._thumbnails = Thumbnails(run_dir, 1e6 * config.tracking.thumbnails_mb, dist)
        # Not thread-local: the writer thread checks whether the lock is held.
        self._lock = FileLock(run_dir / ".lock", fallback_to_soft=False, thread_local=False)

    def claim(self, wait_s: float = 30.0) -> None:
        """Lock the run folder, because two runs would corrupt each other's files. Waits for an
        earlier process that is still saving; raises ValueError after `wait_s`. Collective."""
        problem = ""
        if self._dist.is_main:
            self.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            owner = self.run_dir / ".lock"
            try:
                self._lock.acquire(wait_s, poll_interval=0.2)
                owner.write_text(str(os.getpid()))
            except Timeout:
                process = owner.read_bytes().decode(errors="replace") or "unknown"
                problem = (
                    f"{self.run_dir} is in use by process {process}: wait for it, stop it, or "
                    "choose another run_name"
                )
            except PermissionError:
                raise
            except OSError:  # a file system without locks: run unlocked
                pass
        if problem := self._dist.broadcast(problem):
            raise ValueError(problem)
        hold(self.run_dir)

    def release(self) -> None:
        release(self.run_dir)
        self._lock.release()

    @contextmanager
    def _require_not_moved(self) -> Iterator[None]:
        """Raise GoneError once the block ends if the run folder was moved or deleted meanwhile."""
        try:
            yield
        except OSError:
            require_not_moved(self.run_dir)
            raise
        require_not_moved(self.run_dir)

    def write_config(self) -> None:
        if self._dist.is_main:
            text = json.dumps(self.config, indent=2, ensure_ascii=False) + "\n"
            write_atomically(self.run_dir / "config.json", text)

    def rewind(self, iteration: int) -> list[str]:
        """On rank 0, move the records of later iterations than `iteration` (-1: of all) to
        set_aside/, because the run repeats them. Returns messages for the user."""
        return rewind(self.run_dir, iteration) if self._dist.is_main else []

    def has_line(self, iteration: int) -> bool:
        return any(row.get("iteration") == iteration for row in self.lines())

    def lines(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; damaged ones are left out."""
        return read_rows(self.run_dir / "metrics.jsonl")[0]

    def write_metrics(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Append one line, flushed (rank 0). NaN and infinities are written as null."""
        if not self._dist.is_main:
            return
        with self._require_not_moved():
            line = json_line({"iteration": iteration, **metrics})
            append_line(self.run_dir / "metrics.jsonl", line)

    def write_episodes(
        self,
        iteration: int,
        episodes_PG: Sequence[Sequence[Episode]],
        advantages_PG: Sequence[Sequence[float | None]],
        bare_P: Sequence[Episode | None] = (),
        num_later: int = 0,
    ) -> None:
        """Write this rank's episodes, with the bare arms (`bare_P`) in their groups' first lines,
        thumbnails (their budget is also for the run's `num_later` later iterations), and its share
        of the iteration's `images_per_iteration` pictures, group by group; then delete old pictures
        (`keep_images_of_last_n_iterations`). Does nothing on iterations that
        `log_episodes_every_n_iterations` leaves out."""
        every = self._tracking.log_episodes_every_n_iterations
        if every == 0 or iteration % every != 0:
            return
        with self._require_not_moved():
            bare_P = bare_P or [None] * len(episodes_PG)
            groups = [
                GroupPictures(p, _distinct_pictures(episodes_G, bare), interest(episodes_G, bare))
                for p, (episodes_G, bare) in enumerate(zip(episodes_PG, bare_P, strict=True))
            ]
            places = self._thumbnails.write(iteration, groups, num_later // every + 1)
            self._write_lines(iteration, episodes_PG, advantages_PG, bare_P, places)
            if num_kept := self._tracking.keep_images_of_last_n_iterations:
                self._delete_images(iteration - num_kept)

    def _write_lines(
        self,
        iteration: int,
        episodes_PG: Sequence[Sequence[Episode]],
        advantages_PG: Sequence[Sequence[float | None]],
        bare_P: Sequence[Episode | None],
        places: Mapping[int, str],
    ) -> None:
        """`places`: `id` of a picture -> the place of its thumbnail."""
        lines: list[str] = []
        num_here = sum(map(len, episodes_PG))
        # Ranks have equally many episodes, so how many pictures lower ranks write is known.
        images_left = self._tracking.images_per_iteration - self._dist.rank * num_here
        groups = zip(episodes_PG, advantages_PG, bare_P, strict=True)
        for p, (episodes_G, advantages_G, bare) in enumerate(groups):
            stem = f"images/it_{iteration:06d}/rank{self._dist.rank}_g{p:02d}"
            with_pictures = images_left > 0
            shared: dict[str, Any] = {"source_file": None, "target_file": None}
            if episodes_G:
                sample = episodes_G[0].prompt.sample
                shared["source_thumbnails"] = [places.get(id(p)) for p in sample.sources]
                shared["target_thumbnail"] = places.get(id(sample.target))
            if with_pictures and episodes_G:
                sources = named_sources(sample)
                shared |= source_files([self._write_image(i, f"{stem}_{n}") for n, i in sources])
                shared["target_file"] = self._write_image(sample.target, f"{stem}_target")
            for g, (episode, advantage) in enumerate(zip(episodes_G, advantages_G, strict=True)):
                picture = episode.image if images_left > 0 else None
                image = self._write_image(picture, f"{stem}_m{g}")
                images_left -= image is not None
                row = provenance(episode, advantage)
                row |= {"rank": self._dist.rank, "member": g, **shared, "image_file": image}
                row["thumbnail"] = places.get(id(episode.image))
                if episode.image is not None and "drawn_by" in episode.image.info:
                    row["drawn_by"] = episode.image.info["drawn_by"]
                    row["picture_digest"] = digest(episode.image).hex()
                if g == 0 and bare is not None:
                    picture = bare.image if with_pictures else None
                    bare_row = provenance(bare, None)
                    bare_row["image_file"] = self._write_image(picture, f"{stem}_bare")
                    bare_row["thumbnail"] = places.get(id(bare.image))
                    del bare_row["judge_s"]  # the only value that differs between equal runs
                    row["bare"] = bare_row
                lines.append(json_line(scrubbed(row)))
        path = self.run_dir / "episodes" / f"it_{iteration:06d}.rank{self._dist.rank}.jsonl"
        write_atomically(path, "".join(lines), private)

    def _write_image(self, image: Image | None, stem: str) -> str | None:
        """Path relative to the run folder, or None without a picture."""
        if image is None:
            return None
        write_atomically(self.run_dir / f"{stem}.png", png_bytes(image))
        return f"{stem}.png"

    def _delete_images(self, last: int) -> None:
        """Delete this rank's pictures up to iteration `last`, and on rank 0 folders that no rank
        writes to any more. Other files in these folders stay."""
        for folder in (self.run_dir / "images").glob("it_*"):
            match = ENTRY_NAMES["images"].fullmatch(folder.name)
            if match is None or int(match[1]) > last:
                continue
            with suppress(OSError):  # leave what cannot be deleted
                for path in folder.iterdir():
                    picture = PICTURE_NAME.fullmatch(path.name)
                    # The modulo: pictures of ranks of an earlier, larger start are deleted too.
                    if picture and int(picture[1]) % self._dist.world_size == self._dist.rank:
                        path.unlink()
                if self._dist.is_main and int(match[1]) <= last - MAX_WAITING:
                    folder.rmdir()


def _distinct_pictures(episodes_G: Sequence[Episode], bare: Episode | None) -> list[Image]:
    """A group's sources, target, bare arm, and completions' pictures; equal completions share one
    picture."""
    samples = [episode.prompt.sample for episode in episodes_G[:1]]
    pictures = [p for s in samples for p in (*s.sources, s.target) if p is not None]
    pictures += [e.image for e in (bare, *episodes_G) if e is not None and e.image is not None]
    return list({id(picture): picture for picture in pictures}.values())


def named_sources(sample: Sample) -> list[tuple[str, Image]]:
    """(stem of the file name, picture) of each source picture: 'source', 'source2', ..."""
    return [
        (f"source{'' if number == 1 else number}", picture)
        for number, picture in enumerate(sample.sources, 1)
    ]


def source_files(files: Sequence[str | None]) -> dict[str, Any]:
    """Keys of an episode's line; `other_source_files` only for several pictures."""
    first, *others = files or [None]
    return {"source_file": first} | ({"other_source_files": others} if others else {})


def provenance(episode: Episode, advantage: float | None) -> dict[str, Any]:
    """Everything needed to trace one reward, from the instruction to the judge's replies.
    `advantage` is None if the episode is UNGRADED."""
    sample, completion, action = episode.prompt.sample, episode.completion, episode.action
    regions = {name: [asdict(each) for each in named] for name, named in episode.regions.items()}
    return {
        "sample_id": sample.id,
        "group_id": episode.group_id,
        "category": sample.category,
        "instruction": sample.instruction,
        "completion": action.text,
        **({"thought": action.thought, "words": action.words} if action.thought else {}),
        "finish": completion.finish,
        "status": episode.status.value,
        "failure": episode.failure,
        "reward": episode.reward,
        "advantage": advantage,
        "parts": dict(episode.parts),
        "judge_s": episode.judge_s,
        "replies": {name: list(replies) for name, replies in episode.replies.items()},
        **({"regions": regions} if regions else {}),
        "noise_seed": episode.noise_seed,
        "token_ids": list(completion.token_ids),
        "sampler_logprobs": [round(logprob, _LOGPROB_DIGITS) for logprob in completion.logprobs],
        "forced": None if completion.forced is None else [int(f) for f in completion.forced],
    }
