"""Edits pictures with the model that a run trained, using the code of the held-out evaluation.

Axes: `_B` requests of a batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, Union

from rl import build
from rl.api.data import RowRules
from rl.api.plugin import PluginConfig, Resources
from rl.api.types import Completion, Episode, Prompt, Sample, SamplingParams, Status
from rl.config.schema import RunConfig
from rl.data.shared.rows import UnusableError, load_image
from rl.edit.trained import Trained, config_for_use, load_trained, pick_device
from rl.judge.http import BackgroundLoop
from rl.ranks.dist import Dist
from rl.renderers.none import NoRenderer
from rl.rollout.stream import RolloutContext
from rl.seeds import derive_seed

if TYPE_CHECKING:
    from PIL.Image import Image

SetWeights = Callable[[], AbstractContextManager[None]]
"""Makes a context in which a policy computes its hidden states with certain weights."""
ImageOrPath = Union["Image", Path, str]
"""A picture, or its file."""
Size = tuple[int, int]
"""(width, height), px."""
OWN_WORDS, UNTRAINED, STOCK = "bare", "before", "stock"
"""Names of the arms drawn beside the edit: from the user's instruction, from the words of the
untrained policy, and by the renderer's own pipeline without a policy."""


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
class Arm:
    """The edit, or one of the `arms` drawn for comparison with it."""

    words: str
    """The text without the thought."""
    image: Image | None
    """RGB; None: nothing was drawn."""
    failure: str | None = None
    """Why this arm failed; None: it did not."""


@dataclass(frozen=True, eq=False)
class EditResult:
    """The result of one request."""

    request: EditRequest
    sources: tuple[Image, ...]
    """RGB, upright, before the policy's own scaling."""
    original_sizes_px: tuple[Size | None, ...]
    """Size of each picture before it was scaled down; None: it was not scaled."""
    words: str
    """What the policy wrote for the renderer or, if the run has none, its answer."""
    thought: str
    """What the policy wrote before `words`."""
    image: Image | None
    """RGB; None: nothing was drawn."""
    failure: str | None
    """Why the edit failed; None if it did not, or if the run's renderer draws nothing."""
    arms: Mapping[str, Arm] = field(default_factory=dict)
    """Keys: `OWN_WORDS`, `UNTRAINED`, `STOCK`, if the run has that arm; all share the noise."""
    seed: int = 0
    noise_seed: int = 0
    token_ids: tuple[int, ...] = ()
    finish: Literal["stop", "length"] = "stop"
    seconds: float = 0.0
    """The request's share of its batch's time."""


def sample_of(
    request: EditRequest, rules: RowRules, needs_picture: bool
) -> tuple[Sample, tuple[Size | None, ...]]:
    """The request as a sample, and each picture's original size if it was scaled down. Raises
    ValueError for a request that cannot be edited. `needs_picture`: the renderer's."""
    if not request.instruction.strip():
        raise ValueError("the instruction is empty; say what the picture should show")
    images = request.images
    if not images and needs_picture:
        raise ValueError("this run edits pictures: give one with the instruction")
    if rules.max_pictures is not None and len(images) > rules.max_pictures:
        raise ValueError(
            f"{len(images)} pictures, but this run accepts {rules.max_pictures}; "
            f"{rules.pictures_remedy}"
        )
    try:
        pictures = [
            load_image(image, rules.max_image_side_px, rules.keeps_transparency) for image in images
        ]
    except UnusableError as error:
        raise ValueError(str(error)) from error
    sample = Sample(request.id, request.instruction, tuple(picture for picture, _ in pictures))
    return sample, tuple(size_px for _, size_px in pictures)


class Writer:
    """A policy and the engine that samples from it."""

    def __init__(self, config: RunConfig, dist: Dist) -> None:
        resolved = build.resolve(config)
        self.policy = build.build_policy(resolved, dist)
        self.engine = build.build_engine(resolved, self.policy, dist)

    def close(self) -> None:
        self.engine.close()
        self.policy.close()


class Editor:
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
        self._writer = Writer(config, self._dist)
        self.policy = self._writer.policy
        if only_words and "source_codes" in self.policy.needs:
            raise ValueError("this run's policy writes the picture itself, not words: use rl edit")
        resolved = build.resolve(config)
        self._rules = build.row_rules(resolved)
        self._loop = BackgroundLoop("edit")
        self.needs_picture: bool = resolved.renderer.cls.needs_source
        self.draws: bool = resolved.renderer.cls.makes_images and not only_words
        renderer = (
            NoRenderer(PluginConfig(type="none"), Resources(None, self.device))
            if only_words
            else build.build_renderer(resolved, self._dist)
        )
        self._context = RolloutContext(config, self.policy, renderer, {}, self.draws, self._loop)

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the models."""
        self._loop.close()
        self._context.renderer.close()
        self._writer.close()
        if "_untrained" in vars(self) and self._untrained[0] is not self._writer:
            self._untrained[0].close()

    def edit(
        self,
        image: ImageOrPath | Sequence[ImageOrPath] | None,
        instruction: str,
        *,
        seed: int = 0,
        arms: bool = False,
    ) -> EditResult:
        """Make one edit of one picture or of several. Raises ValueError if a picture cannot be read
        or the request is invalid; the result's `failure` reports a failure of the policy or the
        renderer. For many requests, use `edit_stream`."""
        request = EditRequest(instruction, image)
        self._sample(request)
        [result] = self.edit_stream([request], seed=seed, arms=arms)
        return result

    def edit_stream(
        self,
        requests: Iterable[EditRequest],
        *,
        batch_size: int = 8,
        seed: int = 0,
        arms: bool = False,
    ) -> Iterator[EditResult]:
        """Yield one result per request, in order, as soon as its batch is done.

        A result depends on its request and `seed`, not on the rest of the batch (but for float
        rounding). An invalid request (a damaged file, an instruction that is too long) gives a
        result with its `failure`.

        Args:
            requests: taken a batch at a time.
            batch_size: requests sampled and drawn together, >= 1.
            seed: for the sampling of words and for the noise.
            arms: also draw the arms of `EditResult.arms`; each costs as much as the edit.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; a batch holds one request at least")
        remaining = iter(requests)
        batches = iter(lambda: list(islice(remaining, batch_size)), [])
        return (result for batch in batches for result in self._edit_batch(batch, seed, arms))

    def _edit_batch(
        self, requests_B: Sequence[EditRequest], seed: int, arms: bool
    ) -> list[EditResult]:
        began = time.monotonic()
        results: dict[int, EditResult] = {}
        prepared: dict[int, tuple[Prompt, tuple[Size | None, ...]]] = {}
        for b, request in enumerate(requests_B):
            try:
                sample, original_sizes_px = self._sample(request)
                if "source_codes" in self.policy.needs:
                    [sample] = self._context.renderer.encode_sources([sample], self._area_px)
                prepared[b] = self.policy.build_prompt(sample), original_sizes_px
            except ValueError as error:  # only this request fails
                results[b] = EditResult(request, (), (), "", "", None, str(error), seed=seed)
        prompts = [prompt for prompt, _ in prepared.values()]
        drawn = self._draw(prompts, seed, arms) if prompts else []
        seconds = (time.monotonic() - began) / max(1, len(prompts))
        for (b, (prompt, original_sizes_px)), (episode, other_arms) in zip(
            prepared.items(), drawn, strict=True
        ):
            arm = self._arm(episode)
            results[b] = EditResult(
                requests_B[b],
                prompt.sample.sources,
                original_sizes_px,
                arm.words,
                episode.action.thought,
                arm.image,
                arm.failure,
                {name: self._arm(other) for name, other in other_arms.items()},
                seed,
                episode.noise_seed,
                episode.completion.token_ids,
                episode.completion.finish,
                seconds,
            )
        return [results[b] for b in range(len(requests_B))]

    def _sample(self, request: EditRequest) -> tuple[Sample, tuple[Size | None, ...]]:
        return sample_of(request, self._rules, self.needs_picture)

    @cached_property
    def _area_px(self) -> int:
        """Area at which a VQ encoder reads a source picture, px^2."""
        if self._size_px:
            return self._size_px[0] * self._size_px[-1]
        return self.trained.source_area_px() if self.trained else 512 * 512

    def _draw(
        self, prompts_B: Sequence[Prompt], seed: int, arms: bool
    ) -> list[tuple[Episode, dict[str, Episode]]]:
        """For each request: the edit's episode, and the episodes of the arms by name."""
        completions_B = self._write(prompts_B, seed, self._writer)
        bare_B = [
            self.policy.pass_through_completion(p.sample) if arms else None for p in prompts_B
        ]
        edits_B, bares_B = self._render(prompts_B, completions_B, bare_B, seed, self._writer)
        arms_B: list[dict[str, Episode]] = [
            {} if bare is None else {OWN_WORDS: bare} for bare in bares_B
        ]
        if arms:
            untrained, weights = self._untrained
            with weights():
                written_B = self._write(prompts_B, seed, untrained)
            drawn: dict[str, tuple[Sequence[Prompt], Sequence[Completion]]]
            drawn = {UNTRAINED: (prompts_B, written_B)}
            stock_B = [untrained.policy.stock_arms(prompt).get(STOCK) for prompt in prompts_B]
            # A renderer that reads only words would draw the same picture as for the bare arm.
            if untrained.policy.reads_states and all(stock_B):
                stock_prompts, stock_completions = zip(*filter(None, stock_B), strict=True)
                drawn[STOCK] = stock_prompts, stock_completions
            for name, (prompts, completions) in drawn.items():
                none_B = [None] * len(prompts)
                episodes_B, _ = self._render(prompts, completions, none_B, seed, untrained, weights)
                for episodes_by_arm, episode in zip(arms_B, episodes_B, strict=True):
                    episodes_by_arm[name] = episode
        return list(zip(edits_B, arms_B, strict=True))

    @cached_property
    def _untrained(self) -> tuple[Writer, SetWeights]:
        """The untrained policy and a context that sets its weights: the same policy without its
        adapter or, after full fine-tuning, a second policy."""
        if self.policy.config.lora is not None or self._base_policy is None:
            return self._writer, self.policy.reference
        base = self.config.model_copy(update={"policy": dict(self._base_policy)})
        return Writer(base, self._dist), nullcontext

    def _write(self, prompts_B: Sequence[Prompt], seed: int, writer: Writer) -> list[Completion]:
        params = SamplingParams(
            temperature=self.config.evaluation.temperature,
            top_p=1.0,
            top_k=self.config.evaluation.top_k,
            max_tokens=self.config.sampling.max_completion_tokens,
            num_completions=1,
        )
        seeds_B = [derive_seed("evaluation", seed, "sampling", p.sample.id) for p in prompts_B]
        return [group[0] for group in writer.engine.generate(prompts_B, params, seeds_B)]

    def _render(
        self,
        prompts_B: Sequence[Prompt],
        completions_B: Sequence[Completion],
        bare_B: Sequence[Completion | None],
        seed: int,
        writer: Writer,
        weights: SetWeights = nullcontext,
    ) -> tuple[list[Episode], list[Episode | None]]:
        """Ungraded episodes of (the completions, the bare arm), each _B."""
        from rl.run.evaluation import score

        config = self.config.model_copy(update={"seed": seed})
        context = replace(self._context, config=config, policy=writer.policy)
        groups_B1 = [[completion] for completion in completions_B]
        rollout = score(context, prompts_B, groups_B1, bare_B, self._dist, weights)
        return [episode for (episode,) in rollout.episodes], rollout.bare_episodes

    def _arm(self, episode: Episode) -> Arm:
        words = episode.action.words.strip()
        # Nothing is graded here, so UNGRADED is not a failure.
        failed = episode.status is Status.POLICY_FAILED or (self.draws and episode.image is None)
        return Arm(words, episode.image, episode.failure if failed else None)
