"""Edits pictures with a run's config and one checkpoint's weights, as held-out evaluations do."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, Union

from rl import build
from rl.api.data import RowRules
from rl.api.engine import Engine
from rl.api.plugin import PluginConfig, Resources
from rl.api.policy import Policy
from rl.api.types import Episode, Prompt, Sample, Status
from rl.check.this_machine import installed
from rl.config.loading import not_a_file
from rl.config.schema import RunConfig
from rl.data.rows import Columns, Lines, UnusableError, check_text, load_image, source_cells
from rl.files import png_bytes, side_by_side, write_atomically
from rl.judge.http import BackgroundLoop
from rl.printing import scrubbed
from rl.ranks.dist import Dist
from rl.renderers.none import NoRenderer
from rl.rollout.stream import RolloutContext
from rl.run.checks import BARE, POLICY
from rl.run.evaluation import STOCK, Drawn, SetWeights, Variants, own_words, score, write
from rl.tools.trained import Trained, config_for_use, load_trained, pick_device

if TYPE_CHECKING:
    from PIL.Image import Image

# ---- editor --------------------------------------------------------------------------------------
# Edits pictures with the model that a run trained, using the code of the held-out evaluation.
#
# Axes: `_B` requests of a batch.

ImageOrPath = Union["Image", Path, str]
"""A picture, or its file."""
OWN_WORDS, UNTRAINED = BARE, "before"
"""Names of two variants drawn beside the edit: from the user's instruction, and from the words of
the untrained policy. The third is `STOCK`."""


@dataclass(frozen=True, eq=False)
class EditRequest:
    """One edit to make."""

    instruction: str
    """Written by the user; special tokens in it are read as plain text."""
    image: ImageOrPath | Sequence[ImageOrPath] | None = None
    """The picture, or several, which the instruction may number in this order; None: draw from the
    instruction alone."""
    id: str = "edit"
    """Seeds sampling and noise, together with `seed`: requests with equal ids share their noise."""

    @property
    def images(self) -> tuple[ImageOrPath, ...]:
        """All pictures, in order."""
        if isinstance(self.image, Path | str) or not isinstance(self.image, Sequence):
            return () if self.image is None else (self.image,)
        return tuple(self.image)


@dataclass(frozen=True, eq=False)
class Variant:
    """The edit, or one of the variants drawn for comparison with it."""

    words: str
    """The text without the thought."""
    image: Image | None
    """RGB; None: nothing was drawn."""
    failure: str | None = None
    """Why this variant failed; None: it did not."""


@dataclass(frozen=True, eq=False, kw_only=True)
class EditResult(Variant):
    """The result of one request: the edit, whose `words` are an answer if the run has no renderer,
    and what belongs to it."""

    request: EditRequest
    sources: tuple[Image, ...] = ()
    """RGB, upright, before the policy's own scaling."""
    thought: str = ""
    """What the policy wrote before `words`."""
    variants: Mapping[str, Variant] = field(default_factory=dict)
    """Keys: `OWN_WORDS`, `UNTRAINED`, `STOCK`, if the run has that variant; all share the noise."""
    seed: int = 0
    noise_seed: int = 0
    token_ids: tuple[int, ...] = ()
    finish: Literal["stop", "length"] = "stop"
    seconds: float = 0.0
    """The request's share of its batch's time."""


def sample_of(request: EditRequest, rules: RowRules, needs_picture: bool) -> Sample:
    """The request as a sample. Raises ValueError for one that cannot be edited. `needs_picture`:
    the renderer's."""
    if not request.instruction.strip():
        raise ValueError("the instruction is empty; say what the picture should show")
    images = request.images
    if not images and needs_picture:
        raise ValueError("this run edits pictures: give one with the instruction")
    if rules.max_pictures is not None and len(images) > rules.max_pictures:
        raise ValueError(
            f"{len(images)} pictures, but this run accepts {rules.max_pictures}; give fewer"
        )
    side_px, is_transparent = rules.max_image_side_px, rules.keeps_transparency
    try:
        sources = tuple(load_image(image, side_px, is_transparent) for image in images)
    except UnusableError as error:
        raise ValueError(str(error)) from error
    return Sample(request.id, request.instruction, sources)


class Editor(AbstractContextManager["Editor"]):
    """A loaded run. Close it, or use it as a context manager.

        editor = Editor.from_run("runs/my-run", checkpoint="best")
        result = editor.edit("photo.jpg", "make the sky red")
        result.image.save("red.png"); print(result.words)
        editor.edit(["room.jpg", "lamp.jpg"], "put the lamp of picture 2 into picture 1")

    A held-out sample, requested with its id and the run's seed, gives bit for bit the same result
    as in the held-out evaluation."""

    def __init__(
        self,
        config: RunConfig,
        device: str = "auto",
        trained: Trained | None = None,
        base_policy: Mapping[str, Any] | None = None,
        size_px: tuple[int, ...] = (),
        only_words: bool = False,
    ) -> None:
        """Load policy and renderer.

        Args:
            config: a run's config, as `config_for_use` adapts it.
            device: 'auto' = CUDA, else the CPU.
            trained: the checkpoint that the weights come from.
            base_policy: the config section of the untrained policy.
            size_px: size at which a VQ encoder reads a source; (): that of the run's pictures.
            only_words: load no renderer and draw nothing.

        Raises ValueError for problems that the user can fix.
        """
        self.config = config
        self.trained = trained
        self.device = pick_device(device)
        self._base_policy = base_policy
        self._size_px = size_px
        self._dist = Dist(device=self.device)
        self._closing = ExitStack()
        self.policy, self._engine = self._load(config)
        if only_words and "source_codes" in self.policy.needs:
            raise ValueError("this run's policy writes the picture itself, not words: use rl edit")
        resolved = build.resolve(config)
        self._rules = build.row_rules(resolved)
        loop = BackgroundLoop("edit")
        drawer = resolved.renderer
        self.needs_picture: bool = drawer.cls.needs_source_with(drawer.config)
        self.draws: bool = resolved.renderer.cls.makes_images and not only_words
        renderer = (
            NoRenderer(PluginConfig(type="none"), Resources(None, self.device))
            if only_words
            else build.build_renderer(resolved, self._dist)
        )
        self._context = RolloutContext(config, self.policy, renderer, {}, self.draws, loop)
        self._closing.callback(renderer.close)
        self._closing.callback(loop.close)

    def _load(self, config: RunConfig) -> tuple[Policy[Any], Engine[Any]]:
        """A policy and the engine that samples from it."""
        resolved = build.resolve(config)
        policy = build.build_policy(resolved, self._dist)
        self._closing.callback(policy.close)
        engine = build.build_engine(resolved, policy, self._dist)
        self._closing.callback(engine.close)
        return policy, engine

    @classmethod
    def from_run(
        cls,
        run: str | Path,
        checkpoint: str = "latest",
        *,
        settings: Sequence[str] = (),
        device: str = "auto",
        num_steps: int | None = None,
        size_px: tuple[int, ...] = (),
        only_words: bool = False,
    ) -> Self:
        """Load a run; the arguments are those of `load_trained`, `config_for_use` and `Editor`."""
        trained = load_trained(Path(run), checkpoint)
        config, base_policy = config_for_use(
            trained, settings, device, num_steps, size_px, only_words
        )
        return cls(config, device, trained, base_policy, size_px, only_words)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the models."""
        self._closing.close()

    def edit(
        self,
        image: ImageOrPath | Sequence[ImageOrPath] | None,
        instruction: str,
        *,
        seed: int = 0,
        variants: bool = False,
    ) -> EditResult:
        """Make one edit of one picture or of several. Raises ValueError if a picture cannot be read
        or the request is invalid; the result's `failure` reports a failure of the policy or the
        renderer. For many requests, use `edit_stream`."""
        request = EditRequest(instruction, image)
        self._sample(request)
        [result] = self.edit_stream([request], seed=seed, variants=variants)
        return result

    def edit_stream(
        self,
        requests: Iterable[EditRequest],
        *,
        batch_size: int = 8,
        seed: int = 0,
        variants: bool = False,
    ) -> Iterator[EditResult]:
        """Yield one result per request, in order, as soon as its batch is done.

        A result depends on its request and `seed`, not on the rest of the batch (but for float
        rounding). An invalid request (a damaged file, an instruction that is too long) gives a
        result with its `failure`.

        Args:
            requests: taken a batch at a time.
            batch_size: requests sampled and drawn together, >= 1.
            seed: for the sampling of words and for the noise.
            variants: also draw those of `EditResult.variants`; each costs as much as the edit.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; a batch holds one request at least")
        remaining = iter(requests)
        batches = iter(lambda: list(islice(remaining, batch_size)), [])
        return (result for batch in batches for result in self._edit_batch(batch, seed, variants))

    def _edit_batch(
        self, requests_B: Sequence[EditRequest], seed: int, variants: bool
    ) -> list[EditResult]:
        began = time.monotonic()
        results: dict[int, EditResult] = {}
        prompts: dict[int, Prompt] = {}
        for b, request in enumerate(requests_B):
            try:
                sample = self._sample(request)
                if "source_codes" in self.policy.needs:
                    [sample] = self._context.renderer.encode_sources([sample], self._area_px)
                prompts[b] = self.policy.build_prompt(sample)
            except ValueError as error:  # only this request fails
                results[b] = EditResult("", None, str(error), request=request, seed=seed)
        drawn_B = self._draw(list(prompts.values()), seed, variants) if prompts else []
        seconds = (time.monotonic() - began) / max(1, len(prompts))
        for (b, prompt), drawn in zip(prompts.items(), drawn_B, strict=True):
            shown = {name: self._variant(episode) for name, episode in drawn.items()}
            edit, episode = shown.pop(POLICY), drawn[POLICY]
            results[b] = EditResult(
                **vars(edit),
                request=requests_B[b],
                sources=prompt.sample.sources,
                thought=episode.action.thought,
                variants=shown,
                seed=seed,
                noise_seed=episode.noise_seed,
                token_ids=episode.completion.token_ids,
                finish=episode.completion.finish,
                seconds=seconds,
            )
        return [results[b] for b in range(len(requests_B))]

    def _sample(self, request: EditRequest) -> Sample:
        return sample_of(request, self._rules, self.needs_picture)

    @cached_property
    def _area_px(self) -> int:
        """Area at which a VQ encoder reads a source picture, px^2."""
        if self._size_px:
            return self._size_px[0] * self._size_px[-1]
        return self.trained.source_area_px() if self.trained else 512 * 512

    def _draw(self, prompts_B: Sequence[Prompt], seed: int, variants: bool) -> list[Drawn]:
        """_B, the episodes, not graded, of `POLICY`, the edit, and of the others."""
        context = replace(self._context, config=self.config.model_copy(update={"seed": seed}))
        rows_B: list[Variants] = [{POLICY: row} for row in write(context, self._engine, prompts_B)]
        if not variants:
            return score(context, rows_B, self._dist)
        for rows, prompt in zip(rows_B, prompts_B, strict=True):
            rows |= own_words(self.policy, prompt)
        drawn_B = score(context, rows_B, self._dist)
        policy, engine, weights = self._untrained
        context = replace(context, policy=policy)
        beside_B: list[Variants] = [{} for _ in prompts_B]
        if not (self.trained and self.trained.untrained):  # else it would be the edit
            with weights():
                written_B = write(context, engine, prompts_B)
            beside_B = [{UNTRAINED: row} for row in written_B]
        if policy.reads_states:  # else it would be the picture of the user's own words
            for beside, prompt in zip(beside_B, prompts_B, strict=True):
                stock = policy.stock_arms(prompt)
                beside |= {STOCK: stock[STOCK]} if STOCK in stock else {}
        others_B = score(context, beside_B, self._dist, weights)
        return [drawn | others for drawn, others in zip(drawn_B, others_B, strict=True)]

    @cached_property
    def _untrained(self) -> tuple[Policy[Any], Engine[Any], SetWeights]:
        """The untrained policy, its engine and a context that sets its weights: the same policy
        without its adapter or, after full fine-tuning, a second policy."""
        if self.policy.config.lora is not None or self._base_policy is None:
            return self.policy, self._engine, self.policy.reference
        base = self.config.model_copy(update={"policy": dict(self._base_policy)})
        return *self._load(base), nullcontext

    def _variant(self, episode: Episode) -> Variant:
        words = episode.action.words.strip()
        # Nothing is graded here, so UNGRADED is not a failure.
        failed = episode.status is Status.POLICY_FAILED or (self.draws and episode.image is None)
        return Variant(words, episode.image, episode.failure if failed else None)


# ---- edit files ----------------------------------------------------------------------------------
# Reads the edits that a user asks for, and writes their pictures, sheets and JSON files.

PICTURES = frozenset(
    (".avif", ".bmp", ".gif", ".heic", ".heif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
)
"""File name endings of the pictures that are taken from a folder."""
MAX_NAME_CHARS = 60


def requests_of(paths: Sequence[Path], instruction: str | None) -> list[EditRequest]:
    """The edits that a user asks for: one edit of one or several pictures, an edit of each picture
    in a folder, an edit per row of a JSONL file, or a picture drawn from an instruction alone.

    A row is `{"image": "photo.jpg", "instruction": "make the sky red"}`, or has `"images": [...]`;
    its paths are relative to the file's folder; a row without an instruction gets `instruction`.

    Raises ValueError, naming the file or row.
    """
    if not paths:
        if instruction is None:
            raise ValueError("nothing to do: give a picture and an instruction, or a .jsonl file")
        return [EditRequest(instruction)]
    [*_, path] = paths
    if len(paths) == 1 and path.suffix == ".jsonl":
        return _requests_in(path, instruction)
    is_picture = Path(instruction or "").suffix.lower() in PICTURES
    if instruction is None or (is_picture and not not_a_file(Path(instruction))):
        raise ValueError(
            f"{instruction or path}: say what to do with it; the instruction comes last: "
            f"rl edit --run RUN {instruction or path} 'your words'"
        )
    if len(paths) == 1 and path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in PICTURES)
        if not files:
            raise ValueError(f"{path} holds no picture ({', '.join(sorted(PICTURES))})")
        return [EditRequest(instruction, file) for file in files]
    for path in paths:
        if why := not_a_file(path):
            raise ValueError(
                f"{path} {why}; paths start at {Path.cwd()}, and several arguments are the "
                "pictures of one edit, with the instruction last, in quotes"
            )
    return [EditRequest(instruction, tuple(paths))]


def unusable(requests: Sequence[EditRequest], config: RunConfig) -> dict[str, str]:
    """Name -> why the request cannot be edited with the run; nothing is loaded."""
    resolved = build.resolve(config)
    needs_picture = resolved.renderer.cls.needs_source_with(resolved.renderer.config)
    reasons = {}
    for number, request in enumerate(requests, 1):
        try:
            sample_of(request, build.row_rules(resolved), needs_picture)
        except ValueError as error:
            reasons[f"[{number}/{len(requests)}]"] = str(error)
    return reasons


def _requests_in(path: Path, instruction: str | None) -> list[EditRequest]:
    lines, requests, problems = Lines(path), [], []
    columns = Columns(source_optional=True)
    for index, number in enumerate(lines.numbers):
        try:
            row = {"instruction": instruction, **lines[index]}
            check_text(row, columns)
            cells = [cell for _, cell in source_cells(row, columns)]
            if other := [cell for cell in cells if not isinstance(cell, str)]:
                raise UnusableError(f"holds {other[0]!r:.60}, not the path of a picture")
        except UnusableError as error:
            problems.append(f"{path}, row {number}: {error}")
        else:
            images = [path.parent / cell for cell in cells]
            requests.append(EditRequest(row["instruction"], images))
    if problems:
        raise ValueError("\n".join(problems))
    return requests


def free_stem(folder: Path, request: EditRequest) -> Path:
    """A path `<folder>/<name>`, without an extension, for which no output file exists yet; the name
    is made from the pictures' names or, if there is no picture, from the instruction."""
    stems = [Path(image).stem for image in request.images if isinstance(image, Path | str)]
    name = "-".join(stems) or request.instruction
    name = re.sub(r"[^\w.-]+", "-", name).strip("-._")[:MAX_NAME_CHARS] or "edit"
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    endings = (".png", ".json", "_sheet.png")
    return next(
        folder / name
        for name in names
        if not any((folder / f"{name}{ending}").exists() for ending in endings)
    )


def save(editor: Editor, result: EditResult, stem: Path) -> list[Path]:
    """Write the picture and JSON; if other variants were drawn, also their pictures, and a sheet of
    all in a row. Returns the files' paths."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    variants = result.variants.items()
    drawn = {name: each.image for name, each in variants if each.image is not None}
    if result.image is not None:
        row = (*result.sources, result.image, *drawn.values())
        sheet = {"sheet": side_by_side(row)} if drawn else {}
        drawn = {"picture": result.image, **drawn, **sheet}
    files = {
        name: stem.with_name(stem.name + ("" if name == "picture" else f"_{name}") + ".png")
        for name in drawn
    }
    for name, image in drawn.items():
        write_atomically(files[name], png_bytes(image))
    json_file = stem.with_name(f"{stem.name}.json")
    note = as_json(editor, result, {name: file.name for name, file in files.items()})
    write_atomically(json_file, json.dumps(scrubbed(note), indent=2, ensure_ascii=False) + "\n")
    return [*files.values(), json_file]


def as_json(editor: Editor, result: EditResult, files: Mapping[str, str]) -> dict[str, Any]:
    """All inputs and settings that determine a result, so that it can be reproduced."""
    config, trained = editor.config, editor.trained
    pictures = [
        {
            "image": str(image) if isinstance(image, Path | str) else None,
            "shown_size_px": source and source.size,
        }
        for image, source in zip_longest(result.request.images or [None], result.sources)
    ]
    return {
        "instruction": result.request.instruction,
        **(pictures[0] if len(pictures) == 1 else {"images": pictures}),
        "words": result.words,
        "thought": result.thought,
        "failure": result.failure,
        "files": dict(files),
        "drawn_size_px": result.image and result.image.size,
        "beside": {
            name: {"words": variant.words, "failure": variant.failure}
            for name, variant in result.variants.items()
        },
        "seed": result.seed,
        "noise_seed": result.noise_seed,
        "token_ids": list(result.token_ids),
        "finish": result.finish,
        "seconds": round(result.seconds, 3),
        "run": trained
        and {
            "folder": trained.name,
            "checkpoint": None if trained.untrained else trained.model.parent.name,
            "iterations": trained.iterations,
            "held_out_reward": trained.metrics.get("eval/reward"),
        },
        "sampling": {
            "temperature": config.evaluation.temperature,
            "top_k": config.evaluation.top_k,
            "max_completion_tokens": config.sampling.max_completion_tokens,
        },
        "policy": dict(config.policy),
        "renderer": dict(config.renderer),
        "device": editor.device,
        "versions": installed("vlm-edit-rl"),
    }
