"""Replaces the environment's secrets (keys, passwords) in text to be written, logged or sent."""

from __future__ import annotations

import base64
import html
import json
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any
from urllib.parse import quote, unquote

MIN_CHARS = 8
"""Shorter values are not treated as secrets: replacing every 'test' would garble the records."""
_MIN_TOKEN_CHARS = 16  # a URL's user name of this length without a password is a token
_SECRET_NAME = re.compile(
    r".*(?:TOKEN(?!IZ)|SECRET|PASSW|PASSPHRASE|API_?KEY|CREDENTIAL|PRIVATE_?KEY|ACCESS_?KEY|COOKIE|"
    r"WEBHOOK).*"
)
_SECRET_WORD = re.compile(
    r"(?:\w*KEYS?|\w*PASS|PW|PWD|PSWD|CREDS?|PATS?|AUTH|AUTHORIZATION|BEARER|JWT|DSN|SAS|OTP|PIN|"
    r"CONN(?:ECTION)?_?STR(?:ING)?)\d*"
)
"""Matched against each word of a name (between underscores), and every two adjacent words."""
_NO_SECRET_NAME = re.compile(
    r"(?:OLD)?PWD|(?!.*WEBHOOK).*_(?:FILE|PATH|DIR|FOLDER|HOME|SOCK|SOCKET|NAME|USER|USERNAME|HOST|PORT|"
    r"URL|URI|ENDPOINT|DOMAIN|LENGTH|SIZE|LIMIT|COUNT|TIMEOUT|TTL|ENABLED|DISABLED|REQUIRED|MODE|TYPE|"
    r"METHOD|PROVIDER|BACKEND|POLICY|SCOPE|VERSION|ALGORITHM|ENV|ID)"
)
_PLACEHOLDER = re.compile(
    r"(?:sk)?(?:|empty|none|null|nil|na|unset|unused|ignored|any|anything|whatever|local|localhost|x+|"
    r"(?:my|your|dummy|fake|test|empty|no|any)?(?:api)?(?:key|token)|nokeyrequired|dummy|fake|test|"
    r"testing|placeholder|example|changeme|no|off|false|noauth|not(?:needed|required|used)|vllm|"
    r"sglang|ollama|lmstudio|llamacpp|disabled|required|optional|anonymous|unlimited)"
)
_ASSIGNMENT = re.compile(r"""([A-Za-z_][\w-]*)["']?\s*[=:]\s*(?:"([^"]+)"|'([^']+)'|([^\s;&,]+))""")
_SCHEME_WORD = re.compile(r"(?:bearer|basic|token|digest|apikey|key)\s+(\S.*)", re.IGNORECASE)
_BASE64_RUN = re.compile(r"[A-Za-z0-9+/]{10,}={0,2}")
"""A secret of eight bytes determines ten base64 characters, independent of the bytes before it."""
_STANDARD_BASE64 = str.maketrans("-_", "+/")
_EVERY_CHARACTER = ("%{:02x}", "\\u{:04x}", "\\x{:02x}", "&#{};", "&#x{:x};")
_Forms = tuple[list[tuple[str, str]], list[tuple[str, str]]]
"""(lower-case form of a secret, its variable) and (base64 core of a secret, its variable)."""

_remembered: set[str] = set()


def remember(name: str) -> None:
    """Treat the environment variable `name` as a secret, even if it is not named like one."""
    _remembered.add(name)


def scrub(text: str) -> str:
    """`text` with every secret of the environment replaced by `<NAME>`; JSON stays JSON.

    Finds a secret in any letter case: verbatim, percent-encoded, escaped as in JSON or HTML (only
    where needed, or every character), in hexadecimal, and in base64, alone or within other data.
    """
    return _scrub(text, _forms(secrets()))


def scrubbed(value: Any) -> Any:
    """A copy of a JSON-like `value` with `scrub` applied to every string."""
    return _scrubbed(value, _forms(secrets()))


def secrets() -> tuple[tuple[str, str], ...]:
    """(name, value) of every secret in the current environment, the longest value first.

    Secrets are the values of variables that are named like a secret (`..._KEY`, `DB_PASS`,
    `COOKIE`) or passed to `remember`. In other variables, a URL's password is a secret, and so is
    the value of a field named like a secret in a query or in JSON.
    """
    return _secrets(tuple(os.environ.items()), frozenset(_remembered))


def environment_without(*needed: str) -> dict[str, str]:
    """The environment for a helper process: without variables that hold secrets, except `needed`,
    `*_proxy` and `APP__*`."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in needed
        or name.startswith("APP__")
        or name.lower().endswith("_proxy")
        or not _secrets(((name, value),), frozenset(_remembered))
    }


def is_placeholder(value: str) -> bool:
    """Whether `value` is a placeholder that means that no key is needed: EMPTY, none, sk-no-key."""
    return _PLACEHOLDER.fullmatch(re.sub(r"[\W_]", "", value.lower())) is not None


def is_secret_name(name: str) -> bool:
    """Whether the name of a variable, or of a field inside a value, is that of a secret."""
    upper = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).upper().replace("-", "_").strip("_")
    words = upper.split("_")
    words += [f"{a}_{b}" for a, b in pairwise(words)]
    is_secret = _SECRET_NAME.fullmatch(upper) or any(map(_SECRET_WORD.fullmatch, words))
    return bool(is_secret) and not _NO_SECRET_NAME.fullmatch(upper)


@lru_cache(maxsize=8)
def _secrets(
    environment: tuple[tuple[str, str], ...], remembered: frozenset[str]
) -> tuple[tuple[str, str], ...]:
    name_of: dict[str, str] = {}
    for name, value in environment:
        for candidate in _candidates(value, name in remembered or is_secret_name(name)):
            text = candidate.strip().strip("'\"")
            if len(text) >= MIN_CHARS and not is_placeholder(text):
                name_of.setdefault(text, name)
    return tuple(sorted(((name, text) for text, name in name_of.items()), key=lambda s: -len(s[1])))


def _candidates(value: str, is_secret: bool) -> Iterator[str]:
    """The whole or parts of a variable's value that may be secrets; `is_secret`: by its name."""
    if is_secret and not (value.startswith(("/", "~")) and os.path.exists(value)):
        yield value
        if match := _SCHEME_WORD.fullmatch(value.strip()):
            yield match[1]
        if ":" in value and "://" not in value:  # user:password
            yield value.rpartition(":")[2]
        lines = re.split(r"\n|\\n", value)  # a PEM file
        yield from (line for line in lines if not line.startswith("-----"))
    for user, password in re.findall(r"://([^:\s/?#@]*):?(\S*)@", value):
        is_token = len(user) >= _MIN_TOKEN_CHARS and password in ("", "x", "x-oauth-basic")
        text = user if is_token else password
        yield from (text, unquote(text))
    for name, *texts in _ASSIGNMENT.findall(value):
        if is_secret or is_secret_name(name):
            for line in re.split(r"\n|\\n", "".join(texts)):
                yield from (line, unquote(line))


@lru_cache(maxsize=8)
def _forms(named_secrets: tuple[tuple[str, str], ...]) -> _Forms:
    plain, cores = [], []
    for name, secret in named_secrets:
        data = secret.encode("utf-8", "surrogateescape")
        escaped = {
            secret,
            secret.replace(" ", "+"),
            data.decode("latin-1"),
            data.hex(),
            quote(data, safe=""),
            quote(data),
            html.escape(secret),
            json.dumps(secret)[1:-1],
            secret.replace("/", "\\/"),
            *("".join(form.format(ord(char)) for char in secret) for form in _EVERY_CHARACTER),
        }
        forms = escaped | {form.replace("\\", "\\\\") for form in escaped}  # JSON within JSON
        plain += [(_lower(form), name) for form in sorted(forms) if len(form) >= MIN_CHARS]
        cores += [(_base64_core(data, offset), name) for offset in range(3)]
    return plain, cores


def _base64_core(data: bytes, offset: int) -> str:
    """The base64 characters that depend only on `data`, when `offset` bytes come before it."""
    coded = base64.b64encode(bytes(offset) + data + bytes(3)).decode("ascii")
    return coded[-(-8 * offset // 6) : (8 * (offset + len(data))) // 6]


def _scrubbed(value: Any, forms: _Forms) -> Any:
    if isinstance(value, (int, float)):  # the most frequent types, so checked first
        return value
    if isinstance(value, str):
        return _scrub(value, forms)
    if isinstance(value, dict):
        return {_scrubbed(k, forms): _scrubbed(v, forms) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_scrubbed(item, forms) for item in value]
    return value


def _scrub(text: str, forms: _Forms) -> str:
    if not forms[0] or len(text) < MIN_CHARS:
        return text
    lower, standard = _lower(text), text.translate(_STANDARD_BASE64)
    spans: list[tuple[int, int, str]] = []
    for form, name in forms[0]:
        end = 0
        while (start := lower.find(form, end)) >= 0:
            end = start + len(form)
            spans.append((start, end, name))
    present = [(core, name) for core, name in forms[1] if core in standard]
    for run in _BASE64_RUN.finditer(standard) if present else ():  # replaces the whole run
        spans += [(*run.span(), name) for core, name in present if core in run[0]]
    pieces, copied_to = [], 0
    for start, end, name in sorted(spans, key=lambda span: (span[0], -span[1])):
        if start >= copied_to:
            # Drop backslashes before the secret: one left alone would escape the `<`.
            pieces += [text[copied_to:start].rstrip("\\"), f"<{name}>"]
        copied_to = max(copied_to, end)
    return "".join([*pieces, text[copied_to:]])


def _lower(text: str) -> str:
    """Lower case of the same length: `str.lower` maps the Turkish capital I to two characters."""
    lower = text.lower()
    return lower if len(lower) == len(text) else text.replace("\u0130", "i").lower()
