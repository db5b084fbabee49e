"""Where the judge is: the forms `judge.api_base` may take, and what to do when it says no."""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from rl.config.schema import JudgeConfig
from rl.record.untrusted import shown

DEFAULT_PORT = 4877
"""Of scripts/serve_judge.sh; a file may hold a bare host."""
MAX_FILE_CHARS = 4096
MAX_REASON_CHARS = 200

_HOST = re.compile(r"[A-Za-z0-9.-]+(:\d+)?(/.*)?")
_HOST_AND_PORT = re.compile(r"([A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\]):\d+(/.*)?")
_DNS_NAME = re.compile(r"(?=.{1,253}\Z)([A-Za-z0-9_-]{1,63}\.)*[A-Za-z0-9_-]{1,63}\.?")
_VERSION = re.compile(r"v\d[a-z0-9]*")


def resolve_api_base(value: str) -> str:
    """`judge.api_base` as the URL that requests are appended to, e.g. 'http://host:4877/v1'.

    Takes a URL with or without '/v1' and trailing slash, 'host:port', or a file whose first line
    holds a URL, a host, or host:port. Raises ValueError naming the key and the remedy.
    """
    value = value.strip()
    if value.lower() in ("", "none"):
        raise ValueError(
            "judge.api_base is empty, and a reward needs a judge: set it to the endpoint's URL, to "
            "a file that holds it, or have the run start one by judge.start_command"
        )
    if "://" in value or _HOST_AND_PORT.fullmatch(value):
        return _normalise(value, f"judge.api_base={value!r}")
    if not _is_file(value):
        raise ValueError(
            f"judge.api_base={value!r} is neither a URL (http://host:{DEFAULT_PORT}), nor "
            "host:port, nor a file that exists; a judge that the run itself is to start is named "
            "by judge.start_command"
        )
    return _from_file(Path(value))


def _is_file(value: str) -> bool:
    try:
        return Path(value).is_file()
    except OSError:  # a name longer than the file system takes, a folder that may not be entered
        return False


def _from_file(path: Path) -> str:
    where = f"judge.api_base: the file {path}"
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            words = file.read(MAX_FILE_CHARS).split()
    except OSError as error:
        raise ValueError(f"{where} cannot be read ({error.strerror})") from None
    if not words:
        raise ValueError(f"{where} is empty; write the judge's URL or host into it")
    held = words[0]
    if "://" not in held and _HOST_AND_PORT.fullmatch(held) is None:
        if _HOST.fullmatch(held) is None:
            raise ValueError(f"{where} holds {held[:80]!r}, which is neither a URL nor a host")
        host, slash, path_part = held.partition("/")
        held = f"{host}:{DEFAULT_PORT}{slash}{path_part}"
    return _normalise(held, where)


def _normalise(url: str, where: str) -> str:
    url = url if "://" in url else f"http://{url}"
    rest = url.partition("://")[2]
    if "@" in rest.partition("/")[0] or "?" in rest or "#" in rest:
        # Not quoted: what stands there may be a key.
        raise ValueError(
            "judge.api_base must be a plain URL without user, password or query: keys come from "
            "the environment variable that judge.api_key_env names"
        )
    try:
        parts = urlsplit(url)
        segments = [segment for segment in parts.path.split("/") if segment]
        if segments[-2:] == ["chat", "completions"]:
            segments = segments[:-2]
        # A gateway that versions in another way (/v1beta/openai) has said where it wants requests.
        if not any(_VERSION.fullmatch(segment) for segment in segments):
            segments.append("v1")
        base = f"{parts.scheme}://{parts.netloc}/{'/'.join(segments)}"
        _check_askable(base)
    except (ValueError, httpx.InvalidURL) as error:
        reason = shown(str(error), MAX_REASON_CHARS)
        raise ValueError(f"{where} is not an http(s) URL with a host: {reason}") from None
    return base


def _check_askable(url: str) -> None:
    """Raise ValueError or httpx.InvalidURL for what would fail at each request."""
    parsed = httpx.URL(url)
    name = parsed.host  # decodes 'xn--' names
    host = parsed.raw_host.decode("ascii")
    if parsed.scheme not in ("http", "https"):
        raise ValueError(f"its scheme is {parsed.scheme!r}")
    is_address = ":" in host  # httpx has read it as IPv6
    if not is_address and _DNS_NAME.fullmatch(host) is None:
        raise ValueError(f"{name!r} is no host name")
    if parsed.port is not None and not 1 <= parsed.port <= 65535:
        raise ValueError(f"port {parsed.port} is not in 1..65535")


def is_loopback(api_base: str) -> bool:
    host = urlsplit(api_base).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def auth_header(api_key_env: str) -> dict[str, str]:
    """The header that carries the key; {} for a judge without one.

    Raises ValueError when the environment lacks the variable, or holds what no header takes.
    """
    if not api_key_env:
        return {}
    key = os.environ.get(api_key_env, "").strip()
    if not key:
        raise ValueError(
            f"judge.api_key_env names {api_key_env}, which is not in the environment: "
            f"export {api_key_env}=..., or set judge.api_key_env: '' for a judge without key"
        )
    if not (key.isascii() and key.isprintable()):
        raise ValueError(
            f"judge.api_key_env names {api_key_env}, whose value no HTTP header takes: it holds a "
            f"line end or a character beyond ASCII. Copy the key anew into {api_key_env}"
        )
    return {"Authorization": f"Bearer {key}"}


def remedy_for(status: int, location: str | None, config: JudgeConfig) -> str:
    """What a person can do about a refusal."""
    if status in (401, 403):
        held = f"it names {config.api_key_env}" if config.api_key_env else "it is ''"
        return (
            "Remedy: judge.api_key_env must name the environment variable that holds a valid key "
            f"({held})."
        )
    if status == 404:
        return f"Remedy: check the path in judge.api_base and judge.model={config.model!r}."
    if location is not None:
        return f"Remedy: set judge.api_base to where it points ({location})."
    return (
        "Remedy: the request itself does not suit this endpoint. Check "
        f"judge.model={config.model!r} (does it take pictures, and two of them?), "
        "judge.image_side_px and judge.max_tokens against its context, and judge.guided_json."
    )
