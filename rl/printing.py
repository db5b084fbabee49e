"""Text that leaves the process: secrets removed, foreign text escaped; templates; command lines."""

from __future__ import annotations

import argparse
import base64
import html
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, wraps
from pathlib import Path
from textwrap import fill
from typing import IO, Any, NoReturn, TextIO

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from rich.console import Console
from rich.text import Text

from rl.config import loading
from rl.config.loading import nearest, printable
from rl.config.schema import ConfigError, RunConfig, listed
from rl.files import with_leaves
from rl.ranks.signals import is_raised_here, remedy

# ---- scrub ---------------------------------------------------------------------------------------
# Replaces the environment's secrets (keys, passwords) in text to be written, logged or sent.

MIN_CHARS = 8
"""Shorter values are not treated as secrets: replacing every 'test' would garble the records."""
_SECRET_NAME = re.compile(
    r"TOKEN(?!IZ)|SECRET|PASSW|PASSPHRASE|API_?KEY|CREDENTIAL|PRIVATE_?KEY|ACCESS_?KEY|COOKIE|WEBHOOK"
    r"|(?:KEYS?|PASS|(?<![^_])(?:PW|PWD|PSWD|CREDS?|PATS?|AUTH|AUTHORIZATION|BEARER|JWT|DSN|SAS|OTP|"
    r"PIN|CONN(?:ECTION)?_?STR(?:ING)?))\d*(?![^_])"  # (the ends of) words between underscores
)
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
_IN_URL = re.compile(r"://(?:([^:\s/?#@]{16,})(?::|:x|:x-oauth-basic)?|[^:\s/?#@]*:?(\S*))@")
"""A password, or a token: a long user name without a password."""
_SCHEME_WORD = re.compile(r"^\s*(?:bearer|basic|token|digest|apikey|key)\s+(\S.*)", re.IGNORECASE)
_ESCAPE = re.compile(
    r"""
      (?: % | \\[xX] ) ([0-9A-Fa-f]{2}) | \\[uU] ([0-9A-Fa-f]{4})
    | \\ [nrtNRT\ -/:-@[-`{-~]
    | &(?: \#[0-9]{1,7};? | \#[xX][0-9A-Fa-f]{1,6};? | [A-Za-z][A-Za-z0-9]{1,30}; )
    """,
    re.VERBOSE,
)
"""Of URLs; of JSON and programming languages; of HTML. Each alternative begins with a character, so
that `re` searches fast."""
_LETTERS = {"n": "\n", "r": "\r", "t": "\t"}
_BASE64 = re.compile(
    r"(?!\\[nrt])\\{0,9}+(?<!\\(?=[nrt]))"
    r"(?:(?:[A-Za-z0-9+/]{60,}+\r?\n)+[A-Za-z0-9+/]*|[A-Za-z0-9_+/-]{10,})={0,2}"
)
"""A word that may be base64 of eight bytes or more, or lines of it. It includes backslashes before
it. It does not begin with the letter of an escaped line end (`\\n`)."""
_IN_BASE64 = str.maketrans("-_", "+/", "\r\n")
_Variables = tuple[tuple[str, str], ...]
"""(name, value); of secrets, the longest value first."""
_Forms = tuple[list[tuple[str, str]], list[tuple[str, str]]]
"""([(a secret as in `_folded` text, its variable)], [(the part of its base64 that does not depend
on its neighbours, its variable)])."""

_remembered: set[str] = set()  # names passed to `remember`
_hidden: dict[str, str] = {}  # name -> value, by `hide`


def remember(name: str) -> None:
    """Treat the environment variable `name` as a secret, even if it is not named like one."""
    _remembered.add(name)


def hide(name: str) -> None:
    """Take the secret `name` out of this process's environment, so that no plugin and no process
    that it starts has it; only `environment_without(name)` does, and `scrub` still removes it."""
    if name in os.environ:
        _hidden[name] = os.environ.pop(name)


def scrub(text: str, forms: _Forms | None = None) -> str:
    """`text` with every secret of the environment replaced by `<NAME>`; JSON stays JSON.

    Finds a secret in any letter case: verbatim, escaped as in a URL, JSON, HTML or a programming
    language, up to five times within each other; in hexadecimal; in base64, within other data.
    `forms`: of the secrets; None: looks them up.
    """
    pieces = list(text)
    spans = _spans(text, _forms(secrets()) if forms is None else forms)
    # Shorter spans first, so that a longer one that covers them replaces them.
    for start, end, name in sorted(spans, key=lambda span: span[1] - span[0]):
        pieces[start:end] = [f"<{name}>", *[""] * (end - start - 1)]
    return "".join(pieces)


def scrubbed(value: Any) -> Any:
    """A copy of a JSON-like `value` with `scrub` applied to every string."""
    forms = _forms(secrets())
    return with_leaves(value, lambda leaf: scrub(leaf, forms) if isinstance(leaf, str) else leaf)


def secrets() -> _Variables:
    """(name, value) of every secret in the current environment, the longest value first.

    Secrets are the values of variables that are named like a secret (`..._KEY`, `DB_PASS`,
    `COOKIE`) or passed to `remember`. In other variables, a URL's password is a secret, and so is
    the value of a field named like a secret in a query or in JSON.
    """
    return _secrets((*os.environ.items(), *_hidden.items()), frozenset(_remembered))


def environment_without(*needed: str) -> dict[str, str]:
    """The environment for a helper process: without variables that hold secrets, except `needed`,
    `*_proxy` and `APP__*`."""
    return {
        name: value
        for name, value in (*_hidden.items(), *os.environ.items())
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
    return bool(_SECRET_NAME.search(upper)) and not _NO_SECRET_NAME.fullmatch(upper)


@lru_cache(maxsize=8)
def _secrets(environment: _Variables, remembered: frozenset[str]) -> _Variables:
    name_of: dict[str, str] = {}
    for name, value in environment:
        for candidate in _candidates(value, name in remembered or is_secret_name(name)):
            text = candidate.strip().strip("'\"")
            if len(text) >= MIN_CHARS and not is_placeholder(text):
                name_of.setdefault(text, name)
    return tuple(sorted(((name, text) for text, name in name_of.items()), key=lambda s: -len(s[1])))


def _candidates(value: str, is_secret: bool) -> Iterator[str]:
    """The whole or parts of a variable's value that may be secrets; `is_secret`: by its name."""
    if is_secret and not (
        value.startswith(("/", "~")) and os.path.exists(os.path.expanduser(value))
    ):
        yield value
        yield from _SCHEME_WORD.findall(value)
        if "://" not in value:  # user:password
            yield value.rpartition(":")[2]
        yield from re.findall(r"(?:^|\n|\\n)(?!-----)((?:(?!\\n).)+)", value)  # a PEM file's lines
    yield from map("".join, _IN_URL.findall(value))
    for name, *texts in _ASSIGNMENT.findall(value):
        if is_secret or is_secret_name(name):
            yield from re.split(r"\n|\\n", "".join(texts))


@lru_cache(maxsize=8)
def _forms(named_secrets: _Variables) -> _Forms:
    forms, cores = [], []
    for name, secret in named_secrets:
        data = secret.encode("utf-8", "surrogateescape")
        texts = {data.hex(), data.decode("latin-1")}
        for text in (secret, json.dumps(secret)[1:-1]):
            while text not in texts:  # the secret decoded as often as `_spans` decodes the text
                texts.add(text)
                text = _decoded(text).replace("\0", "")
        forms += [(form, name) for form in set(map(_folded, texts)) if len(form) >= MIN_CHARS]
        cores += [(_base64_core(data, offset), name) for offset in range(3)]
    return forms, cores


def _base64_core(data: bytes, offset: int) -> str:
    """The base64 characters that depend only on `data`, when `offset` bytes come before it."""
    coded = base64.b64encode(bytes(offset) + data + bytes(3)).decode("ascii")
    return coded[-(-8 * offset // 6) : (8 * (offset + len(data))) // 6]


def _spans(text: str, forms: _Forms, depth: int = 5) -> Iterator[tuple[int, int, str]]:
    """(start, end, variable) of each secret in `text` and in what it encodes, up to `depth` times
    within each other."""
    folded, letters = _folded(text), text.translate(_IN_BASE64)
    for form, name in forms[0]:
        if form in folded:  # a backslash left alone before `<NAME>` would escape the `<`
            yield from ((*m.span(), name) for m in re.finditer(r"\\*" + re.escape(form), folded))
    present = [(core, name) for core, name in forms[1] if core in letters]
    for word in _BASE64.finditer(text) if present else ():
        word_letters = word[0].translate(_IN_BASE64)
        yield from ((*word.span(), name) for core, name in present if core in word_letters)
    marked = _decoded(text) if depth else text
    found = [] if marked == text else list(_spans(marked.replace("\0", ""), forms, depth - 1))
    if found:
        # The span in `marked` of each decoded character.
        chars = [match.span() for match in re.finditer("(?s)[^\0]\0*", marked)]
        yield from ((chars[start][0], chars[end - 1][1], name) for start, end, name in found)


def _decoded(text: str) -> str:
    """`text` with each escape decoded and as long as before: \\0 fills the places after the
    escape's character."""
    return _ESCAPE.sub(_unescaped, text)


def _unescaped(escape: re.Match[str]) -> str:
    text = escape[0]
    if digits := escape[1] or escape[2]:
        char = chr(int(digits, 16))
    elif text[0] == "&":
        char = html.unescape(text.lower())  # entities in any case, as `scrub` promises
    else:
        char = _LETTERS.get(text[1].lower(), text[1])
    return char.ljust(len(text), "\0")


def _folded(text: str) -> str:
    """Lower case of the same length (`str.lower` makes two characters of the Turkish capital I),
    with a blank for each `+`, which stands for one in a form's data."""
    return text.replace("+", " ").replace("\u0130", "i").lower()


# ---- terminal ------------------------------------------------------------------------------------
# Filters stdout and stderr of a program: no secrets, no terminal control sequences.


def guard(keeps_going: bool = False) -> None:
    """Filter stdout and stderr from now on; every program calls this first. `keeps_going`: ignore
    errors of printing."""
    open_closed_streams()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if keeps_going and not isinstance(wrapped(stream), Lossy):
            setattr(sys, name, Guarded(Lossy(wrapped(stream))))
        elif not isinstance(stream, Guarded):
            setattr(sys, name, Guarded(stream))


def open_closed_streams() -> None:
    """Open closed standard streams (`>&-`, some daemons) as /dev/null, here and in child processes.
    Otherwise files opened later get their descriptors, and C libraries print into these files."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
            os.set_inheritable(descriptor, True)
            setattr(sys, name, open(descriptor, mode))  # noqa: SIM115 - open until the process ends


def plain(text: str) -> str:
    """`text` without secrets and terminal control sequences; newlines and tabs stay."""
    return printable(scrub(text), keep="\n\t")


def wrapped(stream: TextIO) -> TextIO:
    """The stream that a `Guarded` stream wraps; any other stream itself."""
    return stream.wrapped if isinstance(stream, Guarded) else stream


class _Stream:
    """A text stream that wraps the stream `wrapped`."""

    def __init__(self, stream: Any) -> None:
        self.wrapped = stream

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)


class Guarded(_Stream):
    """Filters text with `plain`. `isatty` is False, so that libraries send no control codes."""

    def write(self, text: str) -> int:
        """Keeps a leading carriage return, with which progress bars redraw their line."""
        redrawn = "\r" if text.startswith("\r") else ""
        self.wrapped.write(redrawn + plain(text[len(redrawn) :]))
        return len(text)

    def isatty(self) -> bool:
        return False


class Lossy(_Stream):
    """Also writes to `files`. Drops text it cannot write (full disk, closed pipe, encoding)."""

    def __init__(self, stream: TextIO, *files: TextIO) -> None:
        super().__init__(stream)
        self._streams = (*files, stream)

    def write(self, text: str) -> int:
        for stream in self._streams:
            with suppress(OSError, ValueError):  # closed, or its encoding lacks a character
                stream.write(text)
        return len(text)

    def flush(self) -> None:
        for stream in self._streams:
            with suppress(OSError, ValueError):
                stream.flush()


# ---- untrusted -----------------------------------------------------------------------------------
# Makes text from outside the process safe to print on one line or to write as UTF-8.


def excerpt(text: str, max_chars: int) -> str:
    """`loading.escaped` of the scrubbed text. Scrubbed before it is cut, because `scrub` would not
    recognise half a secret."""
    return loading.escaped(scrub(text), max_chars)


def without_lone_surrogates(text: str) -> str:
    """`text` with U+FFFD for each unpaired surrogate, which JSON can encode and UTF-8 cannot."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# ---- markdown ------------------------------------------------------------------------------------
# Escapes untrusted text for Markdown: no secrets, tags, links or code blocks.

MAX_MARKDOWN_CHARS = 300
_SPECIAL = re.compile(
    r"[&<>@$|\\~]"  # tags, mentions, formulas (the hub reads `\\(` as one), cells, strikethrough
    r"|(?<=:)//|(?i:(?<=www)\.)"  # a bare address becomes a link
    r"|[`*\[\]#]|(?<!\w)_|_(?!\w)"
)
_BACKSLASHED = "`*[]#_"


def text(value: object, max_chars: int = MAX_MARKDOWN_CHARS) -> str:
    """`value` on one line of at most about `max_chars` characters, escaped to show literally."""
    return _SPECIAL.sub(_escape, excerpt(str(value), max_chars))


def _escape(match: re.Match[str]) -> str:
    if match[0] in _BACKSLASHED:
        return rf"\{match[0]}"
    return "".join(f"&#{ord(char)};" for char in match[0])


def code(value: Any) -> list[str]:
    """`value` as a fenced block of JSON that no text in `value` can close."""
    dumped = scrub(json.dumps(value, indent=1))
    for char in "`<>&":
        dumped = dumped.replace(char, f"\\u{ord(char):04x}")
    return ["```json", *dumped.split("\n"), "```"]


# ---- templates -----------------------------------------------------------------------------------
# Loads Jinja templates.


def load_template(file: Path, **options: Any) -> Template:
    """The template in a file; a name that `render` is not given is an error. `options`: Jinja's,
    such as `autoescape` for HTML."""
    options |= {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=FileSystemLoader(file.parent), **options)  # nosec B701
    return environment.get_template(file.name)


# ---- command line --------------------------------------------------------------------------------
# Command lines: help with examples, suggestions for wrong words, errors as sentences, colour.

KEY_VALUE = """
key=value changes a key of the config (the value: Jsonnet; other text: a string)
  num_iterations=20 optimizer.learning_rate=2e-5 data.train.0.path=edits.jsonl
  'rewards={clip: {type: "clip"}}'
configs/base.libsonnet has every key with its meaning and default.
"""
_UNKNOWN = re.compile(r"unrecognized arguments: (--[\w-]+)(?:[ =](\S+))?")


class Parser(argparse.ArgumentParser):
    """A parser whose `doc` keeps its line ends; a wrong option is answered with the nearest one."""

    def __init__(self, prog: str, doc: str | None, usage: str | None = None) -> None:
        # The code formatter removes the indentation of the examples; put it back.
        blocks = re.sub("(?m)^(?=rl )", "    ", doc or "").split("\n\n")
        filled = [block if re.search("(?m)^ ", block) else fill(block, 80) for block in blocks]
        super().__init__(
            prog,
            usage,
            description="\n\n".join(filled),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def add_config(self) -> None:
        """The arguments `config` and `overrides`."""
        self.add_argument("config", help="a Jsonnet file")
        self.add_overrides()

    def add_overrides(self, text: str = "changes of its keys") -> None:
        self.description = f"{self.description}".rstrip() + f"\n{KEY_VALUE}"
        # Without a default, argparse calls it required.
        self.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=text)

    def error(self, message: str) -> NoReturn:
        if match := _UNKNOWN.search(message):
            actions = [action for action in self._actions if action.help != argparse.SUPPRESS]
            options = [name for action in actions for name in action.option_strings]
            takes_keys = {"overrides", "arguments"} & {action.dest for action in self._actions}
            key = takes_keys and loading.key_named(RunConfig, match[1][2:].replace("-", "_"))
            near = nearest(match[1], [name for name in options if name[1] == "-"])
            message += f"; write {key}={match[2] or '...'}" if key else f"; {near}"
        self.exit(2, f"{self.prog}: {message}\n{self.prog} --help shows examples\n")


def folded(text: str, begin: str = "", indent: int = 0) -> str:
    """`text` in lines of at most 80 columns. The first begins with `begin`, the others with
    `indent` spaces."""
    space = " " * indent
    return fill(text, 80, initial_indent=begin, subsequent_indent=space, break_on_hyphens=False)


def show(
    text: str, style: str = "", file: IO[str] | None = None, marks: Mapping[str, str] = {}
) -> None:
    """Print `text` to `file` (default: stdout), in colour if that is a terminal and NO_COLOR is not
    set. `style`: rich's name of a style; `marks`: regular expression -> style of what it matches.
    """
    stream: Any = wrapped(file or sys.stdout)  # type: ignore[arg-type]
    marked = Text(plain(text), style)
    for pattern, its_style in marks.items():
        marked.highlight_regex(f"(?m){pattern}", its_style)
    Console(file=stream, soft_wrap=True, highlight=False, emoji=False).print(marked)
    stream.flush()


def complain(title: str, problems: Sequence[str] = ()) -> None:
    """Print a red line, and the problems below it, to stderr."""
    show(title, "bold red", sys.stderr)
    if problems:
        show(listed(problems), file=sys.stderr)


def program(main: Callable[[Sequence[str] | None], int]) -> Callable[..., int]:
    """`main`, guarded (`guard`), with errors as sentences and without traceback. Exit code: that of
    `main`; 1 after an error or on a closed pipe, 130 after Ctrl-C."""

    @wraps(main)
    def run(arguments: Sequence[str] | None = None) -> int:
        guard()
        try:
            code = main(arguments)
            sys.stdout.flush()
            return code
        except BrokenPipeError:  # `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except (KeyboardInterrupt, EOFError):  # EOFError: Ctrl-D at a question
            complain("interrupted")
            return 130
        except ConfigError as error:
            complain("this config cannot run:", error.problems)
        except OSError as error:
            complain(remedy(error))
        except ValueError as error:
            complain(str(error))
        except RuntimeError as error:
            if not is_raised_here(error):
                raise
            complain(str(error))
        return 1

    return run
