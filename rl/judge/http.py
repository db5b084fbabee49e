"""One HTTP request to a judge: bounded in size and time, never inflated, never redirected."""

from __future__ import annotations

import asyncio
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from rl.judge.endpoint import is_loopback
from rl.printing import excerpt, scrub

CONNECT_TIMEOUT_S = 10.0
MAX_REPLY_BYTES = 2 * 2**20
"""The longest readable reply (`reply.MAX_REPLY_CHARS`) takes at most 1.2 MB as JSON."""
MAX_ERROR_PAGE_BYTES = 64 * 2**10
"""At most this much of the body is read if the status is not 2xx."""
SHOWN_HEADER_CHARS = 200
SHOWN_ERROR_CHARS = 300
RETRY_AFTER_CAP_S = 120.0
PROXY_VARIABLES = "HTTP_PROXY (HTTPS_PROXY, ALL_PROXY)"
_SECONDS = re.compile(r"-?[0-9]+(\.[0-9]+)?")
TOO_MANY_REQUESTS = "http_429"
"""The cause of a `RequestTrouble`."""
HEADERS = {
    "Accept": "application/json",
    "Accept-Encoding": "identity",
    # A second reply on a connection that is kept would be read as the answer to the next question.
    "Connection": "close",
    "Content-Type": "application/json",
    "User-Agent": f"python-httpx/{httpx.__version__}",
}


class RequestTrouble(Exception):  # noqa: N818 (an outcome of one request, never the run's)
    """A request that got no usable answer."""

    def __init__(
        self, cause: str, detail: str, retry_after_s: float | None = None, is_tls: bool = False
    ) -> None:
        """`is_tls`: a certificate or protocol failure of TLS, which waiting does not fix."""
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

    def __init__(self, api_base: str, headers: Mapping[str, str], max_connections: int) -> None:
        """Raises ValueError if the environment names an unusable proxy or unusable certificates."""
        self._api_base = api_base
        self._headers = {**HEADERS, **headers}
        # A proxy from the environment cannot reach this machine's own loopback.
        proxy = None if is_loopback(api_base) else _proxy_for(api_base)
        self._via_proxy = f", through the proxy that {PROXY_VARIABLES} names" if proxy else ""
        is_tls = api_base.startswith("https:")
        tls = _tls_context() if is_tls else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # trusts nobody
        try:
            # The bare transport: httpx's client would inflate bodies, keep cookies, parse Location.
            self._transport = httpx.AsyncHTTPTransport(
                tls, limits=httpx.Limits(max_connections=max_connections), proxy=proxy
            )
        except (ImportError, ValueError, httpx.InvalidURL) as error:
            raise ValueError(
                f"{PROXY_VARIABLES} names a proxy that cannot be used for judge.api_base={api_base}"
                f" ({excerpt(str(error), SHOWN_ERROR_CHARS)}): set it to http://host:port, or name "
                "the judge's host in NO_PROXY"
            ) from None

    async def request(
        self, method: str, path: str, body: bytes | None, timeout_s: float
    ) -> HttpAnswer:
        """Send a request and read the answer, within `timeout_s`.

        Raises `RequestTrouble` (timeout, transport) if no answer came, or if the body of a 2xx is
        incomplete. An answer of any other status is returned with as much body as was read.
        """
        timeout = httpx.Timeout(timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s))
        request = httpx.Request(
            method,
            self._api_base + path,
            headers=self._headers,
            content=body,
            extensions={"timeout": timeout.as_dict()},
        )
        response: httpx.Response | None = None
        received = bytearray()
        unusable = None
        try:
            # httpx's own limits are per read: a reply that trickles in would never exceed them.
            async with asyncio.timeout(timeout_s):
                response = await self._transport.handle_async_request(request)
                unusable = await _receive(response, received)
        except (TimeoutError, httpx.TimeoutException):
            if response is None or response.is_success:
                detail = f"no reply within {timeout_s:g} s{self._via_proxy}"
                raise RequestTrouble("timeout", detail) from None
        except Exception as error:
            # Malformed bytes from outside raise errors that share no base class: httpx's own, an
            # ssl.SSLError, a UnicodeError for a host name.
            if response is None or response.is_success:
                remedy = _tls_remedy(error)
                detail = excerpt(f"{type(error).__name__} {error}", SHOWN_ERROR_CHARS)
                detail += self._via_proxy + (remedy and f"; {remedy}")
                raise RequestTrouble("transport", detail, is_tls=bool(remedy)) from None
        return HttpAnswer(
            request=f"{method} {request.url}",
            status=response.status_code,
            body=b"" if unusable and response.is_success else bytes(received),
            unusable=unusable,
            retry_after_s=retry_after_s(response.headers.get("Retry-After")),
            location=response.headers.get("Location"),
        )

    async def aclose(self) -> None:
        await self._transport.aclose()


def retry_after_s(header: str | None, now: datetime | None = None) -> float | None:
    """A Retry-After header (RFC 9110 10.2.3: seconds or an HTTP date) as seconds, 0..120.

    None if there is no header or it cannot be parsed.
    """
    if header is None:
        return None
    # float() alone would also take 1e400, 'infinity', 1_0 and other scripts' digits.
    if _SECONDS.fullmatch(header.strip()):
        seconds = float(header)
    else:
        try:
            until = parsedate_to_datetime(header)
            until = until if until.tzinfo else until.replace(tzinfo=UTC)
            seconds = (until - (now or datetime.now(UTC))).total_seconds()
        except (ValueError, TypeError, LookupError, OverflowError):
            return None
    return min(max(seconds, 0.0), RETRY_AFTER_CAP_S)


def _tls_remedy(error: BaseException | None) -> str:
    """The remedy if TLS failed for good, else ''. httpx wraps the ssl error."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return (
                "trust its certificate here (SSL_CERT_FILE=<a .pem of its issuer>), or set "
                "judge.api_base to a host name in the certificate, or to an http:// URL"
            )
        if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
            return "the endpoint does not speak TLS: set an http:// URL in judge.api_base"
        error = error.__cause__ or error.__context__
    return ""


def _tls_context() -> ssl.SSLContext:
    """Trusts the certificates of SSL_CERT_FILE, else SSL_CERT_DIR, else certifi."""
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        file = os.environ.get("SSL_CERT_FILE")
        raise ValueError(
            f"SSL_CERT_FILE={file}: no certificates can be read there ({error.strerror or error}): "
            "set it to those of the issuer of the judge's certificate, or unset it"
        ) from None


async def _receive(response: httpx.Response, received: bytearray) -> str | None:
    """Append the body to `received`. Returns why it was not read to its end, or None."""
    limit = MAX_REPLY_BYTES if response.is_success else MAX_ERROR_PAGE_BYTES
    encoding = response.headers.get("Content-Encoding", "").strip()
    try:
        if encoding.lower() not in ("", "identity"):
            return (
                f"compressed (Content-Encoding: {excerpt(encoding, SHOWN_HEADER_CHARS)}), which "
                "was not asked for: turn compression off in the endpoint or the gateway before it"
            )
        async for chunk in response.aiter_raw():
            received += chunk
            if len(received) > limit:
                del received[limit:]
                return f"longer than {limit} bytes"
    finally:
        await response.aclose()
    return None


def _proxy_for(url: str) -> str | None:
    """The proxy that the environment names for `url`; None where NO_PROXY exempts it."""
    parts = urlsplit(url)
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(parts.netloc):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"
