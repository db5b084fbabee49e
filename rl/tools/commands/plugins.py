"""List plugins and keys of the config, or explain one of them.

rl plugins
rl plugins viescore
rl plugins judge
rl plugins my_plugins.brightness.brightness
rl plugins --markdown > docs/reference.md

NAME is a plugin, a section of the config, a record that plugins read, or the dotted
path of a plugin of your own, whose code is then imported.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rl import printing
from rl.api import find, types
from rl.api.plugin import PluginBase
from rl.build import PLUGIN_BASES, SHIPPED, class_path
from rl.check.trials import Kind, RewardAudit
from rl.config.loading import is_dotted_path, nearest, sections
from rl.config.schema import RewardKeys, RunConfig, SourceKeys

TITLES = {
    "policies": "Policies: `policy`",
    "engines": "Inference engines: `engine`",
    "renderers": "Renderers: `renderer`",
    "rewards": "Rewards: `rewards.<name>`",
    "data": "Data sources: `data.train`, `data.validation`",
}
"""Kind of plugin -> heading, with the key in the config."""
FACTS = {
    "needs": "Needs {}.",
    "needs_source": "Needs a source picture.",
    "emits": "Writes {} for the renderer.",
    "accepts": "Takes {} from the policy.",
    "needs_judge": "Asks the judge.",
    "runs_model": "Loads a model of its own.",
    "diagnostic": "A diagnostic: it counts only if `final_reward.weights` names it.",
    "unit_parts": "Parts from 0 to 1 that `final_reward.weights` may name: {}.",
    "samples_with_trainer": "Refused under ZeRO-3.",
    "metrics": "Reports the metrics {}.",
}
"""Class variable of a plugin -> what it means if it is set; `{}` is its value."""
RECORDS = (
    *(types.RewardInput, types.RewardOutput, types.Region, types.Sample, types.RenderJob),
    *(
        types.HiddenStates,
        types.RenderFailure,
        types.Prompt,
        types.Completion,
        types.Action,
        types.Episode,
    ),
    *(RewardAudit, Kind),
)
LIMITS = {
    "minimum": "from",
    "exclusiveMinimum": "above",
    "maximum": "to",
    "exclusiveMaximum": "below",
}
LISTED = {model.__name__ for _, model in sections(RunConfig)}
"""Classes of the sections that have an entry of their own."""
Row = tuple[str, str, str, str]
"""Name, type with range, default ('': required) and meaning of a key, or of a field."""
Entry = tuple[str, Sequence[Row]]
"""What a section, plugin or record is, and its keys or fields."""


@cache
def groups() -> dict[str, dict[str, Entry]]:
    """Heading -> name -> entry. Imports the shipped plugins' modules; none imports torch."""
    models: list[tuple[str, type[BaseModel]]] = [
        *sections(RunConfig),
        ("any_reward", RewardKeys),
        ("any_source", SourceKeys),
    ]
    return {
        "Keys of a run": {
            name or "run": (inspect.cleandoc(model.__doc__ or ""), [*rows_of(model)])
            for name, model in models
        },
        **{
            title: {
                name: plugin_entry(find.import_plugin(class_path(kind, name))[0])
                for name in SHIPPED[kind]
            }
            for kind, title in TITLES.items()
        },
        "Records": {cls.__name__: record_entry(cls) for cls in RECORDS},
    }


def plugin_entry(cls: type[PluginBase[Any]], documented: Any = None) -> Entry:
    """`documented`: what has the plugin's docstring, if not the class."""
    facts = " ".join(
        words.format(value if isinstance(value, str | bool) else ", ".join(sorted(value)))
        for name, words in FACTS.items()
        if (value := getattr(cls, name, None))
    )
    text = inspect.cleandoc((documented or cls).__doc__ or "")
    rows = [row for row in rows_of(cls.Config) if row[0] != "type"]
    return f"{text}\n\n{facts}".strip(), rows


def record_entry(cls: Any) -> Entry:
    """Of a dataclass: its fields, with the docstrings below them, and its properties."""
    docs = {
        ast.unparse(field.target): " ".join(str(below.value.value).split())
        for field, below in pairwise(ast.walk(ast.parse(inspect.getsource(cls))))
        if isinstance(field, ast.AnnAssign)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }
    rows = [
        (
            field.name,
            str(field.type),
            ""
            if field.default is field.default_factory is MISSING
            else repr({} if field.default is MISSING else field.default),
            docs.get(field.name, ""),
        )
        for field in fields(cls)
    ]
    rows += [
        (
            name,
            member.fget.__annotations__["return"],
            "(computed)",
            " ".join(member.__doc__.split()),
        )
        for name, member in vars(cls).items()
        if isinstance(member, property) and member.__doc__
    ]
    return inspect.cleandoc(cls.__doc__), rows


def rows_of(model: type[BaseModel]) -> Iterator[Row]:
    """The keys of a section; behind a section within it, the keys of that."""
    return _rows(model.model_json_schema(), {}, "")


def _rows(schema: Mapping[str, Any], values: Mapping[str, Any], at: str) -> Iterator[Row]:
    """`values`: defaults of a section around it, which may differ from those of the class; `at`:
    the beginning of the names."""
    for name, field in schema["properties"].items():
        inside = next(
            (
                section
                for section in re.findall(r'"#/\$defs/(\w+)"', json.dumps(field))
                if section not in LISTED
            ),
            "",
        )
        default = values.get(name, field.get("default"))
        shown = json.dumps({} if inside and default else default).replace('"', "'")
        if "description" in field or "$ref" not in field:  # not a section of the run
            yield (
                f"{at}{name}",
                kind_of(field),
                "" if name in schema.get("required", ()) else shown,
                " ".join(field.get("description", "").split()),
            )
        if inside:
            begin = f"{at}{name}.{'<name>.' if 'additionalProperties' in field else ''}"
            yield from _rows(
                {**schema["$defs"][inside], "$defs": schema["$defs"]}, default or {}, begin
            )


def kind_of(schema: Mapping[str, Any]) -> str:
    """The type that a JSON schema allows, with its range: 'integer from 1 to 1e9 or null'."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    inner = schema.get("items") or schema.get("additionalProperties")
    if options := [*map(repr, values), *map(kind_of, schema.get("anyOf", ()))]:
        return " or ".join(options)
    if isinstance(inner, Mapping):
        return ("array of " if "items" in schema else "name -> ") + kind_of(inner)
    limits = [f" {word} {schema[key]:g}" for key, word in LIMITS.items() if key in schema]
    return str(schema.get("type", "section")) + "".join(limits).replace("e+0", "e")


# ---- output --------------------------------------------------------------------------------------
# The page docs/reference.md, and text for a terminal.


def markdown() -> str:
    """The page, without its last line end."""
    return printing.load_template(Path(__file__).with_name("reference.md.j2")).render(
        groups=groups(), own_rows=own_rows, plain=plain
    )


def own_rows(rows: Sequence[Row], earlier: Mapping[str, Entry]) -> tuple[str, Sequence[Row]]:
    """(the earlier entry that has most of the rows and no other keys, or '', the rows that it has
    not)."""
    left = {
        name: [row for row in rows if row not in others]
        for name, (_, others) in earlier.items()
        if {row[0] for row in others} <= {row[0] for row in rows}
    }
    nearest_one = min(left, key=lambda name: len(left[name]), default="")
    own = left.get(nearest_one, rows)
    return (nearest_one, own) if 2 * len(own) < len(rows) else ("", rows)


def plain(text: str) -> str:
    """Markdown that shows `text`, which may have code in backticks, without HTML tags."""
    return re.sub("(`[^`]*`)|<", lambda match: match[1] or "&lt;", text)


def listing() -> str:
    """The names, each with the first sentence about it."""
    lines = []
    for title, entries in groups().items():
        first = {name: re.split(r"(?<=\.)\s", text)[0] for name, (text, _) in entries.items()}
        rows = [
            printing.folded(f"  {name:21} {sentence}", "", 24) for name, sentence in first.items()
        ]
        lines += [title.replace("`", ""), *rows]
    return "\n".join([*lines, "rl plugins NAME shows one of them, or a plugin of your own"])


def explained(name: str, entry: Entry) -> str:
    lines = [name, *(printing.folded(part, "  ", 2) for part in entry[0].split("\n\n"))]
    for key, kind, default, meaning in entry[1]:
        shown = f"default {default}" if default else "required"
        lines += [
            "",
            printing.folded(f"{key}: {kind}; {shown}", "  ", 6),
            printing.folded(meaning, " " * 6, 6),
        ]
    return "\n".join(lines)


def entry_of(name: str) -> Entry:
    """The entry, or that of a plugin's dotted path. Raises ValueError if there is none."""
    known = {key: entry for entries in groups().values() for key, entry in entries.items()}
    if found := known.get(name.partition(".")[0]):  # of 'judge.timeout_s' the section
        return found
    if not is_dotted_path(name):
        raise ValueError(f"there is no {name!r}; {nearest(name, [*known])}")
    sys.path.append(os.getcwd())
    target, problems = find.import_plugin(name)
    for base in PLUGIN_BASES.values():
        cls, wrong = find.plugin_class(target, base)
        if cls is not None:
            return plugin_entry(cls, target if inspect.isroutine(target) else None)
        problems += [problem for problem in wrong if " holds no " not in problem]
    raise ValueError("\n".join(problems) or f"{name} holds no plugin")


@printing.program
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 if there is no such plugin."""
    parser = printing.Parser("rl plugins", __doc__)
    parser.add_argument("name", nargs="?", metavar="NAME", help="what to explain; without: a list")
    parser.add_argument("--markdown", action="store_true", help="print the page docs/reference.md")
    args = parser.parse_args(argv)
    printing.show(
        markdown()
        if args.markdown
        else explained(args.name, entry_of(args.name))
        if args.name
        else listing(),
        marks={r"^\S.*|^  [\w.<>]+(?=:)": "bold"},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
