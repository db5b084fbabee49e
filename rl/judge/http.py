"""One HTTP request to a judge or an images API, a judge's parameters, the journal of its replies,
and the event loop."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, aclosing, suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from rl.config.loading import not_a_file, read_text
from rl.config.schema import JudgeConfig
from rl.files import append, lines_of, private, require_in_place, row_of
from rl.judge.reply import Chat, read_chat
from rl.printing import MIN_CHARS, excerpt, is_placeholder, remember, scrub

# ---- endpoint ------------------------------------------------------------------------------------
# Resolves `judge.api_base`, reads the judge's key, and names the remedy for a refusal. `section` is
# that of the config which names the endpoint: 'judge', or 'renderer' for an images API.

MAX_FILE_BYTES = 4096
SHOWN_CHARS = 200

_HOST_AND_PORT = re.compile(r"([A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\]):\d+(/.*)?")
_VERSION = re.compile(r"/v\d[a-z0-9]*(/|$)")
_ENDPOINT = re.compile(r"/(chat/completions|images/(generations|edits))$")
_STARTED = {"judge": "; a reward asks it: to have the run start one, set judge.start_command"}
"""Section -> what replaces an address."""


def resolve_api_bases(value: str | Sequence[str], section: str = "judge") -> tuple[str, ...]:
    """The base URLs in `<section>.api_base`, such as 'http://host:4877/v1', without duplicates.

    Accepts, in a list or separated by commas: a URL with or without '/v1' and trailing slash,
    'host:port', or a file with one such address per line. Raises ValueError naming the key and
    the remedy.
    """
    texts = [value] if isinstance(value, str) else value
    entries = [entry.strip() for text in texts for entry in text.split(",")]
    entries = [entry for entry in entries if entry.lower() not in ("", "none")]
    if not entries:
        raise ValueError(
            f"{section}.api_base is empty: set it to the endpoint's URL, or to a file that has it"
            f"{_STARTED.get(section, '')}"
        )
    addresses = (address for entry in entries for address in _addresses_in(entry, section))
    return tuple(dict.fromkeys(_normalise(*address, section) for address in addresses))


def resolve_api_base(value: str | Sequence[str]) -> str:
    """The URL of `judge.api_base`. Raises ValueError if it names several."""
    bases = resolve_api_bases(value)
    if len(bases) > 1:
        raise ValueError(
            f"judge.api_base names {len(bases)} addresses, but the judge that judge.start_command "
            "starts has one address: drop start_command, or all addresses but one"
        )
    return bases[0]


def _addresses_in(entry: str, section: str) -> list[tuple[str, str]]:
    """(address, its origin for messages); `entry` is an address, or a file with addresses."""
    if _is_address(entry):
        return [(entry, f"{section}.api_base={entry!r}")]
    if not_a_file(entry):
        raise ValueError(
            f"{section}.api_base={re.sub('(?s).*@', '...@', entry)!r} is neither a URL "
            "(http://host:4877), nor host:port, nor a file that exists"
            f"{_STARTED.get(section, '')}"
        )
    where = f"{section}.api_base: the file {Path(entry)}"
    try:
        text = read_text(entry, MAX_FILE_BYTES)
    except ValueError as error:
        raise ValueError(f"{where} {error}") from None
    words = {
        number: line.split()[0] for number, line in enumerate(text.split("\n"), 1) if line.strip()
    }
    if not words:
        raise ValueError(f"{where} is empty")
    for number, word in words.items():
        if not _is_address(word):  # not quoted: it may contain a password
            raise ValueError(f"{where}: line {number} begins with neither a URL nor host:port")
    return [(address, where) for address in words.values()]


def _is_address(text: str) -> bool:
    return "://" in text or _HOST_AND_PORT.fullmatch(text) is not None


def _normalise(url: str, where: str, section: str) -> str:
    url = url if "://" in url else f"http://{url}"
    if re.search(r"[?#@\s]", url.partition("://")[2]):
        # The message does not quote the URL, because it may contain a key.
        raise ValueError(
            f"{section}.api_base must be a plain URL without user, password, query or space: keys "
            f"come from the environment variable that {section}.api_key_env names"
        )
    try:
        parts = urlsplit(url)
        path = _ENDPOINT.sub("", parts.path.rstrip("/"))
        # A path that already contains a version (/v1beta/openai) is kept as it is.
        path = path if _VERSION.search(path) else f"{path}/v1"
        base = f"{parts.scheme}://{parts.netloc}{path}"
        parsed = httpx.URL(base)
        # `port` raises ValueError beyond 65535.
        if parsed.scheme not in ("http", "https") or not parsed.raw_host or parts.port == 0:
            raise ValueError(f"{base!r} has no http:// or https://, or no host or port")
    except (ValueError, httpx.InvalidURL) as error:
        reason = excerpt(str(error), SHOWN_CHARS)
        raise ValueError(f"{where} is not an http(s) URL with a host: {reason}") from None
    return base


def is_loopback(api_base: str) -> bool:
    host = urlsplit(api_base).hostname or ""
    return host in ("localhost", "::1") or re.fullmatch(r"127(\.\d+){3}", host) is not None


def auth_header(api_key_env: str, section: str = "judge") -> dict[str, str]:
    """The HTTP header with the endpoint's key; {} for one without a key.

    Registers the variable as a secret, whatever its name. Raises ValueError if it is not set, or
    if its value is too short for a key or not allowed in a header.
    """
    if not api_key_env:
        return {}
    remember(api_key_env)
    key, where = os.environ.get(api_key_env, "").strip(), f"{section}.api_key_env"
    if not key:
        raise ValueError(
            f"{where} names {api_key_env}, which is not in the environment: "
            f"export {api_key_env}=..., or set {where}: '' for a {section} without key"
        )
    if not (key.isascii() and key.isprintable()):
        raise ValueError(
            f"{where} names {api_key_env}, whose value is not valid in an HTTP header: "
            f"it has a line end or a non-ASCII character. Copy the key again into {api_key_env}"
        )
    if len(key) < MIN_CHARS and not is_placeholder(key):
        raise ValueError(
            f"{where} names {api_key_env}, whose value has {len(key)} characters: a "
            f"key of fewer than {MIN_CHARS} cannot be removed from the logs safely, since ordinary "
            f"words may contain it. Copy the whole key into {api_key_env}; for a keyless {section} "
            f"set {where}: '', or {api_key_env}=EMPTY"
        )
    return {"Authorization": f"Bearer {key}"}


LOGPROBS_REMEDY = (
    "Remedy: this reward reads the log-probs of the judge's first token (logprobs, top_logprobs), "
    "which vLLM's server returns and some hosted models do not, above all those that think first. "
    "Serve judge.model with vLLM, choose another, or use a reward that reads written scores "
    "('viescore', 'rubric')."
)


def remedy_for(
    status: int, location: str | None, config: JudgeConfig, section: str = "judge"
) -> str:
    """What the user can do about an HTTP refusal. `location`: target of a redirect."""
    if location is not None:
        return f"Remedy: set {section}.api_base to where it points ({location})."
    setting = f"it names {config.api_key_env}" if config.api_key_env else "it is ''"
    key = (
        f"Remedy: {section}.api_key_env must name the environment variable that holds a valid key "
        f"({setting})."
    )
    by_status = {
        401: key,
        402: f"Remedy: pay for this endpoint, or set {section}.api_base to another one.",
        403: key,
        404: f"Remedy: check the path in {section}.api_base and {section}.model={config.model!r}.",
        407: "Remedy: put the proxy's user and password into the URL of HTTP_PROXY (ALL_PROXY).",
        429: f"Remedy: fewer requests at once ({section}.max_concurrency={config.max_concurrency}, "
        "on each rank), or a higher quota; wait, or pay, if the quota is used up.",
    }
    otherwise = {
        "judge": "Remedy: this endpoint does not accept the request. It needs a vision-language "
        f"model (judge.model={config.model!r}) that accepts the source pictures and the result "
        "together (vllm serve --limit-mm-per-prompt '{\"image\": 2}', JUDGE_IMAGES of "
        "scripts/serve_judge.sh), and a context window for them and the reply (--max-model-len, "
        f"JUDGE_MAX_LEN; or lower judge.image_side_px={config.image_side_px}, "
        f"judge.max_tokens={config.max_tokens}); or set judge.guided_json: 'never'.",
        "renderer": "Remedy: the images API accepts no such request: check renderer.model, "
        "renderer.width_px, renderer.height_px and renderer.extra.",
    }
    return by_status.get(status, otherwise[section])


# ---- http ----------------------------------------------------------------------------------------
# One HTTP request: bounded in size and time, never inflated, never redirected.

CONNECT_TIMEOUT_S = 10.0
MAX_REPLY_BYTES = 2 * 2**20
"""The longest readable reply (`reply.MAX_REPLY_CHARS`) takes at most 1.2 MB as JSON."""
RETRY_AFTER_CAP_S = 120.0
TLS_FAILURES = ("CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER")
"""In OpenSSL's messages: an untrusted certificate; no TLS at all."""
TLS_REMEDY = (
    "; trust its certificate here (SSL_CERT_FILE=<a .pem of its issuer>), or set {}.api_base to "
    "a host name in the certificate, or to an http:// URL"
)
PROXY_VARIABLES = "HTTP_PROXY (HTTPS_PROXY, ALL_PROXY)"
TOO_MANY_REQUESTS = "http_429"
"""`RequestTrouble.cause` for HTTP 429."""
HEADERS = {
    "Accept": "application/json",
    "Accept-Encoding": "identity",
    # A second reply on a connection that is kept would be read as the answer to the next question.
    "Connection": "close",
    "User-Agent": f"python-httpx/{httpx.__version__}",
}


class RequestTrouble(Exception):  # noqa: N818 (an outcome of one request, never the run's)
    """A request that got no usable answer."""

    def __init__(
        self, cause: str, detail: str, retry_after_s: float | None = None, is_tls: bool = False
    ) -> None:
        """`cause`: 'timeout', 'transport', 'http_<status>', 'no_reply', 'refused', 'unreadable' or
        'outage'. `is_tls`: a certificate or protocol failure of TLS, which waiting does not fix."""
        super().__init__(f"{cause}: {scrub(detail)}")
        self.cause = cause
        self.retry_after_s = retry_after_s
        self.is_tls = is_tls

    @property
    def asks_to_wait(self) -> bool:
        """Whether the judge asked to send the question later: HTTP 429, or any Retry-After."""
        return self.cause == TOO_MANY_REQUESTS or self.retry_after_s is not None


@dataclass(frozen=True)
class HttpAnswer:
    """An answer of any status."""

    request: str
    """'POST http://...', for messages."""
    status: int
    body: bytes
    """Status 2xx: the whole body, or empty if it is unusable. Other statuses: its beginning."""
    unusable: str | None
    """Why the body was not read to its end: it is compressed, or too long."""
    retry_after_s: float | None
    location: str | None

    @property
    def is_success(self) -> bool:
        """Whether the status is 2xx."""
        return 200 <= self.status < 300


class JudgeHttp:
    """Sends requests to one address, each over its own connection. Belongs to one event loop."""

    def __init__(
        self,
        api_base: str,
        headers: Mapping[str, str],
        max_connections: int,
        section: str = "judge",
        max_bytes: int = MAX_REPLY_BYTES,
    ) -> None:
        """`max_bytes`: of an answer's body. Raises ValueError if the environment names an unusable
        proxy or unusable certificates."""
        self._api_base, self._section, self._max_bytes = api_base, section, max_bytes
        self._headers = {**HEADERS, **headers}
        # A proxy from the environment cannot reach this machine's own loopback.
        proxy = None if is_loopback(api_base) else _proxy_for(api_base)
        self._via_proxy = f", through the proxy that {PROXY_VARIABLES} names" if proxy else ""
        limits = httpx.Limits(max_connections=max_connections)
        try:
            # The bare transport: httpx's client would inflate bodies, keep cookies, parse Location.
            self._transport = httpx.AsyncHTTPTransport(
                api_base.startswith("https:"), limits=limits, proxy=proxy
            )
        except OSError as error:
            raise ValueError(
                f"SSL_CERT_FILE={os.environ.get('SSL_CERT_FILE')}: no certificates can be read "
                f"there ({error.strerror or error}): set it to those of the issuer of the "
                "endpoint's certificate, or unset it"
            ) from None
        except (ImportError, ValueError, httpx.InvalidURL) as error:
            raise ValueError(
                f"{PROXY_VARIABLES} names a proxy that cannot be used for "
                f"{section}.api_base={api_base} ({excerpt(str(error), SHOWN_CHARS)}): set it to "
                "http://host:port, or name the endpoint's host in NO_PROXY"
            ) from None

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None,
        timeout_s: float,
        content_type: str = "application/json",
    ) -> HttpAnswer:
        """Send a request and read the answer, within `timeout_s`.

        Raises `RequestTrouble` (timeout, transport) if no answer came, or if the body of a 2xx is
        incomplete. An answer of any other status is returned with as much body as was read.
        """
        timeouts = {"connect": min(CONNECT_TIMEOUT_S, timeout_s)}
        request = httpx.Request(
            method,
            self._api_base + path,
            headers={**self._headers, "Content-Type": content_type},
            content=body,
            extensions={"timeout": timeouts},
        )
        response: httpx.Response | None = None
        received = bytearray()
        unusable = None
        try:
            # httpx's own limits are per read: a reply that trickles in would never exceed them.
            async with asyncio.timeout(timeout_s):
                response = await self._transport.handle_async_request(request)
                async with aclosing(response):
                    unusable = await _receive(response, received, self._max_bytes)
        except Exception as error:
            # Malformed bytes from outside raise errors that share no base class: httpx's own, an
            # ssl.SSLError, a UnicodeError for a host name.
            if response is None or response.is_success:
                raise self._trouble(error, timeout_s) from None
        return HttpAnswer(
            request=f"{method} {request.url}",
            status=response.status_code,
            body=b"" if unusable and response.is_success else bytes(received),
            unusable=unusable,
            retry_after_s=retry_after_s(response.headers.get("Retry-After")),
            location=response.headers.get("Location"),
        )

    def _trouble(self, error: Exception, timeout_s: float) -> RequestTrouble:
        if isinstance(error, TimeoutError | httpx.TimeoutException):
            return RequestTrouble("timeout", f"no reply within {timeout_s:g} s{self._via_proxy}")
        detail = excerpt(f"{type(error).__name__} {error}", SHOWN_CHARS) + self._via_proxy
        is_tls = any(reason in detail for reason in TLS_FAILURES)
        remedy = TLS_REMEDY.format(self._section) if is_tls else ""
        return RequestTrouble("transport", detail + remedy, is_tls=is_tls)

    async def aclose(self) -> None:
        await self._transport.aclose()


def retry_after_s(header: str | None) -> float | None:
    """A Retry-After header (RFC 9110 10.2.3: seconds or an HTTP date) as seconds, 0..120.

    None if there is no header or it cannot be parsed.
    """
    seconds = math.nan
    with suppress(ValueError, OverflowError):
        seconds = parsedate_to_datetime(header or "").timestamp() - time.time()
    with suppress(ValueError):
        seconds = float(header or "")
    return min(max(seconds, 0.0), RETRY_AFTER_CAP_S) if math.isfinite(seconds) else None


async def _receive(response: httpx.Response, received: bytearray, max_bytes: int) -> str | None:
    """Append the body to `received`. Returns why it was not read to its end, or None."""
    encoding = response.headers.get("Content-Encoding", "").strip()
    if encoding.lower() not in ("", "identity"):
        return (
            f"compressed (Content-Encoding: {excerpt(encoding, SHOWN_CHARS)}), which "
            "was not asked for: turn compression off in the endpoint or the gateway before it"
        )
    async for chunk in response.aiter_raw():
        received += chunk
        if len(received) > max_bytes:
            return f"longer than {max_bytes} bytes"
    return None


def multipart(fields: Mapping[str, str], files: Sequence[tuple[str, Any]]) -> tuple[str, bytes]:
    """A form: (its Content-Type, its body). `files`: (field, (file name, content, media type))."""
    form = httpx.Request("POST", "http://form", data=fields, files=files)
    return form.headers["Content-Type"], form.read()


def _proxy_for(url: str) -> str | None:
    """The proxy that the environment names for `url`; None where NO_PROXY exempts it."""
    parts = urlsplit(url)
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(parts.netloc):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


# ---- dialect -------------------------------------------------------------------------------------
# Learns from error messages which optional parameters an endpoint does not accept.

CONTENT = "<content>"
"""Placeholder for the question's parts in a request's parameters."""
RENAMED = "max_completion_tokens"
"""OpenAI's newer name of `max_tokens`."""
OPTIONAL = {
    "top_p": "top_p",
    "seed": "seed",
    "response_format": r"response_format|json.?schema|structured.outputs?|guided_\w+",
    "temperature": "temperature",
    "max_tokens": "max_tokens",
}
"""Parameter -> how an error page names it; those that matter least come first. All are left out but
the last, which is sent under its new name, so that every reply is bounded."""
REFUSING_STATUSES = frozenset({400, 422, 500})
"""Including 500: LiteLLM's proxy and llama.cpp's server have refused parameters with it."""


@dataclass(eq=False)
class Request:
    """One question as it is sent to an endpoint that accepts every parameter."""

    optional: ClassVar[Mapping[str, str]] = OPTIONAL
    parameters: Mapping[str, Any]
    """Fields of the request's body; the content of its one message is `[CONTENT]`."""
    content: Sequence[bytes]
    """JSON of the message's parts."""
    labels: tuple[str, ...] = ()
    """As `Question.labels`."""
    shape: object = None
    """Equal for questions that an endpoint takes or refuses together: (the labels, for each part
    whether it is text)."""
    path: str = "/chat/completions"
    num_sent: int = 0  # requests; repeats without a refused parameter included

    @cached_property
    def key(self) -> str:
        """Journal key of the reply; it does not depend on which parameters an endpoint refuses."""
        return hashlib.sha256(self.body(set())).hexdigest()

    def sent(self, without: Set[str]) -> dict[str, Any]:
        """The parameters to send to an endpoint that does not accept those in `without`."""
        sent = {name: value for name, value in self.parameters.items() if name not in without}
        if "max_tokens" in without:
            sent[RENAMED] = self.parameters["max_tokens"]
        return sent

    def read(self, body: bytes) -> Chat:
        """What a successful answer says. Raises UnreadableReplyError."""
        return read_chat(body, self.labels)

    def encoded(self, without: Set[str]) -> tuple[str, bytes]:
        """(Content-Type, body)."""
        return "application/json", self.body(without)

    def body(self, without: Set[str]) -> bytes:
        # Pictures are megabytes: they are inserted as they are, not escaped for each question.
        text = json.dumps(self.sent(without)).encode()
        before, _, after = text.partition(json.dumps(CONTENT).encode())
        return b"".join([before, b", ".join(self.content), after])


@dataclass
class Dialect:
    """What one endpoint does not accept."""

    names: set[str] = field(default_factory=set)
    """Parameters that are left out."""
    taken: set[str] = field(default_factory=set)
    """Parameters that it has accepted: a later refusal concerns the value, not the name."""
    model_names: list[str] = field(default_factory=list)
    """Models other than `judge.model` that its replies have named."""

    def learn(self, request: Request, without: Set[str]) -> Set[str]:
        """Note that `request` got a reply without these parameters; returns the new ones."""
        learnt = without - self.names - self.taken
        self.names |= learnt
        self.taken |= request.sent(without).keys()
        return learnt


def refused_parameter(
    status: int, page: bytes, sent: Mapping[str, Any], optional: Mapping[str, str] = OPTIONAL
) -> str | None:
    """The parameter in `sent` to leave out after an answer: of those that an error page names, the
    one that matters least. None if it names none. `optional`: of the form of `OPTIONAL`."""
    if status not in REFUSING_STATUSES:
        return None
    text = page.decode("utf-8", "replace").lower()
    for name, pattern in optional.items():
        if name in sent and re.search(rf"(?<![a-z_])(?:{pattern})(?![a-z_])", text):
            return name
    return None


# ---- journal -------------------------------------------------------------------------------------
# Journals the judge's replies: a resumed iteration asks only for those that it lacks.

log = logging.getLogger(__name__)


class ReplyJournal:
    """Key -> the judge's reply without secrets; the first one counts. A file of JSON lines; a line
    whose reply is null cancels the earlier lines of its key."""

    def __init__(self, path: Path) -> None:
        require_in_place(path)
        self._path = path
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = [line for line in lines_of(self._path) if line.endswith(b"\n")]
        self._file = open(self._path, "ab", buffering=0, opener=private)  # noqa: SIM115 - `close`
        # A process killed while writing leaves half a line; the next line must not join it.
        self._file.truncate(sum(map(len, lines)))
        self._replies: dict[str, str] = {}
        for line in lines:
            match row_of(line):
                case {"key": str(key), "reply": str(reply)}:
                    self._replies.setdefault(key, reply)
                case {"key": str(key), "reply": None}:
                    self._replies.pop(key, None)
        self._failed: set[str] = set()
        """Keys of the replies to questions for which no reply was usable."""
        self._has_warned = False

    def get(self, key: str) -> str | None:
        return self._replies.get(key)

    def put(self, key: str, reply: str) -> str:
        """Write the reply to disk; returns it as stored, which is what a resumed run reads."""
        kept = self._replies.setdefault(key, scrub(reply))
        self._write(key, kept)
        return kept

    def note_failed(self, keys: Iterable[str]) -> None:
        """Remember that the replies under `keys` did not answer their question."""
        self._failed.update(keys)

    def drop_unusable(self) -> None:
        """Drop the replies that `note_failed` noted: they are requested again, also on resume."""
        for key in self._failed & self._replies.keys():
            del self._replies[key]
            self._write(key, None)
        self._failed.clear()

    def _write(self, key: str, reply: str | None) -> None:
        try:
            append(self._file, (json.dumps({"key": key, "reply": reply}) + "\n").encode())
        except Exception as error:  # whatever the error, the reply is in memory
            if not self._has_warned:
                reason = getattr(error, "strerror", None) or repr(error)
                text = "%s: %s; replies that are not saved will be asked for again after a restart"
                log.warning(text, self._path, reason)
            self._has_warned = True

    def close(self) -> None:
        self._file.close()


# ---- background ----------------------------------------------------------------------------------
# Runs asyncio coroutines in a daemon thread, so that judging goes on while the caller renders.

T = TypeVar("T")

JOIN_TIMEOUT_S = 10.0
POLL_S = 0.5


class StoppedError(Exception):
    """The process was asked to stop before the coroutine ended."""


class BackgroundLoop(AbstractContextManager["BackgroundLoop"]):
    """Runs coroutines until `close()`. Use one per process: an httpx pool works in one loop."""

    def __init__(self, name: str = "background-loop") -> None:
        self._ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), name=name, daemon=True
        )
        self._thread.start()
        self._loop, self._end = self._ready.result()

    async def _serve(self) -> None:
        end = asyncio.Event()
        self._ready.set_result((asyncio.get_running_loop(), end))
        await end.wait()

    def submit(self, coro: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `coro` in the loop; its result, exception or cancellation arrives in the future.

        Raises RuntimeError after `close()`.
        """
        if self._loop.is_closed():
            coro.close()
            raise RuntimeError("this BackgroundLoop is closed: submit before close()")
        return asyncio.run_coroutine_threadsafe(coro, self._loop)

    def run(self, coro: Coroutine[Any, Any, T], should_stop: Callable[[], bool]) -> T:
        """The result of `coro`. Raises StoppedError, and cancels it, once `should_stop()` holds."""
        future = self.submit(coro)
        while not wait([future], timeout=POLL_S).done:
            if should_stop():
                future.cancel()
                raise StoppedError
        return future.result()

    def close(self) -> None:
        """Cancel all coroutines and wait at most `JOIN_TIMEOUT_S` for them. Does nothing a second
        time."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(JOIN_TIMEOUT_S)

    def __exit__(self, *_: object) -> None:
        self.close()
