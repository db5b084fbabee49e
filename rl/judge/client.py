"""Asks one or several judge endpoints until a reply can be read."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence, Set
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar
from weakref import WeakValueDictionary

from rl.api.judge import Answer, Question
from rl.api.types import is_unreadable
from rl.config.schema import JudgeConfig
from rl.judge.http import (
    CONTENT,
    LOGPROBS_REMEDY,
    MAX_REPLY_BYTES,
    SHOWN_CHARS,
    TOO_MANY_REQUESTS,
    Dialect,
    HttpAnswer,
    JudgeHttp,
    ReplyJournal,
    Request,
    RequestTrouble,
    auth_header,
    refused_parameter,
    remedy_for,
)
from rl.judge.reply import (
    Chat,
    NoLogprobsError,
    UnreadableReplyError,
    encoded,
    refuse_part,
    scores_of_ten,
    served_models,
)
from rl.printing import excerpt, scrub

log = logging.getLogger(__name__)

POLL_S = 0.2
FIRST_PAUSE_S = 1.0
PAUSE_CAP_S = 30.0
CHECK_PAUSE_S = 15.0
"""Pause between two checks of an address that is down."""
WHOLE_OUTAGE_S = 600.0
"""Below this `judge.max_outage_s`, the first pause and that between checks shrink in proportion."""
SUSPECT_FAILURES = 20
"""After so many failures in a row an address is checked."""
QUIET_S = 10.0
"""A wait is not logged while its length so far plus the next pause is shorter than this."""
LINE_EVERY_S = 60.0
HEALTH_TIMEOUT_S = 10.0
RETRY_TEMPERATURE_STEP = 0.3
SEEDS_PER_REPEAT = 1000
TOP_LOGPROBS = 20
"""The most that OpenAI, and vLLM without `--max-logprobs`, return."""
SHOWN_BODY_CHARS = 600
SHOWN_NAME_CHARS = 100
MAX_NAMES = 8
"""Limit of model names logged per address; some servers send a different name with each reply."""
REFUSED_SETUP = frozenset({401, 402, 403, 404, 405, 407, *range(300, 400)})
"""A wrong key, path or model, no money, or a redirect: these never concern one question."""
MODERATED = re.compile(r"moderat|nsfw|(safety|content).?(policy|system|filter)", re.IGNORECASE)
"""In the body of an HTTP 403 that concerns one question: some gateways moderate with it."""
RETRIED_CLIENT_ERRORS = frozenset({408, 425, 429})
FINAL = ("refused", "outage")
"""Causes after which a question is not asked again."""


class JudgeError(RuntimeError):
    """The judge cannot be used as configured; a person must act."""


class JudgeRefused(JudgeError):  # noqa: N818 (reads as what happened)
    """The endpoint answers and refuses: wrong key, path, model or request."""


class NotServedError(JudgeRefused):
    """The endpoint does not serve `judge.model`."""


class JudgeUnreachableError(JudgeError):
    """No judge answers at the configured addresses."""


class JudgeEndedError(JudgeError):
    """The judge that the run started has ended."""


@dataclass
class JudgeStats:
    """Counts since the last `take_stats()`."""

    requests: int = 0
    reused: int = 0
    """Replies taken from the journal, without a request."""
    retries: Counter[str] = field(default_factory=Counter)
    """Repeated requests by `RequestTrouble.cause`."""
    latencies_s: list[float] = field(default_factory=list)
    """Time from sending to the answer, s, of each request with an answer below status 500."""
    breaker_openings: int = 0
    """Times that an address was found to be down."""
    throttled: int = 0
    """Requests that the judge asked to send later (HTTP 429, Retry-After)."""
    failed: Counter[str] = field(default_factory=Counter)
    """Questions given up: 'transport', or 'unreadable' (`rl.api.types.is_unreadable`)."""
    of_ten: list[float] = field(default_factory=list)
    """Scores whose range is 0 to 10."""
    other_model: int = 0
    """Replies that name a model other than `judge.model`."""
    prompt_tokens: int = 0
    """Of requests and their pictures, as far as the endpoint reports them."""
    completion_tokens: int = 0
    """Of the replies to these requests."""


@dataclass(eq=False)
class Asking:
    """A question that is being asked."""

    question: Question
    repeat: int = 0
    content: Sequence[bytes] = ()
    """JSON of its parts."""
    replies: list[str] = field(default_factory=list)
    """All replies so far: the unreadable ones, then the last one."""
    keys: list[str] = field(default_factory=list)
    """Journal keys of `replies`."""
    num_sent: int = 0
    num_tries: int = 0
    """Replies, and failures that the question itself may have caused."""
    failures: Counter[Address] = field(default_factory=Counter)
    """Requests without a reply, by address."""
    failing_since_s: float = math.inf
    """When the first of these was sent, `time.monotonic`."""
    failure: str | None = None
    """Why it was given up."""


def backoff_s(first_s: float, num_failures: int, rng: random.Random) -> float:
    """Pause after the n-th failure (n >= 1), s: uniform(0, min(30, first_s * 2^(n-1))).

    "Full jitter" (Brooker 2015, 'Exponential Backoff And Jitter'): clients that failed together do
    not come back together.
    """
    return rng.uniform(0.0, min(PAUSE_CAP_S, first_s * 2.0 ** min(num_failures - 1, 16)))


# ---- address -------------------------------------------------------------------------------------
# One address of a judge: what it takes, whether it is up, and what an answer of it means.


class Address:
    """Sends requests to one address, and decides from the answers whether it is up.

    A failure may be the address's or the question's own fault. After `SUSPECT_FAILURES` in a row,
    or before a question is given up, the address is checked: the last request that got a reply is
    sent again. If that fails, too, the address is down, and checked until it answers.
    """

    def __init__(self, judge: JudgeClient, url: str) -> None:
        self.url = url
        self.dialect = Dialect()
        self.answered: set[object] = set()
        """`Request.shape` of those that got a reply."""
        self.num_in_flight = 0
        self.rests_until_s = 0.0
        """End of the pause that its last Retry-After asked for, `time.monotonic`."""
        self.is_up = True
        self._judge = judge
        self._num_failures = 0
        """In a row."""
        self._replied_s = 0.0
        self._checking = asyncio.Lock()
        self._recovery: asyncio.Task[None] | None = None
        config, section = judge.config, judge.section
        header = auth_header(config.api_key_env, section)
        self._http = JudgeHttp(url, header, config.max_concurrency, section, judge.max_reply_bytes)

    async def exchange(
        self, request: Request | None = None, without: Set[str] = frozenset()
    ) -> HttpAnswer:
        """Send a question without these parameters, or ask for the list of models. Raises
        `RequestTrouble` if no answer comes."""
        self._judge.stats.requests += 1
        self.num_in_flight += 1
        try:
            if request is None:
                return await self._http.request("GET", "/models", None, HEALTH_TIMEOUT_S)
            content_type, body = request.encoded(without)
            timeout_s = self._judge.config.timeout_s
            return await self._http.request("POST", request.path, body, timeout_s, content_type)
        finally:
            self.num_in_flight -= 1

    async def send(self, request: Request) -> Chat:
        """The reply to `request`. A parameter that the address refuses is left out, once it has
        replied without it also of all later requests.

        Raises `RequestTrouble` if there is no reply, `JudgeRefused` if a person must act.
        """
        without = set(self.dialect.names)
        while True:
            request.num_sent += 1
            sent_s = time.monotonic()
            response = await self.exchange(request, without)
            if response.status < 500:
                self._judge.stats.latencies_s.append(time.monotonic() - sent_s)
            sent = request.sent(without)
            refused = refused_parameter(response.status, response.body, sent, request.optional)
            if refused is None:
                break
            self._judge.stats.retries["parameter"] += 1
            without.add(refused)
        if not response.is_success:
            self.refuse(response, request)
        try:
            chat = request.read(response.body)
        except UnreadableReplyError as error:
            body = body_excerpt(response)
            if isinstance(error, NoLogprobsError) and request.shape not in self.answered:
                raise JudgeRefused(
                    f"{self.url} answers, with {error}: {body}\n{LOGPROBS_REMEDY}"
                ) from None
            raise RequestTrouble("no_reply", f"HTTP {response.status} ({error}): {body}") from None
        if learnt := self.dialect.learn(request, without):
            names = ", ".join(sorted(learnt))
            text = "the %s at %s is asked without %s from now on"
            log.warning(text, self._judge.section, self.url, names)
        self.works()
        self._judge.proven = request
        self.answered.add(request.shape)
        self._judge.stats.prompt_tokens += chat.tokens[0]
        self._judge.stats.completion_tokens += chat.tokens[1]
        await self._check_name(chat.model)
        return chat

    def refuse(self, response: HttpAnswer, request: Request | None = None) -> NoReturn:
        """Raise `JudgeRefused` for a non-2xx answer that a person must act on, `RequestTrouble` for
        others. `request`: None in a health check."""
        status, body = response.status, body_excerpt(response)
        trouble = RequestTrouble(f"http_{status}", body, response.retry_after_s)
        if status in RETRIED_CLIENT_ERRORS or status >= 500:
            raise trouble
        is_moderated = status == 403 and MODERATED.search(body)
        is_about_setup = status in REFUSED_SETUP and not is_moderated
        if request and not is_about_setup and request.shape in self.answered:
            # The address has answered questions of this shape, so the set-up is right: this one is
            # too long, or moderated. (Taking one picture but refusing two is a set-up error.)
            self.works()
            raise RequestTrouble("refused", f"HTTP {status} {body}")
        others = [address for address in self._judge.addresses if address is not self]
        if request and any(request.shape in other.answered for other in others):
            # Other addresses accept this shape: this one is misconfigured and counts as down.
            self.take_down(f"refuses (HTTP {status} {body})")
            raise trouble
        location = response.location and excerpt(response.location, SHOWN_CHARS)
        remedy = remedy_for(status, location, self._judge.config, self._judge.section)
        if request and request.labels and "logprob" in body.lower():
            remedy = LOGPROBS_REMEDY
        raise JudgeRefused(
            f"the {self._judge.section} refused: {response.request} -> HTTP {status} {body}\n"
            f"{remedy}"
        )

    async def failed(self, trouble: RequestTrouble, asking: Asking, sent_s: float) -> None:
        """Note a request of `asking`, sent at `sent_s` (`time.monotonic`), that got no reply. It
        counts as a try of the question unless the address is to blame, or asked to wait."""
        if trouble.cause in FINAL:
            return
        asking.failures[self] += 1
        asking.failing_since_s = min(asking.failing_since_s, sent_s)
        self._judge.is_silent_since(sent_s)
        if trouble.asks_to_wait:
            self.rests_until_s = time.monotonic() + (trouble.retry_after_s or 0.0)
            self._judge.stats.throttled += 1
            return
        self._num_failures += 1
        async with self._checking:
            is_last = asking.num_tries + 1 >= self._judge.config.max_attempts
            is_alone = self._replied_s < asking.failing_since_s
            is_suspect = self._num_failures >= SUSPECT_FAILURES or (is_last and is_alone)
            if self.is_up and is_suspect and not await self._answers():
                self.take_down(f"failed {self._num_failures} times in a row ({trouble})")
        if self.is_up:
            asking.num_tries += 1

    async def _answers(self) -> bool:
        """Whether the address answers the last request that got a reply at any address; before
        there is one, whether it lists its models."""
        try:
            if self._judge.proven is not None:
                await self.send(self._judge.proven)
            elif (await self.exchange()).status >= 500:
                return False
        except JudgeRefused:
            pass  # the next question meets it
        except RequestTrouble as trouble:
            if trouble.cause != "refused":
                return False
        self.works()
        return True

    def works(self) -> None:
        """Note an answer that shows that the address works."""
        if not self.is_up:
            text = "the %s at %s answers again after %.0f s"
            log.warning(text, self._judge.section, self.url, self._judge.down_s)
        self.is_up, self._num_failures = True, 0
        self._replied_s = self._judge.replied_s = time.monotonic()
        self._judge.silent_since_s = math.inf

    def take_down(self, why: str) -> None:
        """Ask it no questions until a check is answered. `why`: what it did, for the log."""
        if not self.is_up:
            return
        self.is_up = False
        self._judge.is_silent_since(time.monotonic())
        self._judge.stats.breaker_openings += 1
        pause_s = CHECK_PAUSE_S * self._judge.haste
        text = "the %s at %s %s: one probe every %.0f s until it answers"
        log.warning(text, self._judge.section, self.url, why, pause_s)
        self._recovery = asyncio.create_task(self._recover(pause_s))

    async def _recover(self, pause_s: float) -> None:
        while not self.is_up:
            await asyncio.sleep(pause_s)
            if not self.is_up:
                await self._answers()

    async def check_model(self) -> None:
        """Raise `JudgeRefused` if it does not serve `judge.model`, `RequestTrouble` if no list of
        models comes."""
        response = await self.exchange()
        if response.status != 200:
            self.refuse(response)
        served, model = served_models(response.body), self._judge.config.model
        if served is None:
            raise JudgeRefused(
                f"{self.url}/models answers, but not as an OpenAI-compatible endpoint: "
                f"{body_excerpt(response)}\nCheck judge.api_base."
            )
        if model not in served:
            names = ", ".join(excerpt(name, SHOWN_NAME_CHARS) for name in served[:10]) or "nothing"
            raise NotServedError(
                f"{self.url} does not serve judge.model={model!r}; it serves: {names}. Set "
                "judge.model to one of these; or, in a run that began with another model, which "
                "grades differently, serve that one again, or start a new run."
            )

    async def _check_name(self, model: str | None) -> None:
        """Log, once per name, that a model other than `judge.model` has answered. Raises
        `JudgeRefused` if `judge.model` is no longer served."""
        configured, logged = self._judge.config.model, self.dialect.model_names
        if model is None or model == configured:
            return
        self._judge.stats.other_model += 1
        name = excerpt(model, SHOWN_NAME_CHARS)
        if name in logged or len(logged) >= MAX_NAMES:
            return
        try:
            await self.check_model()
        except NotServedError:
            raise
        except (RequestTrouble, JudgeRefused):
            pass  # not every gateway lists its models
        logged.append(name)
        log.warning(
            "%s answers as %r, asked for judge.model=%r: this is fine if both names mean the same "
            "model. A different model grades differently: set judge.model to the intended model, "
            "or turn the gateway's fallback off (judge/other_model_replies counts such replies)",
            *(self.url, name, configured),
        )

    async def aclose(self) -> None:
        if self._recovery is not None:
            self._recovery.cancel()
        await self._http.aclose()


def body_excerpt(response: HttpAnswer) -> str:
    """The beginning of the body, or why there is none; `excerpt` removes keys that it echoes."""
    if response.unusable and not response.body:
        return f"(a body {response.unusable})"
    return excerpt(response.body.decode("utf-8", "replace"), SHOWN_BODY_CHARS) or "(empty body)"


# ---- client --------------------------------------------------------------------------------------
# Asks a vision-language judge over HTTP; a judge's failure is never a bad grade.

T = TypeVar("T")


class JudgeClient:
    """A client of one judge. All coroutines must run in one event loop."""

    section: ClassVar[str] = "judge"
    """That of the config, for messages."""
    max_reply_bytes: ClassVar[int] = MAX_REPLY_BYTES

    def __init__(
        self,
        config: JudgeConfig,
        api_base: str | Sequence[str],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`api_base`: from `resolve_api_bases`. `check`: called before each request; raises if no
        address will answer again.

        Raises ValueError when the environment lacks the key that `config.api_key_env` names.
        """
        self.config = config
        self.stats = JudgeStats()
        self.haste = min(1.0, config.max_outage_s / WHOLE_OUTAGE_S)
        """Factor of the pauses."""
        self.replied_s = 0.0
        """When any address last replied, `time.monotonic`."""
        self.silent_since_s = math.inf
        """When the first request since then was sent that got no reply."""
        # A ContextVar: a coroutine uses the journal that its thread had when submitting it.
        self._journal: ContextVar[ReplyJournal | None] = ContextVar("journal", default=None)
        self._open_journals: list[ReplyJournal] = []
        self._slots = asyncio.Semaphore(config.max_concurrency)
        # One new question at a time waits for a slot, so one that was sent before waits for few.
        self._line = asyncio.Lock()
        self._request_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        # Jitter must not draw from the run's random numbers: a retry would change the training.
        self._jitter = random.Random()
        self._check = check
        self._next_line_s = 0.0
        urls = [api_base] if isinstance(api_base, str) else api_base
        self.addresses = [Address(self, url) for url in urls]
        self.proven: Request | None = None
        """The last request that got a reply."""

    @property
    def down_s(self) -> float:
        """Seconds since the first request was sent that got no reply, or since the last reply if
        that came later; 0 if the last request got one."""
        return max(0.0, time.monotonic() - self.silent_since_s)

    def is_silent_since(self, sent_s: float) -> None:
        """Note that the request that was sent then got no reply."""
        self.silent_since_s = min(self.silent_since_s, max(sent_s, self.replied_s))

    def open_journal(self, path: Path) -> None:
        """Use another journal, e.g. one per iteration, for questions that this thread asks from now
        on. Its earlier questions keep the previous journal, which the next call closes."""
        if len(self._open_journals) > 1:
            self._open_journals.pop(0).close()
        self._open_journals.append(ReplyJournal(path))
        self._journal.set(self._open_journals[-1])

    def drop_unusable(self) -> None:
        """Drop the replies to questions that got no usable reply, so that a fixed judge is asked
        these again; all other replies are kept."""
        for journal in self._open_journals:
            journal.drop_unusable()

    def take_stats(self) -> JudgeStats:
        """Counts since the last call; a request under way counts when it ends."""
        stats, self.stats = self.stats, JudgeStats()
        return stats

    async def aclose(self) -> None:
        for address in self.addresses:
            await address.aclose()
        for journal in self._open_journals:
            journal.close()

    async def check_health(self, wait_s: float = 60.0) -> list[str]:
        """Check that the judge answers and serves the model; returns the addresses that do.

        A server that is still starting has `wait_s` (and one more request) to answer. One
        address is enough: the others count as down, which is logged. Raises
        `JudgeUnreachableError` or `JudgeRefused`.
        """
        waits = (self._unreachable(address, wait_s) for address in self.addresses)
        problems = await asyncio.gather(*waits)
        if all(problems):
            raise JudgeUnreachableError("\n".join(problems))
        for address, problem in zip(self.addresses, problems, strict=True):
            if problem:
                address.take_down(f"did not answer the health check ({problem})")
        return [address.url for address in self.addresses if address.is_up]

    async def _unreachable(self, address: Address, wait_s: float) -> str:
        """Why `address` has not answered within `wait_s`; '' once it has. Raises `JudgeRefused` if
        it answers and does not serve `judge.model`."""
        started_s = time.monotonic()
        while True:
            try:
                await address.check_model()
                return ""
            except RequestTrouble as trouble:
                waited_s = time.monotonic() - started_s
                if trouble.is_tls:
                    return f"{address.url} cannot be verified to be the judge ({trouble})"
                if waited_s >= wait_s:
                    return (
                        f"no judge at {address.url} after {waited_s:.0f} s ({trouble}): start it "
                        "(scripts/serve_judge.sh), or set judge.api_base to where it runs"
                    )
            await asyncio.sleep(min(1.0, wait_s - waited_s))

    async def ask(
        self, question: Question, parse: Callable[[Any], T], repeat: int = 0
    ) -> Answer[T]:
        """As `rl.api.judge.Judge.ask`; raises `JudgeRefused`. A question has no slot while it backs
        off, so that those which the judge cannot answer do not hold up the others."""
        started_s = time.monotonic()
        asking, value, pause_s = Asking(question, repeat), None, 0.0
        while value is None and asking.failure is None:
            await asyncio.sleep(pause_s)
            async with self._line if asking.num_sent == 0 else nullcontext():
                await self._slots.acquire()
            try:
                value = await self._try(asking, parse)
            except RequestTrouble as trouble:
                pause_s = self._pause_s(asking, trouble)
                if trouble.cause == TOO_MANY_REQUESTS:  # with its slot, so that fewer are sent
                    await asyncio.sleep(pause_s)
                    pause_s = 0.0
            finally:
                self._slots.release()
        self.stats.of_ten += scores_of_ten(question.reply_schema, value)
        if asking.failure:
            kind = "unreadable" if is_unreadable(asking.failure) else "transport"
            self.stats.failed[kind] += 1
            if (journal := self._journal.get()) is not None:
                journal.note_failed(asking.keys)
        seconds = time.monotonic() - started_s
        return Answer(value, tuple(asking.replies), asking.failure, asking.num_sent, seconds)

    async def _try(self, asking: Asking, parse: Callable[[Any], T]) -> T:
        """The parsed reply to the next request. Raises `RequestTrouble`, `JudgeRefused`."""
        question = asking.question
        if not asking.content:
            asking.content = [
                await encoded(part, self.config.image_side_px) for part in question.parts
            ]
        asking.replies.append(await self._reply(asking))
        asking.num_tries += 1
        try:
            refuse_part(asking.replies[-1])
            return parse(asking.replies[-1])
        except UnreadableReplyError as error:
            raise RequestTrouble("unreadable", str(error)) from None

    def _pause_s(self, asking: Asking, trouble: RequestTrouble) -> float:
        """Pause before the question is asked again, s. Sets its `failure` if it is given up: after
        `max_attempts` tries, or `max_outage_s` after its first request without a reply was sent; if
        the judge only asks to wait, after its first such answer to any."""
        config = self.config
        waited_s = time.monotonic() - asking.failing_since_s
        if trouble.asks_to_wait:
            waited_s = max(waited_s, self.down_s)
        left_s = max(0.0, config.max_outage_s - waited_s)
        pause_s, is_late = 0.0, False
        up = [address for address in self.addresses if address.is_up]
        if trouble.cause != "unreadable":
            is_late = left_s == 0 and (trouble.asks_to_wait or bool(up))
            # An up address that has failed on it less often than another takes it at once.
            if len({asking.failures[address] for address in up}) == 1:
                first_s = FIRST_PAUSE_S * self.haste
                pause_s = backoff_s(first_s, asking.failures.total(), self._jitter)
                pause_s = min(pause_s + (trouble.retry_after_s or 0.0), left_s)
        if trouble.asks_to_wait:
            self._log_wait(trouble, waited_s, pause_s, is_late)
        is_final = bool(asking.question.labels and asking.replies)  # a repeat would be the same
        if trouble.cause in FINAL:
            asking.failure = str(trouble)
        elif is_final or asking.num_tries >= config.max_attempts:
            asking.failure = f"{trouble} ({asking.num_tries} tries)"
        elif is_late:
            asking.failure = f"{trouble} (for {config.max_outage_s:g} s)"
        else:
            self.stats.retries[trouble.cause] += 1
        return pause_s

    def _log_wait(
        self, trouble: RequestTrouble, waited_s: float, pause_s: float, is_late: bool
    ) -> None:
        now_s, is_long = time.monotonic(), waited_s + pause_s >= QUIET_S
        if now_s < self._next_line_s or not (is_long or is_late):
            return
        self._next_line_s = now_s + LINE_EVERY_S
        log.warning(
            "the %s asks to wait (%s), for %.0f s so far: a question that waits longer than "
            "%s.max_outage_s=%g is given up, ungraded. Remedy: fewer requests at once "
            "(%s.max_concurrency=%d, on each rank), or a higher quota",
            *(self.section, trouble, waited_s, self.section, self.config.max_outage_s),
            *(self.section, self.config.max_concurrency),
        )

    def _request(self, asking: Asking) -> Request:
        """The next request: each unreadable reply changes the seed and raises the temperature."""
        num_unreadable, question = len(asking.replies), asking.question
        # Some servers divide the logits by the temperature before they take log-probs.
        temperature = 1.0 if question.labels else question.temperature
        if temperature is None:
            temperature = self.config.temperature
        parameters: dict[str, Any] = {
            "model": self.config.model,
            "messages": [{"role": "user", "content": [CONTENT]}],
            "max_tokens": 1 if question.labels else self.config.max_tokens,
            "temperature": round(temperature + RETRY_TEMPERATURE_STEP * min(num_unreadable, 3), 3),
            # Some models' own defaults (top_p 0.001) would make temperature and seed do nothing.
            "top_p": 1.0,
            "seed": SEEDS_PER_REPEAT * asking.repeat + num_unreadable,
        }
        guided = self.config.guided_json
        if question.labels:  # without a schema, under which all probability would be on the labels
            parameters |= {"logprobs": True, "top_logprobs": TOP_LOGPROBS}
        elif guided == "always" or (guided == "on_retry" and num_unreadable > 0):
            schema = {"name": "grade", "schema": question.reply_schema}
            parameters["response_format"] = {"type": "json_schema", "json_schema": schema}
        shape = question.labels, tuple(isinstance(part, str) for part in question.parts)
        return Request(parameters, asking.content, question.labels, shape)

    async def _reply(self, asking: Asking) -> str:
        """The judge's reply text, from the journal if it is there.

        Identical requests wait for each other: the second takes the reply to the first from the
        journal, as it would after a restart. (Without a journal every request is sent.)
        """
        request = self._request(asking)
        journal = self._journal.get()
        if journal is None:
            return scrub((await self._send(asking, request)).reply)
        async with self._request_locks.setdefault(request.key, asyncio.Lock()):
            reply = journal.get(request.key)
            if reply is not None:
                self.stats.reused += 1
            else:
                chat = await self._send(asking, request)
                reply = journal.put(request.key, scrub(chat.reply))
        asking.keys.append(request.key)
        return reply

    async def _send(self, asking: Asking, request: Request) -> Chat:
        address = await self._admit(asking)
        sent_s = time.monotonic()
        try:
            return await address.send(request)
        except RequestTrouble as trouble:
            await address.failed(trouble, asking, sent_s)
            raise
        finally:
            asking.num_sent += request.num_sent

    async def _admit(self, asking: Asking) -> Address:
        """The address to ask, once one is up. Raises `RequestTrouble` once all have been down for
        `max_outage_s`, or the question has failed for that long."""
        while True:
            self._check()
            up = [address for address in self.addresses if address.is_up]
            if up:
                now_s = time.monotonic()
                return min(
                    up, key=lambda a: (asking.failures[a], a.rests_until_s > now_s, a.num_in_flight)
                )
            waited_s = max(self.down_s, time.monotonic() - asking.failing_since_s)
            left_s = self.config.max_outage_s - waited_s
            if left_s <= 0:
                raise RequestTrouble("outage", f"no answer for {waited_s:.0f} s")
            await asyncio.sleep(min(POLL_S, left_s))
