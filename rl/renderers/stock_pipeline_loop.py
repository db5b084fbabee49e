"""Calls a pipeline of diffusers, and tests at the start how it may be called."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from diffusers.utils.logging import disable_progress_bar
from PIL import Image

from rl.api.find import import_plugin
from rl.api.types import RenderFailure, RenderJob, Sample
from rl.config.loading import is_dotted_path
from rl.model_files import align_weights
from rl.progress import weights_counted
from rl.ranks.signals import is_lost_device
from rl.renderers.diffusion_loop import DiffusionLoop, Outcome
from rl.renderers.stock_pipeline_config import Config, batch_of, call_problems, sources_problem

logger = logging.getLogger(__name__)
# Pipelines warn at every call, for example that a distilled model ignores guidance.
logging.getLogger("diffusers.pipelines").setLevel(logging.ERROR)

TEST_SIDE_PX = 512
"""Sides of the start-up test's source pictures if the config states no size."""
NO_EFFECT = 1e-5
"""Two pictures (0..1) whose mean difference is below this are the same picture."""
SAFE_SHARE = 0.1
"""A batch, or a repetition, may change a picture by this share of what other words or another
source change."""


def load_parts(config: Config, device: str) -> Any:
    """The pipeline; its weights are where `config.residency` says. Raises ValueError if there is no
    such class, or if its call does not take what the config gives it."""
    is_own = is_dotted_path(config.pipeline)
    cls, wrong = import_plugin(config.pipeline if is_own else f"diffusers.{config.pipeline}")
    if wrong:
        raise ValueError(f"renderer.pipeline: {wrong[0]}")
    if not hasattr(cls, "from_pretrained"):
        raise ValueError(
            f"renderer.pipeline: {config.pipeline} is no pipeline; name a class that derives from "
            "diffusers.DiffusionPipeline"
        )
    arguments = inspect.signature(cls.__call__).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in arguments.values())
    if problems := list(call_problems(config, None if takes_any else arguments.keys())):
        raise ValueError("\n".join(f"renderer.{problem}" for problem in problems))
    disable_progress_bar()
    with weights_counted():
        pipeline = cls.from_pretrained(
            config.model_path,
            revision=config.revision,
            dtype=getattr(torch, config.dtype),
            use_safetensors=True,
        )
    return placed(pipeline, config, device)


def placed(pipeline: Any, config: Config, device: str) -> Any:
    """`pipeline`, ready to be called; its weights are where `config.residency` says."""
    if config.residency == "host" and device != "cpu":
        pipeline.enable_model_cpu_offload(device=device)
    else:
        pipeline.to(device)
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            align_weights(part, device)
            part.eval().requires_grad_(False)
    if hasattr(getattr(pipeline, "vae", None), "enable_slicing"):
        pipeline.vae.enable_slicing()
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


class StockLoop(DiffusionLoop[Config, Any]):
    """Draws what `pipeline(image=..., prompt=..., generator=...)` draws."""

    def __init__(self, config: Config, parts: Any) -> None:
        """`parts`: a pipeline of diffusers, on its device."""
        if config.call.together == "one":
            config = config.model_copy(update={"batch_size": 1})
        super().__init__(config, parts, vae_factor=1)
        self._is_tried = False
        self._cut_tokens: list[int] = []
        self._warned = False

    def render(self, jobs: Iterable[RenderJob]) -> Iterator[tuple[int, Outcome]]:
        if not self._is_tried:
            self.try_out()
            self._is_tried = True
        return super().render(jobs)

    def take_metrics(self) -> dict[str, float]:
        cuts, self._cut_tokens = self._cut_tokens, []
        if not cuts:
            return {}
        return {"cut_share": fmean(cut > 0 for cut in cuts), "cut_tokens": fmean(cuts)}

    @staticmethod
    def bucket_of(config: Config, job: RenderJob) -> Any:
        return batch_of(config, job)[0]

    def _failure_of(self, job: RenderJob) -> RenderFailure | None:
        call = self.config.call
        if not call.cuts and (over := self._num_cut(self.config.prompt_of(job.payload))):
            return RenderFailure(f"too_long: {over} tokens beyond the limit", blame="policy")
        problem = sources_problem(self.config, [source.size for source in job.sample.sources])
        return RenderFailure(f"sources: the sample {problem}") if problem else None

    @torch.no_grad()
    def render_tensor(self, jobs: Sequence[RenderJob], bucket: Any = None) -> torch.Tensor:
        """Render a batch: [B, 3, H, W], float32 on the CPU, -1..1."""
        cuts = [self._num_cut(self.config.prompt_of(job.payload)) for job in jobs]
        self._cut_tokens += [cut for cut in cuts if cut is not None]
        return 2 * self._draw(jobs) - 1

    def _draw(self, jobs: Sequence[RenderJob]) -> torch.Tensor:
        """[B, 3, H, W], float32 on the CPU, 0..1."""
        config, call = self.config, self.config.call
        prompts = [config.prompt_of(job.payload) for job in jobs]
        arguments: dict[str, Any] = {**call.arguments, **config.arguments}
        if config.num_steps is not None:
            arguments["num_inference_steps"] = config.num_steps
        if config.height_px and config.width_px:
            arguments |= {"height": config.height_px, "width": config.width_px}
            if call.area:
                arguments[call.area] = config.height_px * config.width_px
        sources_B = [job.sample.sources for job in jobs]
        if call.image and sources_B[0]:
            several_sets = len(jobs) > 1 and call.together == "all"
            one_set = list(sources_B[0]) if call.max_images > 1 else sources_B[0][0]
            arguments[call.image] = [s[0] for s in sources_B] if several_sets else one_set
        generators = [torch.Generator("cpu").manual_seed(job.noise_seed) for job in jobs]
        # Not every pipeline that takes a list takes a list of one. Some draw noise from the global
        # generator, too, although they are given one.
        device = self.parts._execution_device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(jobs[0].noise_seed)
            pictures = self.parts(
                prompt=prompts[0] if len(jobs) == 1 else list(prompts),
                generator=generators[0] if len(jobs) == 1 else generators,
                output_type="pt",
                **arguments,
            ).images
        if not isinstance(pictures, torch.Tensor):
            pictures = torch.stack(list(pictures))
        if len(pictures) != len(jobs):
            raise ValueError(f"{len(pictures)} pictures for {len(jobs)} prompts")
        return pictures.float().cpu()

    def _num_cut(self, prompt: str) -> int | None:
        """Tokens of the prompt that the pipeline does not read; None: not known. Warns once of the
        first such prompt."""
        call, tokenizer = self.config.call, getattr(self.parts, self.config.call.tokenizer, None)
        limit = {**call.arguments, **self.config.arguments}.get("max_sequence_length")
        limit = call.max_tokens if limit is None else limit
        if not limit or tokenizer is None:
            return None
        ids = tokenizer(prompt, add_special_tokens=False, verbose=False).input_ids
        cut = max(0, len(ids) + call.added_tokens - limit)
        if cut and not self._warned:
            self._warned = True
            logger.warning(
                "renderer diffusers: %s reads %d tokens, and a prompt has %d more. Ask for fewer "
                "words in policy.system_prompt, or lower sampling.max_completion_tokens (logged "
                "once, counted always). The prompt: %.300s",
                *(self.config.pipeline, limit, cut, prompt),
            )
        return cut

    @torch.no_grad()
    def try_out(self) -> None:
        """The start-up test: draw made-up jobs and compare their pictures. Raises ValueError if the
        words or the source picture do not change a picture, or if the same job gives two different
        pictures. If a batch fails, or changes a picture, the loop draws one by one from now on."""
        name, jobs = self.config.pipeline, made_up_jobs(self.config)
        try:
            self._num_cut(self.config.prompt_of(jobs["base"].payload))
            alone = {job: self._draw([jobs[job]])[0] for job in jobs}
            again = self._draw([jobs["base"]])[0]
        except Exception as error:
            if is_lost_device(error) or isinstance(error, torch.OutOfMemoryError):
                raise
            raise ValueError(
                f"renderer.pipeline: the start-up test of {name} fails ({type(error).__name__}: "
                f"{error}); check renderer.arguments and renderer.interface (image: null where it "
                "takes no picture)"
            ) from error
        if not all(((picture >= 0) & (picture <= 1)).all() for picture in alone.values()):
            raise ValueError(
                f"renderer.pipeline: in the start-up test {name} draws NaN, or values beyond 0..1; "
                "try another renderer.dtype (your own class: a tensor of 0..1 for output_type 'pt')"
            )
        effects = {job: distance(alone["base"], alone[job]) for job in jobs if job != "base"}
        noise = effects.pop("noise")
        for job, effect in effects.items():
            if not effect > NO_EFFECT:
                raise ValueError(
                    f"renderer.pipeline: {name} draws the same picture for another {job}; check "
                    "renderer.interface (image, prompt) and renderer.arguments"
                )
        if not noise > NO_EFFECT:
            logger.warning("renderer diffusers: the seed does not change the pictures of %s", name)
        most_apart = SAFE_SHARE * min(effects.values())
        if not (apart := distance(alone["base"], again)) <= most_apart:
            raise ValueError(
                f"renderer.pipeline: {name} draws another picture from the same seed, {apart:.2g} "
                f"apart on average (others: {effects}); turn off what is random in it"
            )
        if reason := self._batch_problem(jobs, alone, most_apart):
            self.config = self.config.model_copy(update={"batch_size": 1})
            logger.warning(
                "renderer diffusers: %s draws pictures one by one, because a batch %s", name, reason
            )

    def _batch_problem(
        self, jobs: Mapping[str, RenderJob], alone: Mapping[str, torch.Tensor], most_apart: float
    ) -> str:
        """What is wrong if `jobs` are drawn in one batch; '' if nothing is, or they never share a
        batch. `alone`: their pictures, drawn one by one."""
        key, limit = batch_of(self.config, jobs["base"])
        if limit == 1:
            return ""
        names = [name for name in jobs if batch_of(self.config, jobs[name])[0] == key]
        apart: list[float] = []
        try:
            # The first and the last: in one of them an input differs, even if a batch has two.
            for part in dict.fromkeys([tuple(names[:limit]), tuple(names[-limit:])]):
                drawn = self._draw([jobs[name] for name in part])
                apart += map(distance, (alone[name] for name in part), drawn)
        except Exception as error:
            if is_lost_device(error):
                raise
            return f"fails ({type(error).__name__}: {error})"
        wrong = [each for each in apart if not each <= most_apart]
        return f"changes a picture by {max(wrong):.2g} on average" if wrong else ""


def made_up_jobs(config: Config) -> dict[str, RenderJob]:
    """A made-up job, and jobs that differ from it in one input each."""
    size = (config.width_px or TEST_SIDE_PX, config.height_px or TEST_SIDE_PX)
    gradient = Image.linear_gradient("L").resize(size)
    turned = gradient.rotate(180)
    pictures = [
        Image.merge("RGB", bands)
        for bands in [(gradient, turned, gradient), (turned, turned, gradient)]
    ]
    others = pictures[:1] if config.call.max_images > 1 else []  # the last one is to be read, too
    samples = [
        Sample(id=f"made-up {i}", instruction="", sources=(*others, picture))
        for i, picture in enumerate(pictures)
    ]
    words = "Turn the sky orange.", "Add a small white boat on the left."
    jobs = {
        "base": RenderJob(samples[0], words[0], 1),
        "prompt": RenderJob(samples[0], words[1], 1),
        "noise": RenderJob(samples[0], words[0], 2),
    }
    if config.call.image:
        jobs["source picture"] = RenderJob(samples[1], words[0], 1)
    return jobs


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Mean absolute difference of two pictures (0..1)."""
    return (one - other).abs().mean().item()
