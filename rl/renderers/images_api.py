"""Renderer plugin: an editor or generator behind HTTP, with OpenAI's images API."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from typing import Annotated, Any, ClassVar

from PIL import Image, ImageChops, ImageStat
from pydantic import Field

from rl.api.judge import Question
from rl.api.metric import Metric
from rl.api.plugin import PluginConfig, Resources
from rl.api.renderer import Renderer
from rl.api.types import RenderFailure, RenderJob
from rl.config.schema import MAX_COUNT, MAX_S, MAX_SIDE_PX, JudgeConfig, RunConfig
from rl.files import digest, open_picture, over_white, png_bytes
from rl.judge.client import Asking, JudgeClient, JudgeError
from rl.judge.http import (
    POLL_S,
    BackgroundLoop,
    Request,
    StoppedError,
    auth_header,
    multipart,
    resolve_api_bases,
)
from rl.judge.reply import Chat, UnreadableReplyError, parsed, tokens_of
from rl.ranks import heartbeat, signals

logger = logging.getLogger(__name__)

SECTION = "renderer"
FORMATS = ("PNG", "JPEG", "WEBP")
KINDS = frozenset({0, 1, 2})
"""Numbers of source pictures of a request, each tested once; 2: several."""
PROMPTS = ("paint everything red", "paint everything blue")
"""The words of test requests."""
NOISE_SHARE = 0.25
"""Seeds hold if a repeated request changes a picture by at most this share of what another seed
changes. (Servers draw requests together, and rounding depends on the others.)"""

Outcome = Image.Image | RenderFailure


class Config(PluginConfig):
    """An images API: `/images/edits` for samples with source pictures, else `/images/generations`
    (docs/images-api.md). A key that the section `judge` has too means the same here."""

    api_base: str | list[str]
    """URL with or without /v1, or a file that holds one. Several URLs must serve the same model."""
    model: Annotated[str, Field(min_length=1)]
    """Model name sent with every request."""
    api_key_env: str = ""
    """NAME of the environment variable that holds the key ('' = no key)."""
    height_px: Annotated[int, Field(ge=16, le=MAX_SIDE_PX)] | None = None
    """Height that a request asks for, px; null (with `width_px`) = the server decides. Pictures of
    another size are accepted."""
    width_px: Annotated[int, Field(ge=16, le=MAX_SIDE_PX)] | None = None
    """Width that a request asks for, px."""
    extra: dict[str, Any] = {}
    """Further fields of every request (num_inference_steps, guidance_scale, negative_prompt,
    quality, ...), or other values for fields that the run sends; null leaves a field out. Many
    servers ignore fields that they do not know."""
    price_per_picture: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Price of one picture, in any currency, for `renderer/cost`."""
    max_concurrency: Annotated[int, Field(ge=1, le=10_000)] = 8
    """Requests in flight per rank, over all addresses of api_base together."""
    timeout_s: Annotated[float, Field(gt=0, le=MAX_S)] = 300.0
    """Timeout of one request, s. The server may queue `max_concurrency` requests of every rank."""
    max_attempts: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 6
    """Tries per picture; if all fail, it is UNGRADED."""
    max_outage_s: Annotated[float, Field(gt=0, le=MAX_S)] = 600.0
    """How long the run waits for a server that is down or asks it to wait, s. Then the pictures are
    UNGRADED, which soon stops the run (saved)."""


# ---- client --------------------------------------------------------------------------------------
# The judge's client (retries, outages, several addresses), which asks for pictures here.


@dataclass(eq=False)
class PictureRequest(Request):
    """A request for one picture. `content`: PNGs of the sources."""

    optional: ClassVar[Mapping[str, str]] = {
        name: f"['\"`]{name}['\"`]" for name in ("output_format", "response_format", "seed")
    }  # quoted, because an error page may quote the prompt

    def encoded(self, without: Set[str]) -> tuple[str, bytes]:
        fields = self.sent(without)
        if not self.content:
            return "application/json", json.dumps(fields).encode()
        texts = {n: v if isinstance(v, str) else json.dumps(v) for n, v in fields.items()}
        pngs = enumerate(self.content, start=1)
        return multipart(texts, [("image[]", (f"{i}.png", png, "image/png")) for i, png in pngs])

    def read(self, body: bytes) -> Chat:
        """The picture in an answer. Raises UnreadableReplyError."""
        answer = parsed(body)
        try:
            data = b64decode(answer["data"][0]["b64_json"].rpartition(",")[2])  # or a data: URL
            picture = open_picture(BytesIO(data), FORMATS)
            if picture.mode[0] in "IF":  # Pillow would make most of it white
                raise ValueError("greys of more than 8 bits")
            picture = over_white(picture)
        except Exception as error:  # Pillow's errors share no base class
            what = f"no picture in data[0].b64_json, {type(error).__name__}: {error}"
            raise UnreadableReplyError(what) from None
        return Chat(picture, None, tokens_of(answer, "input_tokens", "output_tokens"))


class ImagesClient(JudgeClient):
    """Asks an images API for pictures."""

    section = SECTION
    max_reply_bytes = 64 * 2**20  # a PNG of 16 million pixels of noise, as base64

    def __init__(self, config: Config) -> None:
        """Raises ValueError for an unusable `api_base` or `api_key_env`."""
        shared = JudgeConfig.model_fields.keys() & Config.model_fields.keys()
        bases = resolve_api_bases(config.api_base, SECTION)
        super().__init__(JudgeConfig(**{name: getattr(config, name) for name in shared}), bases)
        self._own = config
        self.num_pictures = 0

    async def draw(self, prompt: str, sources: Sequence[Image.Image], seed: int) -> Outcome:
        """The picture, RGB. Raises JudgeRefused."""
        answer = await self.ask(Question((prompt, *sources), {}), lambda it: it, repeat=seed)
        return answer.value or RenderFailure(str(answer.failure))

    async def _try(self, asking: Asking, parse: Callable[[Any], Any]) -> Any:
        prompt, *sources = asking.question.parts
        if not asking.content:
            asking.content = [
                await asyncio.to_thread(png_bytes, source)
                for source in sources
                if not isinstance(source, str)
            ]
        config = self._own
        fields = {
            "model": config.model,
            "prompt": prompt,
            "seed": asking.repeat,
            "response_format": "b64_json",
            "output_format": "png",
        }
        if config.width_px:
            fields["size"] = f"{config.width_px}x{config.height_px}"
        fields |= config.extra
        request = PictureRequest(
            {name: value for name, value in fields.items() if value is not None},
            asking.content,
            shape=min(len(sources), 2),
            path="/images/edits" if sources else "/images/generations",
        )
        chat = await self._send(asking, request)
        self.num_pictures += 1
        return parse(chat.reply)


# ---- renderer ------------------------------------------------------------------------------------
# Takes jobs while requests are in flight; tests at the start what the server's pictures depend on.


class ImagesApi(Renderer[Config]):
    """Draws over HTTP from the policy's words: an edit of the sample's source pictures, or a
    generation if it has none."""

    accepts = "text"
    metrics: ClassVar[Mapping[str, Metric]] = {
        "seeds_hold": Metric(
            "0..1", "1: equal seeds give equal pictures, so a group shares its noise"
        ),
        "refused_share": Metric("0..1", "share of pictures that the server refused to draw"),
        "requests": Metric("requests", "of one rank since it started; retries and evaluations too"),
        "input_tokens": Metric("tokens", "of one rank since it started, as the answers report"),
        "output_tokens": Metric("tokens", "of one rank since it started, as the answers report"),
        "cost": Metric("currency", "of one rank since it started: pictures x price_per_picture"),
    }

    @classmethod
    def problems(cls, config: Config, run: RunConfig) -> Iterable[str]:
        try:
            resolve_api_bases(config.api_base, SECTION)
            auth_header(config.api_key_env, SECTION)
        except ValueError as error:
            yield str(error).removeprefix(f"{SECTION}.")
        if (config.height_px is None) != (config.width_px is None):
            yield "height_px: give both height_px and width_px, or neither"
        if fixed := sorted({"prompt", "image", "image[]", "n", "stream"} & config.extra.keys()):
            yield f"extra: {', '.join(fixed)}: set by the run itself; drop it"
        if config.extra.get("response_format") not in (None, "b64_json"):
            yield "extra.response_format: pictures are read as b64_json only; drop it"
        if run.pool:
            yield "type: a server draws the pictures; drop render_pool"

    def __init__(self, config: Config, resources: Resources) -> None:
        super().__init__(config, resources)
        self._client = ImagesClient(config)
        self._loop = BackgroundLoop("images-api")
        self._to_try = set(KINDS) if resources.is_first else set()
        for address in self._client.addresses:
            address.answered |= KINDS - self._to_try
        self._found: dict[str, float] = {}
        """'seeds_hold', once it is known."""
        self._drawn: Counter[str] = Counter()
        """'asked' and 'refused' pictures since the last metrics."""

    def close(self) -> None:
        self._loop.submit(self._client.aclose()).result()
        self._loop.close()

    def take_metrics(self) -> Mapping[str, float]:
        stats, drawn = self._client.stats, self._drawn
        self._drawn = Counter()
        metrics = {
            "requests": stats.requests,
            "input_tokens": stats.prompt_tokens,
            "output_tokens": stats.completion_tokens,
            **self._found,
        }
        if self.config.price_per_picture:
            metrics["cost"] = self._client.num_pictures * self.config.price_per_picture
        if drawn:
            metrics["refused_share"] = drawn["refused"] / drawn["asked"]
        return metrics

    def render(self, jobs: Iterable[RenderJob]) -> Iterator[tuple[int, Outcome]]:
        """Yield `(number of the job, picture or failure)` as pictures come. A job is taken whenever
        fewer than `max_concurrency` requests are in flight. Raises JudgeError."""
        numbered = enumerate(jobs)
        own: dict[tuple[object, ...], asyncio.Task[Outcome]] = {}
        waiting: dict[Future[Outcome], int] = {}
        while True:
            is_full = len(waiting) >= self.config.max_concurrency
            taken = None if is_full else next(numbered, None)
            if taken is not None:
                number, job = taken
                self._try_out([source.size for source in job.sample.sources])
                waiting[self._loop.submit(self._outcome(job, own))] = number
            elif not waiting:
                return
            if self._should_stop():  # the caller sees it, and drops this picture
                yield next(iter(waiting.values())), RenderFailure("the run is asked to stop")
                return
            timeout_s = POLL_S if taken is None else 0.0
            for future in wait(waiting, timeout_s, FIRST_COMPLETED).done:
                yield waiting.pop(future), future.result()

    async def _outcome(
        self, job: RenderJob, own: dict[tuple[object, ...], asyncio.Task[Outcome]]
    ) -> Outcome:
        """The picture of a job. If its words are refused and the user's are not, that is the
        policy's failure. `own`: pictures of the user's words, each asked for once."""
        sample, seed, words = job.sample, job.noise_seed, str(job.payload)

        def draw_own() -> asyncio.Task[Outcome]:
            key = (sample.instruction, seed, *map(digest, sample.sources))
            if key not in own:
                own[key] = asyncio.create_task(
                    self._client.draw(sample.instruction, sample.sources, seed)
                )
            return own[key]

        is_own = words == sample.instruction
        outcome = await (draw_own() if is_own else self._client.draw(words, sample.sources, seed))
        self._drawn["asked"] += 1
        if isinstance(outcome, RenderFailure) and outcome.reason.startswith("refused"):
            self._drawn["refused"] += 1
            if isinstance(await draw_own(), Image.Image):
                return RenderFailure(outcome.reason, blame="policy")
        return outcome

    def _should_stop(self) -> bool:
        """Called while the rank waits for the server; for that the client has limits of its own."""
        heartbeat.note_wait()
        return signals.stop_received()

    def _try_out(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Before the first request of a kind: test what the server's pictures depend on. Raises
        JudgeError if the server ignores words or sources, or refuses a test request."""
        if (kind := min(len(sizes), 2)) in self._to_try:
            self._to_try.remove(kind)
            with suppress(StoppedError):
                self._loop.run(self._learn(sizes), self._should_stop)

    async def _learn(self, sizes: Sequence[tuple[int, int]]) -> None:
        sources = [Image.linear_gradient("L").resize(size).convert("RGB") for size in sizes]
        first = await self._made_up(PROMPTS[0], sources, 1)
        changed = {
            "repeat": (PROMPTS[0], sources, 1),
            "seed": (PROMPTS[0], sources, 2),
            "prompt": (PROMPTS[1], sources, 1),
        }
        if sources:
            last = Image.radial_gradient("L").resize(sizes[-1]).convert("RGB")
            changed["last source picture"] = (PROMPTS[0], [*sources[:-1], last], 1)
        if any("seed" in address.dialect.names for address in self._client.addresses):
            changed = {}  # nothing could be told from other pictures
        pictures = await asyncio.gather(*(self._made_up(*each) for each in changed.values()))
        levels = {name: _levels(first, each) for name, each in zip(changed, pictures, strict=True)}
        noise, of_seed = levels.pop("repeat", math.inf), levels.get("seed", 0.0)
        holds = noise <= NOISE_SHARE * of_seed
        self._found["seeds_hold"] = min(float(holds), self._found.get("seeds_hold", 1.0))
        if not holds:
            why = f"{noise:.1f} of 255 levels apart, {of_seed:.1f} for another seed"
            logger.warning(
                "pictures differ for an equal seed (%s): a group's noise is not shared, and its "
                "advantages contain it. Remedy: a server that keeps to seeds, or more pictures per "
                "completion (images_per_completion)",
                why if levels else "the server takes no seed",
            )
            return
        ignored = [name for name, level in levels.items() if level <= 2 * noise]
        if ignored == ["seed"]:
            logger.warning("the renderer ignores the seed: all its pictures have the same noise")
        elif ignored:
            raise JudgeError(
                f"the renderer ignores the {' and the '.join(ignored)}: another one draws the same "
                f"picture. Check {SECTION}.model and {SECTION}.api_base"
            )

    async def _made_up(self, *request: Any) -> Image.Image:
        picture = await self._client.draw(*request)
        if isinstance(picture, RenderFailure):
            raise JudgeError(
                f"the renderer's test request brings no picture ({picture.reason}): check "
                f"{SECTION}.api_base and {SECTION}.model"
            )
        return picture


def _levels(one: Image.Image, other: Image.Image) -> float:
    """Mean difference of two RGB pictures, levels of 0..255."""
    difference = ImageChops.difference(one, other.resize(one.size))
    return sum(ImageStat.Stat(difference).mean) / 3
