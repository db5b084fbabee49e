"""Which values of the environment are keys and passwords.

What: `secrets`, told by what a variable is called and by what its value looks like. What not:
finding them in a text (`scrub.py`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any
from urllib.parse import unquote

MIN_CHARS = 8
"""Shorter values are no keys, and replacing every 'test' would garble the record."""
MIN_USER_CHARS = 16
"""A URL's user without a password is a token if it is as long as that, else a name."""

_LONG_WORDS = re.compile(
    r"TOKEN(?!IZ)|SECRET|PASSW|PASSPHRASE|API_?KEY|CREDENTIAL|PRIVATE_?KEY|ACCESS_?KEY|COOKIE|WEBHOOK"
)
"""Anywhere in a name."""
_WORD = re.compile(
    r"(?:\w*KEYS?|\w*PASS|PW|PWD|PSWD|CREDS?|PATS?|AUTH|AUTHORIZATION|BEARER|JWT|DSN|SAS|OTP|PIN|"
    r"CONN(?:ECTION)?_?STR(?:ING)?)\d*"
)
"""One of a name's words, whole, or two that stand side by side."""
_NO_SECRET = re.compile(
    r"(?:OLD)?PWD|(?!.*WEBHOOK).*_(?:FILE|PATH|DIR|FOLDER|HOME|SOCK|SOCKET|NAME|USER|USERNAME|HOST|PORT|"
    r"URL|URI|ENDPOINT|DOMAIN|LENGTH|SIZE|LIMIT|COUNT|TIMEOUT|TTL|ENABLED|DISABLED|REQUIRED|MODE|TYPE|"
    r"METHOD|PROVIDER|BACKEND|POLICY|SCOPE|VERSION|ALGORITHM|ENV|ID)"
)
"""Whole names of what lies beside a secret."""
_PLACEHOLDERS = re.compile(
    r"(?:sk)?(?:|empty|none|null|nil|na|unset|unused|ignored|any|anything|whatever|local|localhost|x+|"
    r"(?:my|your|dummy|fake|test|empty|no|any)?(?:api)?(?:key|token)|nokeyrequired|dummy|fake|test|"
    r"testing|placeholder|example|changeme|no|off|false|noauth|not(?:needed|required|used)|vllm|"
    r"sglang|ollama|lmstudio|llamacpp|disabled|required|optional|anonymous|unlimited)"
)
"""What people give to servers that want no key, and settings that are none."""

_USER_INFO = re.compile(r"://([^\s/?#@]*)@")
_URL_PASSWORD = re.compile(r"://[^:@/\s]*:(\S+)@")
_ASSIGNMENT = re.compile(r"([A-Za-z_][\w-]*)\s*[=:]\s*([^\s;&,]+)")
_SCHEME_WORD = re.compile(r"(?:bearer|basic|token|digest|apikey|key)\s+(\S.*)", re.IGNORECASE)

_named: set[str] = set()


def remember(name: str) -> None:
    """The variable `name` holds a key, whatever it is called."""
    _named.add(name)


def is_placeholder(value: str) -> bool:
    """Whether `value` is what one writes where no key is wanted: EMPTY, none, sk-no-key."""
    return _PLACEHOLDERS.fullmatch(re.sub(r"[\W_]", "", value.lower())) is not None


def secrets(also_names: tuple[str, ...] = ()) -> tuple[tuple[str, str], ...]:
    """(name, secret) of all that the environment holds now, the longest first.

    Secret is the value of a variable that is called like one (`..._KEY`, `DB_PASS`, `GITHUB_PAT`,
    `COOKIE`), is listed in `also_names` or was told to `remember`; and in every other variable the
    password of a URL and what follows a name like these (`...?token=`).
    """
    return _secrets(tuple(os.environ.items()), frozenset(also_names) | _named)


def environment_without(*needed: str) -> dict[str, str]:
    """The environment for a helper process: of the variables that hold a secret only `needed`,
    proxies and APP__ ones, which a user names for the run, are in it."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in needed
        or name.startswith("APP__")
        or name.lower().endswith("_proxy")
        or not _secrets(((name, value),), frozenset(_named))
    }


@lru_cache(maxsize=8)
def _secrets(
    environment: tuple[tuple[str, str], ...], named: frozenset[str]
) -> tuple[tuple[str, str], ...]:
    found: dict[str, str] = {}
    for name, value in environment:
        for part in _parts(value, name in named or is_secret_name(name)):
            text = part.strip().strip("'\"")
            if len(text) >= MIN_CHARS and not is_placeholder(text):
                found.setdefault(text, name)
    return tuple(sorted(((name, text) for text, name in found.items()), key=lambda s: -len(s[1])))


def is_secret_name(name: str) -> bool:
    """Of a variable, or of a field inside one's value."""
    upper = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).upper().replace("-", "_").strip("_")
    if _NO_SECRET.fullmatch(upper):
        return False
    words = upper.split("_")
    pairs = (f"{a}_{b}" for a, b in pairwise(words))
    return bool(_LONG_WORDS.search(upper)) or any(map(_WORD.fullmatch, (*words, *pairs)))


def _parts(value: str, is_secret: bool) -> Iterator[str]:
    """What of a variable's value is secret."""
    if is_secret and not (value.startswith(("/", "~")) and os.path.exists(value)):
        yield value
        if said := _SCHEME_WORD.fullmatch(value.strip()):
            yield said[1]
        if ":" in value and "://" not in value:  # user:password
            yield value.rpartition(":")[2]
        if value.count("\n"):  # a PEM file
            yield from (line for line in value.split("\n") if not line.startswith("-----"))
        yield from (text for _, text in _ASSIGNMENT.findall(value))  # a cookie's
    for user_info in _USER_INFO.findall(value):
        user, _, password = user_info.partition(":")
        is_token = len(user) >= MIN_USER_CHARS and password in ("", "x", "x-oauth-basic")
        text = user if is_token else password
        yield from (text, unquote(text))
    for password in _URL_PASSWORD.findall(value):
        yield from (password, unquote(password))
    for name, text in _ASSIGNMENT.findall(value):
        if is_secret_name(name):
            yield from (text, unquote(text))
    if value.lstrip().startswith("{"):
        yield from _leaves(value)


def _leaves(value: str) -> Iterator[str]:
    """Strings of a JSON object under a name like a secret's: a service account."""
    try:
        pending: list[Any] = [json.loads(value)]
    except (ValueError, RecursionError):
        return
    while pending:
        item = pending.pop()
        if isinstance(item, list):
            pending += item
        elif isinstance(item, Mapping):
            for name, inner in item.items():
                if isinstance(inner, str) and is_secret_name(name):
                    yield from _parts(inner, True)
                elif not isinstance(inner, str):
                    pending.append(inner)
