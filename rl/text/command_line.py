"""Command lines: help with examples, suggestions for wrong words, errors as sentences, colour."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from textwrap import fill
from typing import IO, Any, NoReturn

from rich.console import Console
from rich.text import Text

from rl.config.messages import nearest
from rl.config.schema import ConfigError, listed
from rl.ranks.error_messages import raise_on_exit, remedy
from rl.text.terminal import plain, wrapped

KEY_VALUE = """
key=value changes a key of the config (the value: Jsonnet; other text: a string)
  num_iterations=20 optimizer.learning_rate=2e-5 data.train.0.path=edits.jsonl
  'rewards={clip: {type: "clip"}}'
configs/base.libsonnet has every key with its meaning and default.
"""
_CHOICE = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)")
_HELP_MARKS = {
    r"^(usage|options|positional arguments):": "bold",
    r"^    (rl |python ).*?(?=   |$)": "cyan",
}
_UNKNOWN = re.compile(r"unrecognized arguments: (--[\w-]+)")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Its usage line leaves out the options that may be left out: they are listed below it."""

    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[Any],
        prefix: str | None = None,
    ) -> None:
        needed = [action for action in actions if action.required or not action.option_strings]
        options = argparse.Action([], "options", nargs="?")
        super().add_usage(usage, [options, *needed], [], prefix)


class Parser(argparse.ArgumentParser):
    """A parser whose `doc` keeps its line ends; a wrong word is answered with the nearest one."""

    def __init__(self, prog: str, doc: str | None, usage: str | None = None) -> None:
        # The formatter of the code removes the indentation of a docstring that ends with examples.
        blocks = re.sub("(?m)^(?=rl )", "    ", doc or "").split("\n\n")
        filled = [block if re.search("(?m)^ ", block) else fill(block, 80) for block in blocks]
        text = "\n\n".join(filled)
        super().__init__(prog, usage, text, formatter_class=_Formatter, allow_abbrev=False)

    def add_config(self) -> None:
        """The arguments `config` and `overrides`."""
        self.add_argument("config", help="a Jsonnet file")
        self.add_overrides()

    def add_overrides(self, text: str = "changes of its keys") -> None:
        # Without a default, argparse calls it required.
        self.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=text)

    def error(self, message: str) -> NoReturn:
        if match := _CHOICE.search(message):
            hint = nearest(match[1], match[2].replace("'", "").split(", "))
            message = _CHOICE.sub(f"{match[1]!r} is no choice; {hint}", message)
        elif match := _UNKNOWN.search(message):
            actions = [action for action in self._actions if action.help != argparse.SUPPRESS]
            options = [name for action in actions for name in action.option_strings]
            message += f"; {nearest(match[1], [name for name in options if name[1] == '-'])}"
        self.exit(2, f"{self.prog}: {message}\n{self.prog} --help shows examples\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        show(message.rstrip("\n"), file=file or sys.stderr, marks=_HELP_MARKS)


def show(
    text: str,
    style: str = "",
    file: IO[str] | None = None,
    marks: Mapping[str, str] = {},
    end: str = "\n",
) -> None:
    """Print `text` to `file` (default: stdout), in colour if that is a terminal and NO_COLOR is not
    set. `style`: rich's name of a style; `marks`: regular expression -> style of what it matches.
    """
    stream: Any = wrapped(file or sys.stdout)  # type: ignore[arg-type]
    marked = Text(plain(text), style)
    for pattern, its_style in marks.items():
        marked.highlight_regex(f"(?m){pattern}", its_style)
    Console(file=stream, soft_wrap=True, highlight=False, emoji=False).print(marked, end=end)
    stream.flush()


def complain(title: str, problems: Sequence[str] = ()) -> None:
    """Print a red line, and the problems below it, to stderr."""
    show(title, "bold red", sys.stderr)
    if problems:
        show(listed(problems), file=sys.stderr)


def program(main: Callable[[Sequence[str] | None], int]) -> Callable[..., int]:
    """`main`, with errors as sentences and without traceback. Exit code: that of `main`; 1 after an
    error or on a closed pipe, 130 after Ctrl-C."""

    @wraps(main)
    def run(arguments: Sequence[str] | None = None) -> int:
        raise_on_exit()
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
        except UnicodeEncodeError as error:
            complain(
                f"{error.object!r} cannot be written in this locale's encoding ({error.encoding}): "
                "set PYTHONUTF8=1, or a locale with UTF-8"
            )
        except ValueError as error:
            complain(str(error))
        return 1

    return run
