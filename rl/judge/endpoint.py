"""Resolves `judge.api_base`, reads the judge's key, and names the remedy for a refusal."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from rl.config.loading import not_a_file, read_text
from rl.config.schema import JudgeConfig
from rl.printing import MIN_CHARS, excerpt, is_placeholder, remember

MAX_FILE_BYTES = 4096
MAX_REASON_CHARS = 200

_HOST_AND_PORT = re.compile(r"([A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\]):\d+(/.*)?")
_VERSION = re.compile(r"v\d[a-z0-9]*")


def resolve_api_bases(value: str | Sequence[str]) -> tuple[str, ...]:
    """The base URLs in `judge.api_base`, such as 'http://host:4877/v1', without duplicates.

    Accepts, in a list or separated by commas: a URL with or without '/v1' and trailing slash,
    'host:port', or a file with one such address per line. Raises ValueError naming the key and
    the remedy.
    """
    texts = [value] if isinstance(value, str) else value
    entries = [entry.strip() for text in texts for entry in text.split(",")]
    entries = [entry for entry in entries if entry.lower() not in ("", "none")]
    if not entries:
        raise ValueError(
            "judge.api_base is empty, and a reward needs a judge: set it to the endpoint's URL, to "
            "a file that contains it, or have the run start a judge (judge.start_command)"
        )
    addresses = (address for entry in entries for address in _addresses_in(entry))
    return tuple(dict.fromkeys(_normalise(*address) for address in addresses))


def resolve_api_base(value: str | Sequence[str]) -> str:
    """The URL of `judge.api_base`. Raises ValueError if it names several."""
    bases = resolve_api_bases(value)
    if len(bases) > 1:
        raise ValueError(
            f"judge.api_base names {len(bases)} addresses, but the judge that judge.start_command "
            "starts has one address: drop start_command, or all addresses but one"
        )
    return bases[0]


def _addresses_in(entry: str) -> list[tuple[str, str]]:
    """(address, its origin for messages); `entry` is an address, or a file with addresses."""
    if _is_address(entry):
        return [(entry, f"judge.api_base={entry!r}")]
    if not_a_file(entry):
        raise ValueError(
            f"judge.api_base={entry!r} is neither a URL (http://host:4877), nor host:port, nor a "
            "file that exists; to have the run start a judge itself, set "
            "judge.start_command"
        )
    where = f"judge.api_base: the file {Path(entry)}"
    try:
        text = read_text(entry, MAX_FILE_BYTES)
    except ValueError as error:
        raise ValueError(f"{where} {error}") from None
    lines = [line.split() for line in text.split("\n") if line.strip()]
    if not lines:
        raise ValueError(f"{where} is empty; write the judge's URL into it")
    # A comment may follow an address; a later line of several words without one is a comment.
    addresses = [
        parts[0] for parts in lines if parts is lines[0] or len(parts) == 1 or _is_address(parts[0])
    ]
    for address in addresses:
        if not _is_address(address):
            raise ValueError(f"{where}: {address[:80]!r} is neither a URL nor host:port")
    return [(address, where) for address in addresses]


def _is_address(text: str) -> bool:
    return "://" in text or _HOST_AND_PORT.fullmatch(text) is not None


def _normalise(url: str, where: str) -> str:
    url = url if "://" in url else f"http://{url}"
    without_scheme = url.partition("://")[2]
    if "@" in without_scheme.partition("/")[0] or "?" in without_scheme or "#" in without_scheme:
        # The message does not quote the URL, because it may contain a key.
        raise ValueError(
            "judge.api_base must be a plain URL without user, password or query: keys come from "
            "the environment variable that judge.api_key_env names"
        )
    try:
        parts = urlsplit(url)
        segments = [segment for segment in parts.path.split("/") if segment]
        if segments[-2:] == ["chat", "completions"]:
            segments = segments[:-2]
        # A path that already contains a version (/v1beta/openai) is kept as it is.
        if not any(_VERSION.fullmatch(segment) for segment in segments):
            segments.append("v1")
        base = f"{parts.scheme}://{parts.netloc}/{'/'.join(segments)}"
        parsed = httpx.URL(base)
        # `port` raises ValueError beyond 65535.
        if parsed.scheme not in ("http", "https") or not parsed.raw_host or parts.port == 0:
            raise ValueError(f"{base!r} has no http:// or https://, or no host or port")
    except (ValueError, httpx.InvalidURL) as error:
        reason = excerpt(str(error), MAX_REASON_CHARS)
        raise ValueError(f"{where} is not an http(s) URL with a host: {reason}") from None
    return base


def is_loopback(api_base: str) -> bool:
    host = urlsplit(api_base).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def auth_header(api_key_env: str) -> dict[str, str]:
    """The HTTP header with the judge's key; {} for a judge without a key.

    Registers the variable as a secret, whatever its name. Raises ValueError if it is not set, or
    if its value is too short for a key or not allowed in a header.
    """
    if not api_key_env:
        return {}
    remember(api_key_env)
    key = os.environ.get(api_key_env, "").strip()
    if not key:
        raise ValueError(
            f"judge.api_key_env names {api_key_env}, which is not in the environment: "
            f"export {api_key_env}=..., or set judge.api_key_env: '' for a judge without key"
        )
    if not (key.isascii() and key.isprintable()):
        raise ValueError(
            f"judge.api_key_env names {api_key_env}, whose value is not valid in an HTTP header: "
            f"it has a line end or a non-ASCII character. Copy the key again into {api_key_env}"
        )
    if len(key) < MIN_CHARS and not is_placeholder(key):
        raise ValueError(
            f"judge.api_key_env names {api_key_env}, whose value has {len(key)} characters: a "
            f"key of fewer than {MIN_CHARS} cannot be removed from the logs safely, since ordinary "
            f"words may contain it. Copy the whole key into {api_key_env}; for a keyless judge set "
            f"judge.api_key_env: '', or {api_key_env}=EMPTY"
        )
    return {"Authorization": f"Bearer {key}"}


LOGPROBS_REMEDY = (
    "Remedy: this reward reads the log-probs of the judge's first token (logprobs, top_logprobs), "
    "which vLLM's server returns and some hosted models do not, above all those that think first. "
    "Serve judge.model with vLLM, choose another, or use a reward that reads written scores "
    "('viescore', 'rubric')."
)


def remedy_for(status: int, location: str | None, config: JudgeConfig) -> str:
    """What the user can do about an HTTP refusal. `location`: target of a redirect."""
    if status in (401, 403):
        setting = f"it names {config.api_key_env}" if config.api_key_env else "it is ''"
        return (
            "Remedy: judge.api_key_env must name the environment variable that holds a valid key "
            f"({setting})."
        )
    if status == 402:
        return "Remedy: pay for this endpoint, or set judge.api_base to another one."
    if status == 407:
        return "Remedy: put the proxy's user and password into the URL of HTTP_PROXY (ALL_PROXY)."
    if status == 429:
        return (
            f"Remedy: fewer requests at once (judge.max_concurrency={config.max_concurrency}, on "
            "each rank), or a higher quota; wait, or pay, if the quota is used up."
        )
    if status == 404:
        return f"Remedy: check the path in judge.api_base and judge.model={config.model!r}."
    if location is not None:
        return f"Remedy: set judge.api_base to where it points ({location})."
    return (
        "Remedy: this endpoint does not accept the request. It needs a vision-language model "
        f"(judge.model={config.model!r}) that accepts the source pictures and the result together "
        "(vllm serve --limit-mm-per-prompt '{\"image\": 2}', JUDGE_IMAGES of "
        "scripts/serve_judge.sh), and a context window for them and the reply (--max-model-len, "
        f"JUDGE_MAX_LEN; or lower judge.image_side_px={config.image_side_px}, "
        f"judge.max_tokens={config.max_tokens}); or set judge.guided_json: 'never'."
    )
