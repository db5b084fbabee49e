"""The run folder: configs, metrics, episodes, pictures; set back to the checkpoint on a resume."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout
from PIL.Image import Image, new

from rl.api.types import Episode, Sample
from rl.config.schema import RunConfig
from rl.files import (
    append_line,
    digest,
    downscale,
    hold,
    json_line,
    lines_of,
    over_white,
    png_bytes,
    private,
    read_rows,
    release,
    row_of,
    write_atomically,
)
from rl.printing import excerpt, remember, scrubbed
from rl.progress import warn
from rl.ranks.dist import Dist
from rl.record.checkpoint import retry_until_space

if TYPE_CHECKING:
    from PIL.Image import Image

# ---- rewind --------------------------------------------------------------------------------------
# Moves records of iterations that a resumed run will repeat to `<run>/set_aside/<time>/`.

SET_ASIDE = "set_aside"
MAX_SHOWN = 60
ENTRY_NAMES = {
    "episodes": re.compile(r"it_(\d{6,})\.rank(\d+)\.jsonl"),
    "images": re.compile(r"it_(\d{6,})"),
    "thumbnails": re.compile(r"it_(\d{6,})"),
    "evaluation": re.compile(r"it_(\d{6,})"),
}
"""Folder of the run -> pattern of the names of its entries: iteration, rank."""
PICTURE_NAME = re.compile(r"rank\d+_g\d{2,}(?:_(?:source\d*|target|bare|m\d+)\.png|\.webp)")
"""Name of a picture in a folder of `images`, or of a sheet in one of `thumbnails`."""


def rewind(run_dir: Path, iteration: int) -> list[str]:
    """Move all records after `iteration` (-1: all records), and unreadable lines of
    metrics.jsonl, to a new folder; returns messages for the user."""
    metrics = run_dir / "metrics.jsonl"
    numbered = enumerate(lines_of(metrics), 1)
    rows = [(number, line, iteration_in(line)) for number, line in numbered if line.strip()]
    kept = [line for _, line, it in rows if it is not None and it <= iteration]
    aside = [line for _, line, it in rows if it is None or it > iteration]
    recorded = [entry for name in ENTRY_NAMES for entry in entries(run_dir / name).items()]
    repeated = [entry for entry, it in recorded if it > iteration]
    messages: list[str] = []
    # A missing line of `iteration` itself is not reported, because it is written again.
    if lost := sorted(set(range(iteration)).difference(it for *_, it in rows)):
        messages.append(f"{metrics} has no line of iterations {excerpt(str(lost), MAX_SHOWN)}")
    if not (aside or repeated):
        return messages
    (run_dir / SET_ASIDE).mkdir(exist_ok=True)
    began = time.strftime("%Y%m%d-%H%M%S-")
    folder = Path(tempfile.mkdtemp(prefix=began, dir=run_dir / SET_ASIDE))
    if aside:
        write_atomically(folder / "metrics.jsonl", b"".join(aside))
        write_atomically(metrics, b"".join(line.rstrip(b"\n") + b"\n" for line in kept))
    for entry in repeated:
        (folder / entry.parent.name).mkdir(exist_ok=True)
        shutil.move(entry, folder / entry.parent.name)  # `move`: it may be on another disk
    if (run_dir / "config.json").is_file():
        shutil.copy2(run_dir / "config.json", folder)
    what = f"records after iteration {iteration} are made again"
    if iteration < 0:
        what = "no iteration is in a checkpoint: the run begins again from the base weights"
    if damaged := [number for number, _, it in rows if it is None]:
        what += f", lines {damaged} of metrics.jsonl are damaged"
    return [f"{what}; what was recorded is set aside in {folder}", *messages]


def iteration_in(line: bytes) -> int | None:
    iteration = (row_of(line) or {}).get("iteration")
    return iteration if type(iteration) is int else None


def entries(folder: Path) -> dict[Path, int]:
    """The entries of one of the folders in `ENTRY_NAMES` -> their iterations, in order."""
    paths = folder.iterdir() if folder.is_dir() else ()
    matches = {path: ENTRY_NAMES[folder.name].fullmatch(path.name) for path in paths}
    numbers = {path: [*map(int, match.groups())] for path, match in matches.items() if match}
    return {path: numbers[path][0] for path in sorted(numbers, key=lambda path: numbers[path])}


# ---- writer --------------------------------------------------------------------------------------
# Writes a run's files in the background: one thread per process writes them all in order.

MAX_WAITING = 10
"""Maximum number of queued jobs, which hold pictures and weights: enough for two iterations."""


SLOW_S = 60.0


class BackgroundWriter(AbstractContextManager["BackgroundWriter"]):
    """Each rank has its own; only the main thread may use it."""

    def __init__(self, folder: Path, max_waiting: int = MAX_WAITING) -> None:
        self._folder = folder
        self._slots = threading.Semaphore(max_waiting + 1)
        self._thread = ThreadPoolExecutor(1, "writer")
        self._last: Future[None] | None = None
        self._errors: deque[BaseException] = deque()

    def put(self, label: str, write: Callable[[], object]) -> Future[None]:
        """Queue `write` behind all earlier jobs; the data it reads must not change any more. Blocks
        while the queue is full. Raises an earlier job's error, once; `write` is queued even then.
        The returned future is done once `write` has run."""
        if not self._slots.acquire(timeout=SLOW_S):
            warn(
                f"{self._folder}: the disk is slower than training, which waits for it (a smaller "
                "tracking.images_per_iteration writes less)"
            )
            self._slots.acquire()
        earlier = self._errors.popleft() if self._errors else None
        self._last = self._thread.submit(self._write, label, write)
        if earlier is not None:
            raise earlier
        return self._last

    def flush(self) -> None:
        """Wait until all jobs have run. Raises the error of a failed job, once."""
        self.drain()
        self._raise_first()

    def drain(self) -> None:
        """Wait until all jobs have run; their errors are raised later."""
        if self._last is not None:
            self._last.result()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Finish all queued jobs. Raises the error of a failed job, unless another error ends the
        run."""
        self.drain()
        self._thread.shutdown()
        if error is None:
            self._raise_first()

    def _raise_first(self) -> None:
        if self._errors:
            raise self._errors.popleft()

    def _write(self, label: str, write: Callable[[], object]) -> None:
        try:
            retry_until_space(write, self._folder, label)
        except BaseException as error:  # a real KeyboardInterrupt reaches only the main thread
            warn(f"{label} could not be written: {str(error) or repr(error)}")
            self._errors.append(error)
        finally:
            self._slots.release()


# ---- thumbnails ----------------------------------------------------------------------------------
# Small pictures of every training group: `<run>/thumbnails/it_000012/rank0_g03.webp` has all of a
# group, about 3 kB each.

THUMBNAIL_PX = 128
"""Longest side."""
_QUALITY = 70
_BLOCK_PX = 16
"""WebP's largest block: pictures start at multiples of it, so that none bleeds into another."""
_ROW_PX = 4096
"""Maximum width of a sheet; WebP's limit is 16,383."""


def write_thumbnails(run_dir: Path, name: str, pictures: Sequence[Image]) -> dict[int, str]:
    """Write pictures as one WebP, `<run>/thumbnails/<name>.webp`. Returns `id` of a picture -> its
    place, a path relative to the run folder with a media fragment (W3C):
    'thumbnails/it_000012/rank0_g03.webp#xywh=0,0,96,64', in px."""
    if not pictures:
        return {}
    small = [downscale(over_white(picture), THUMBNAIL_PX) for picture in pictures]
    cell = -(-max(max(each.size) for each in small) // _BLOCK_PX) * _BLOCK_PX
    columns = min(len(small), _ROW_PX // cell)
    rows = -(-len(small) // columns)
    sheet = new("RGB", (columns * cell, rows * cell), "white")
    file = f"thumbnails/{name}.webp"
    places = {}
    for i, (picture, each) in enumerate(zip(pictures, small, strict=True)):
        left, top = i % columns * cell, i // columns * cell
        sheet.paste(each, (left, top))
        places[id(picture)] = f"{file}#xywh={left},{top},{each.width},{each.height}"
    encoded = io.BytesIO()
    sheet.save(encoded, "WEBP", quality=_QUALITY, method=2)  # 4: 2x the time, 2 % fewer bytes
    write_atomically(run_dir / file, encoded.getvalue(), durable=False)
    return places


# ---- run record ----------------------------------------------------------------------------------
# Writes a run's config, metrics, episodes and pictures to the run folder.

_LOGPROB_DIGITS = 6
"""Float32 log-probs carry no more digits; all digits of a float64 take three times the space."""


class RunRecord:
    """The files of one run, as one rank writes them:

    <run>/config.json                        resolved config, environment secrets scrubbed
    <run>/metrics.jsonl                      one line per iteration, reduced over all ranks
    <run>/episodes/it_000012.rank0.jsonl     one line per episode of that rank (`provenance`)
    <run>/images/it_000012/rank0_g03_m5.png  pictures; `..._source.png` (`..._source2.png`, ...) and
                                             `..._target.png`: the group's sources and target
    <run>/thumbnails/it_000012/rank0_g03.webp  small pictures of a group (`write_thumbnails`)
    <run>/set_aside/                         records of iterations that were repeated (`rewind`)

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

    def write_config(self) -> None:
        if self._dist.is_main:
            text = json.dumps(self.config, indent=2, ensure_ascii=False) + "\n"
            write_atomically(self.run_dir / "config.json", text)

    def rewind(self, iteration: int) -> list[str]:
        """On rank 0, move the records of later iterations than `iteration` (-1: of all) to
        set_aside/, because the run repeats them. Returns messages for the user."""
        if not self._dist.is_main:
            return []
        messages = rewind(self.run_dir, iteration)
        episodes = self.run_dir / "episodes"
        is_recorded = iteration <= 0 or iteration in entries(episodes).values()
        if self._records_episodes(iteration) and not is_recorded:
            messages.append(f"{episodes} has none of iteration {iteration}")
        return messages

    def has_line(self, iteration: int) -> bool:
        return any(row.get("iteration") == iteration for row in self.lines())

    def lines(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; damaged ones are left out."""
        return read_rows(self.run_dir / "metrics.jsonl")[0]

    def write_metrics(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Append one line, flushed (rank 0). NaN and infinities are written as null."""
        if not self._dist.is_main:
            return
        append_line(self.run_dir / "metrics.jsonl", json_line({"iteration": iteration, **metrics}))

    def write_episodes(
        self,
        iteration: int,
        episodes_PG: Sequence[Sequence[Episode]],
        advantages_PG: Sequence[Sequence[float | None]],
        bare_P: Sequence[Episode | None] = (),
    ) -> None:
        """Write this rank's episodes, the bare variants (`bare_P`) in their groups' first lines,
        thumbnails, and its share of the iteration's `images_per_iteration` pictures, group by
        group; then delete old pictures and thumbnails (`keep_images_of_last_n_iterations`). Does
        nothing on iterations that `log_episodes_every_n_iterations` leaves out."""
        if not self._records_episodes(iteration):
            return
        bare_P = bare_P or [None] * len(episodes_PG)
        self._write_lines(iteration, episodes_PG, advantages_PG, bare_P)
        num_kept = self._tracking.keep_images_of_last_n_iterations
        if num_kept and self._dist.is_main:
            self._delete_images(iteration - num_kept)

    def _records_episodes(self, iteration: int) -> bool:
        every = self._tracking.log_episodes_every_n_iterations
        return every > 0 and iteration % every == 0

    def _write_lines(
        self,
        iteration: int,
        episodes_PG: Sequence[Sequence[Episode]],
        advantages_PG: Sequence[Sequence[float | None]],
        bare_P: Sequence[Episode | None],
    ) -> None:
        lines: list[str] = []
        num_here = sum(map(len, episodes_PG))
        # Ranks have equally many episodes, so how many pictures lower ranks write is known.
        images_left = self._tracking.images_per_iteration - self._dist.rank * num_here
        groups = zip(episodes_PG, advantages_PG, bare_P, strict=True)
        for p, (episodes_G, advantages_G, bare) in enumerate(groups):
            name = f"it_{iteration:06d}/rank{self._dist.rank}_g{p:02d}"
            stem = f"images/{name}"
            places = write_thumbnails(self.run_dir, name, _distinct_pictures(episodes_G, bare))
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
        """Delete all ranks' pictures and thumbnails up to iteration `last`, and folders that no
        rank writes to any more. Other files in these folders stay."""
        folders = entries(self.run_dir / "images") | entries(self.run_dir / "thumbnails")
        for folder, iteration in folders.items():
            if iteration <= last:
                with suppress(OSError):  # leave what cannot be deleted
                    for path in folder.iterdir():
                        if PICTURE_NAME.fullmatch(path.name):
                            path.unlink()
                    if iteration <= last - MAX_WAITING:
                        folder.rmdir()


def _distinct_pictures(episodes_G: Sequence[Episode], bare: Episode | None) -> list[Image]:
    """A group's sources, target, bare variant, and completions' pictures; equal completions share
    one picture."""
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
