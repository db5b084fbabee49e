"""The source follows the rules of ARCHITECTURE.md."""

from __future__ import annotations

import ast
import itertools
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache, reduce
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, NamedTuple

import _jsonnet
import pytest
import tiny_config
from tiny_config import REPO

from rl import build
from rl.api import find
from rl.config.loading import sections
from rl.config.schema import RunConfig

SOURCES = sorted((REPO / "rl").rglob("*.py"))
CONFIGS = sorted((REPO / "configs").glob("*.jsonnet"))
TINY_WORLD = sorted((REPO / "tiny_world").rglob("*.py"))
PLUGS = [(folder, name) for folder in build.PLUGIN_BASES for name in build.SHIPPED[folder]]
ALL_PLUGS = [
    *((folder, build.class_path(folder, name)) for folder, name in PLUGS),
    *(("data", f"tiny_world.data.{f.stem}") for f in TINY_WORLD if f.stem.startswith("shape")),
]
"""(folder, dotted path) of all shipped plugins, with those of the tiny world."""

LAYERS = [
    {"config"},
    {"api"},
    {"algorithm", "files", "meter", "ranks", "seeds"},
    {"model_files", "printing"},
    {"progress"},
    {"record"},
    {"judge"},
    set(build.PLUGIN_BASES),
    {"pool"},
    {"learner"},
    {"rollout"},
    {"build"},
    {"check"},
    {"run"},
    {"train"},
    {"simple_launch"},
    {"tools"},
    {"__main__", "test_distributed_env"},
]
"""Layers of folders of `rl/`, or files beside them: a file imports only from its own folder and
from earlier layers."""
ENTRY = "rl.ranks.worker"
"""A program that no other file imports and that may import from more folders."""

BANNED = {
    "the trainer imports no tools, which work before or after a run": (
        r"rl/(?!tools/|__main__|__init__|test_distributed_env).*", r"rl\.tools\b.*"),
    "nobody imports this program": ("rl/.*", re.escape(ENTRY)),
    "the algorithm imports only torch, and neither reads nor writes": (
        "rl/algorithm/.*",
        rf"(?!({'|'.join({'torch', 'rl', *sys.stdlib_module_names} - {'os', 'pathlib'})})\b).*"),
    "one function opens pictures": ("rl/.*", r"PIL\.Image\.open"),
    "the tiny world's plugins import only what third-party plugins may": (
        "tiny_world/data/.*", r"rl\.(?!api\.|config\.schema\.Section).*"),
    # No run needs the builder of its weights.
    "the rest of the tiny world imports nothing of this project": (
        "tiny_world/(?!data/|builder/).*", r"rl\..*"),
    "a file that imports another test file fails when its folder is run alone": (
        "tests/.*", r"(.*\.)?test_.*"),
    **{f"only this file imports {package}": (f"rl/(?!{files}$).*", rf"{package}(\..*)?")
       for package, files in {
           "vllm": r"engines/vllm\w*\.py",
           "deepspeed": r"learner/backends\.py",
           "diffusers": r"(renderers/[\w/]+|tools/rehearsal)\.py",
           "httpx": r"judge/(http|client)\.py",
           "wandb": r"tools/commands/follow\.py",
           "tensorboard": r"tools/commands/follow\.py",
           "trackio": r"tools/commands/follow\.py",
           "datasets": r"data/[\w/]+\.py",
           "ray": r"pool/ray_process\.py",
       }.items()},
}  # fmt: skip
"""Why -> (files that may not import, modules), as patterns."""


class Import(NamedTuple):
    file: Path
    line: int
    module: str
    """Dotted, absolute."""
    for_types_only: bool
    """Inside `if TYPE_CHECKING:`."""

    @property
    def place(self) -> str:
        return f"{self.file.relative_to(REPO)}:{self.line} imports {self.module}"

    @property
    def importer(self) -> str:
        """Dotted."""
        return module_name(self.file)


def imports_of(file: Path) -> Iterator[Import]:
    nodes = list(ast.walk(ast.parse(file.read_text())))
    blocks = [node for node in nodes if isinstance(node, ast.If)]
    guards = [block for block in blocks if ast.unparse(block.test) == "TYPE_CHECKING"]
    typed = {id(node) for guard in guards for node in ast.walk(guard)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            parent = ""
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}:{node.lineno}: imports are absolute"
                parent = f"{node.module}."  # `from rl.folder import plugin` may import a module
            for alias in node.names:
                yield Import(file, node.lineno, parent + alias.name, id(node) in typed)


@cache
def imports(folder: str) -> list[Import]:
    return [each for file in sorted((REPO / folder).rglob("*.py")) for each in imports_of(file)]


@pytest.mark.parametrize("why", BANNED)
def test_no_file_imports_what_it_may_not(why: str) -> None:
    files, modules = BANNED[why]
    wrong = [
        each.place
        for each in imports(files.partition("/")[0])
        if re.fullmatch(files, each.file.relative_to(REPO).as_posix())
        and re.fullmatch(modules, each.module)
        and not (each.for_types_only and why.startswith("only this file"))
    ]
    assert not wrong, why


OURS = [
    *SOURCES,
    *TINY_WORLD,
    *(REPO / "benchmarks").rglob("*.py"),
    *(REPO / "examples").rglob("*.py"),
]


def places_of(kind: type[ast.AST], words: str) -> Iterator[tuple[Path, str, Any]]:
    """(file, 'file:line', node) of all nodes of that kind in the project's files that match."""
    for file, text in ((file, file.read_text()) for file in OURS):
        for node in ast.walk(ast.parse(text)) if re.search(words, text) else ():
            if isinstance(node, kind):
                yield file, f"{file.relative_to(REPO)}:{getattr(node, 'lineno', 0)}", node


def test_only_a_line_feed_ends_a_line() -> None:
    """`splitlines` also splits at characters inside of values; `rl/files.py` reads lines."""
    for file, place, node in places_of(ast.Attribute, "splitlines|readlines"):
        reads = node.attr in ("splitlines", "readlines")
        assert not reads or file == REPO / "rl/files.py", place  # reads lines of a binary file


def test_one_function_opens_pictures() -> None:
    """It restricts the formats, as Pillow starts other programs for some."""
    for file, place, node in places_of(ast.Call, r"Image\.open"):
        if ast.unparse(node.func).endswith("Image.open") and file != REPO / "rl/files.py":
            assert file in TINY_WORLD and "formats" in {key.arg for key in node.keywords}, place


def folder_of(dotted: str) -> str:
    """'rl.learner.learner' -> 'learner'."""
    return dotted.partition(".")[2].partition(".")[0]


def layer(folder: str) -> int:
    [number] = [number for number, folders in enumerate(LAYERS) if folder in folders]
    return number


def module_name(file: Path) -> str:
    parts = file.relative_to(REPO).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_imports_only_go_down() -> None:
    upward = [
        each.place
        for each in imports("rl")
        if each.module.startswith("rl.") and each.file != REPO / "rl" / "__init__.py"
        for importer, imported in [(folder_of(each.importer), folder_of(each.module))]
        if importer != imported and layer(imported) >= layer(importer)
        if each.importer != ENTRY or layer(imported) > layer("record")
    ]
    assert not upward


def test_every_program_guards_what_it_prints() -> None:
    """Programs call `printing.guard` (`rl/printing.py`) first, or `printing.program` does."""
    exceptions = {
        "rl/__main__.py",  # starts another program at once
        "rl/test_distributed_env.py",  # calls another program's `main`
        "rl/judge/guard.py",  # prints only its own messages, into the judge's log
        "rl/rewards/maths.py",  # writes only into a pipe to its parent
    }
    programs = [file for file in (REPO / "rl").rglob("*.py") if '"__main__":' in file.read_text()]
    assert len(programs) > len(exceptions)
    for file in programs:
        guards = re.search(r"^    printing\.guard\(|^@printing\.program$", file.read_text(), re.M)
        assert bool(guards) == (str(file.relative_to(REPO)) not in exceptions), file


def test_there_are_no_import_cycles() -> None:
    """Also inside a folder; imports in functions and imports only for types count, too."""
    graph: dict[str, set[str]] = {module_name(file): set() for file in SOURCES}
    for each in imports("rl"):
        imported = each.module if each.module in graph else each.module.rpartition(".")[0]
        if imported in graph and imported != each.importer:
            graph[each.importer].add(imported)
    TopologicalSorter(graph).prepare()


def test_no_two_files_share_a_name() -> None:
    """An editor's tab shows only the name."""
    count = Counter(file.name for file in SOURCES if file.name != "__init__.py")
    assert [name for name, number in count.items() if number > 1] == []


SHORT = {
    "metric.py",  # a public import
    "guard.py",  # a program that must start at once
    "test_distributed_env.py",  # EARL's name
    "sd3_config.py",  # both halves of its plugin read it
}
"""Files that stay short."""


def test_files_are_neither_scraps_nor_endless() -> None:
    plugins = {build.class_path(folder, name).split(".")[-2] + ".py" for folder, name in PLUGS}
    lines = {file: file.read_text().count("\n") for file in SOURCES}
    exempt = {"__init__.py", *SHORT, *plugins}
    assert not [file for file, n in lines.items() if n < 60 and file.name not in exempt]
    assert not [file for file, n in lines.items() if n > 950]


def test_a_plugin_imports_no_other_plugin() -> None:
    homes = {build.class_path(folder, name).rpartition(".")[0] for folder, name in PLUGS}
    assert homes <= {module_name(file) for file in SOURCES}
    for each in imports("rl"):
        if each.importer in homes:
            named = {each.module, each.module.rpartition(".")[0]}
            assert not named & homes - {each.importer}, each.place


def test_the_source_never_names_the_tiny_world() -> None:
    """It is a third-party package, which not even a comment names."""
    named = re.compile(r"tiny.?world|\bshape_(prompts|questions|tokens)\b", re.IGNORECASE)
    texts = {file: file.read_text() for file in (REPO / "rl").rglob("*.*") if file.is_file()
             if file.suffix in (".py", ".txt")}  # fmt: skip
    assert not [file for file, text in texts.items() if named.search(text)]


@pytest.mark.slow
def test_a_config_is_checked_without_heavy_packages() -> None:
    script = f"""
import importlib, sys
for heavy in ("torch", "vllm", "diffusers", "deepspeed", "transformers", "peft", "datasets"):
    sys.modules[heavy] = None
import rl.simple_launch
from rl import build
from rl.api import find
from rl.config.schema import load_config
from rl.check import check_report
from rl.tools.commands import plugins
plugins.markdown()
for dotted in {[dotted for _, dotted in ALL_PLUGS]!r}:
    find.import_plugin(dotted)
for path in {[str(path) for path in CONFIGS if path.stem in tiny_config.DISTINCT]!r}:
    config = load_config(path, env={tiny_config.ENVIRONMENT!r})
    check_report.problems(config)
    check_report.report(config, gpu_gb=141)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPO, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("folder", "dotted"), ALL_PLUGS)
def test_a_plugin_fulfils_its_folders_contract(folder: str, dotted: str) -> None:
    plugin, wrong = find.plugin_class(find.import_plugin(dotted)[0], build.PLUGIN_BASES[folder])
    assert plugin is not None and not wrong, wrong
    assert "type" in plugin.Config.model_fields
    assert_documented(plugin.Config)


def assert_documented(model: type) -> None:
    undocumented = [
        f"{key}.{name}"
        for key, section in sections(model)
        for name, field in section.model_fields.items()
        if not field.description and not (key == "" and name in dict(sections(model)))
    ]
    assert not undocumented, undocumented


def test_the_base_config_documents_every_key_with_its_default() -> None:
    path = REPO / "configs" / "base.libsonnet"
    written = json.loads(_jsonnet.evaluate_file(str(path)))
    lines = path.read_text().splitlines()
    commented = {
        match[2]
        for above, line in itertools.pairwise(lines)
        if (match := re.match(r"\s*(// )?'?(\w+)'?:", line)) and above.strip().startswith("//")
    }
    assert len(commented) > 70
    for key, section in sections(RunConfig):
        values = reduce(dict.__getitem__, filter(None, key.split(".")), written)
        for name, field in section.model_fields.items():
            assert name in commented, f"{key}.{name} has no comment in base.libsonnet"
            is_section = name in dict(sections(RunConfig)) and field.default is not None
            if not field.is_required() and not is_section:
                assert values.pop(name) == json.loads(json.dumps(field.default)), f"{key}.{name}"
    assert_documented(RunConfig)
    unknown = [name for name in written if not isinstance(written[name], dict) or written[name]]
    assert not unknown, f"base.libsonnet has keys that the schema has not: {unknown}"
