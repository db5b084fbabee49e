"""The one door through which a judge's bytes come in, bounded in size and in time.

One HTTP request -> a status, two headers, and the body as it came over the wire: never inflated,
never decoded by what its headers claim, never redirected.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from rl.judge.endpoint import is_loopback
from rl.record.scrub import scrub
from rl.record.untrusted import shown

CONNECT_TIMEOUT_S = 10.0
MAX_REPLY_BYTES = 2 * 2**20
"""The longest readable reply (`judge_reply.MAX_REPLY_CHARS`) takes 1.2 MB where JSON spells each
sign at its longest."""
MAX_ERROR_PAGE_BYTES = 64 * 2**10
"""Of any answer but HTTP 200 a sentence is shown; what is beyond this is not waited for."""
SHOWN_HEADER_CHARS = 200
SHOWN_ERROR_CHARS = 300
TRUST_IT = (
    "have its certificate trusted here (SSL_CERT_FILE=<a .pem of who signed it>), or set an "
    "http:// URL in judge.api_base"
)
"""What to do about a certificate that is self-signed, expired, or of another host."""
HEADERS = {
    "Accept": "application/json",
    "Accept-Encoding": "identity",
    "Content-Type": "application/json",
    "User-Agent": f"python-httpx/{httpx.__version__}",
}


class RequestTrouble(Exception):  # noqa: N818 (an outcome of one request, never the run's)
    """One request that brought no answer that could be used."""

    def __init__(self, cause: str, detail: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"{cause}: {scrub(detail)}")
        self.cause = cause
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class HttpAnswer:
    """What came back."""

    request: str
    """'POST http://...', for messages."""
    status: int
    body: bytes
    """Whole if the status is 200 and `unusable` is None; else what was had of it."""
    unusable: str | None
    """Why the body was not read to its end: it is compressed, or too long."""
    retry_after: str | None
    location: str | None


class JudgeHttp:
    """One connection pool. Belongs to one event loop."""

    def __init__(self, api_base: str, headers: Mapping[str, str], max_connections: int) -> None:
        self._api_base = api_base
        self._headers = {**HEADERS, **headers}
        is_local = is_loopback(api_base)
        # The bare transport: httpx's client would inflate bodies, keep cookies, parse Location.
        self._transport = httpx.AsyncHTTPTransport(
            # uvicorn (vLLM) drops idle connections after 5 s; to reuse one at that very moment is
            # a transport error.
            limits=httpx.Limits(max_connections=max_connections, keepalive_expiry=3.0),
            # A proxy from the environment cannot reach this machine's own loopback.
            proxy=None if is_local else _proxy_for(api_base),
            trust_env=not is_local or api_base.startswith("https:"),  # SSL_CERT_FILE alone is read
        )

    async def request(
        self, method: str, path: str, body: bytes | None, timeout_s: float
    ) -> HttpAnswer:
        """Send, and read what comes until `timeout_s` from now.

        Raises `RequestTrouble` (timeout, transport) when nothing came, or a 200 that broke off. Any
        other status stands, whatever becomes of its body.
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
            # httpx's own limits are per read: a reply that trickles would pass them for ever.
            async with asyncio.timeout(timeout_s):
                response = await self._transport.handle_async_request(request)
                unusable = await _receive(response, received)
        except (TimeoutError, httpx.TimeoutException):
            if response is None or response.status_code == 200:
                raise RequestTrouble("timeout", f"no reply within {timeout_s:g} s") from None
        except Exception as error:
            # What bytes from outside make the HTTP stack raise has no class in common: httpx's own
            # errors, ssl.SSLError, UnicodeError for a host name.
            if response is None or response.status_code == 200:
                detail = shown(f"{type(error).__name__} {error}", SHOWN_ERROR_CHARS)
                if _is_distrusted(error):
                    detail += f"; {TRUST_IT}"
                raise RequestTrouble("transport", detail) from None
        return HttpAnswer(
            request=f"{method} {request.url}",
            status=response.status_code,
            body=bytes(received),
            unusable=unusable,
            retry_after=response.headers.get("Retry-After"),
            location=response.headers.get("Location"),
        )

    async def aclose(self) -> None:
        await self._transport.aclose()


def _is_distrusted(error: BaseException | None) -> bool:
    """A certificate that nobody here vouches for, under whatever httpx and httpcore wrap it in."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        error = error.__cause__ or error.__context__
    return False


async def _receive(response: httpx.Response, received: bytearray) -> str | None:
    """Append the body to `received`; why it was left unread, or None."""
    limit = MAX_REPLY_BYTES if response.status_code == 200 else MAX_ERROR_PAGE_BYTES
    encoding = response.headers.get("Content-Encoding", "").strip()
    try:
        if encoding.lower() not in ("", "identity"):
            return (
                f"compressed (Content-Encoding: {shown(encoding, SHOWN_HEADER_CHARS)}), which was "
                "not asked for: turn compression off in the endpoint or the gateway before it"
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
    """The proxy that the environment (HTTPS_PROXY, ALL_PROXY, NO_PROXY) names for `url`."""
    parts = urlsplit(url)
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(parts.netloc):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"
