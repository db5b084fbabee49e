"""Find a plug by its name, and say in a sentence what is wrong with it.

What: `import_plug` (a name -> a module, class or function); `reward_class`, `source_class` and
`loss_problems`: whether that is a plug of the room, its members as the room's base declares them.
What not: the plug's section of the config (`config/messages.py`), trying it
(`preflight/dry_run.py`). Nothing of a plug is run here but its module.

They return (what was found or None, sentences without the config's key).
"""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from rl.api.data import DataSource
from rl.api.metric import Metric
from rl.api.plug import PlugBase, shown
from rl.api.reward import PART_NAME, UNUSABLE_NAME, Reward, RewardFunction
from rl.config.schema import Section

PlugT = TypeVar("PlugT", bound=PlugBase[Any])

Found = tuple[Any, list[str]]


def is_dotted_path(name: str) -> bool:
    """'my_package.my_plug': Python names, joined by dots."""
    return "." in name and all(word.isidentifier() for word in name.split("."))


def import_plug(dotted: str) -> Found:
    """The module of that path, or what its last word names in the module before it."""
    path, _, name = dotted.rpartition(".")
    try:
        return _import(dotted), []
    except _NoModuleError as error:
        if not path or str(error) != dotted:
            return None, [_nowhere(error)]
    except _BrokenModuleError as error:
        return None, [str(error)]
    try:
        module = _import(path)
    except _NoModuleError as error:
        return None, [_nowhere(error)]
    except _BrokenModuleError as error:
        return None, [str(error)]
    if not hasattr(module, name):
        return None, [f"module {path} holds no {name!r} ({module.__file__})"]
    return getattr(module, name), []


class _NoModuleError(Exception):
    """The path, or a part of it, leads nowhere; the text is that part."""


class _BrokenModuleError(Exception):
    """The module is there and its code fails."""


def _nowhere(error: _NoModuleError) -> str:
    return f"no module {str(error)!r} among the installed ones or in {Path.cwd()}"


def _import(dotted: str) -> ModuleType:
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError as error:
        if error.name and (dotted == error.name or dotted.startswith(f"{error.name}.")):
            raise _NoModuleError(error.name) from error
        raise _BrokenModuleError(
            f"{dotted} imports {error.name!r}, which is not installed"
        ) from error
    except (Exception, SystemExit) as error:
        raise _BrokenModuleError(f"importing {dotted} raises {described(error)}") from error


def described(error: BaseException) -> str:
    """'ValueError: text (file.py, line 3)', on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "importlib" not in frame.filename]
    text = " ".join(traceback.format_exception_only(error)[-1].split())
    if isinstance(error, SyntaxError) or not own:
        where = (
            f" ({error.filename}, line {error.lineno})" if isinstance(error, SyntaxError) else ""
        )
        return text + where
    return f"{text} ({own[-1].filename}, line {own[-1].lineno})"


def plugs_in(module: ModuleType, base: type[PlugT]) -> list[type[PlugT]]:
    """The public plugs that a module defines, imported ones left out."""
    return [
        value
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, base)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    ]


def _class_in(found: Any, base: type[PlugT]) -> tuple[type[PlugT] | None, list[str]]:
    derive = f"derive from rl.api.{_HOME[base.__name__]}.{base.__name__}"
    if isinstance(found, ModuleType):
        plugs = plugs_in(found, base)
        if len(plugs) == 1:
            return plugs[0], []
        if plugs:
            names = ", ".join(cls.__name__ for cls in plugs)
            return None, [f"module {found.__name__} holds {names}; name one of them behind a dot"]
        words = f"module {found.__name__} holds no {base.__name__}: {derive}"
        if base is Reward:
            words += ", or name a function in it behind a dot"
        return None, [words]
    if isinstance(found, type) and issubclass(found, base):
        return found, []
    what = f"class {found.__name__}" if isinstance(found, type) else shown(found)
    return None, [f"{what} is no {base.__name__}: {derive}"]


_HOME = {"Reward": "reward", "DataSource": "data"}


def reward_class(found: Any) -> tuple[type[Reward] | None, list[str]]:
    """Of what a reward's `type` names: a module with one `Reward`, a `Reward`, or a function."""
    if isinstance(found, RewardFunction) or inspect.isroutine(found):
        declared = found if isinstance(found, RewardFunction) else RewardFunction(found)
        name = getattr(declared.function, "__name__", "the function")
        wrong = _call_problem(declared.function, name, 1, "(x: RewardInput) -> float")
        cls: type[Reward] | None = declared.as_class()
    else:
        cls, wrong = _class_in(found, Reward)
        if cls is not None:
            wrong = _members(cls, _REWARD_MEMBERS) + _verb(cls)
    if cls is not None:
        wrong += _declared(cls)
    return (None if wrong else cls), wrong


def source_class(found: Any) -> tuple[type[DataSource] | None, list[str]]:
    """Of what a data source's `type` names: a module with one `DataSource`, or a `DataSource`."""
    cls, wrong = _class_in(found, DataSource)
    if cls is None:
        return None, wrong
    wrong = _members(cls, _SOURCE_MEMBERS)
    for member, signature in _SOURCE_VERBS.items():
        if getattr(cls, member) is getattr(DataSource, member):
            wrong.append(f"{cls.__name__} has no {member}; expected `def {member}{signature}`")
    skipped = inspect.getattr_static(cls, "num_skipped")
    if not isinstance(skipped, property) and type(skipped) is not int:
        wrong.append(
            f"{cls.__name__}.num_skipped is {shown(skipped)}; expected an int, the rows left out"
        )
    return (None if wrong else cls), wrong


def loss_problems(found: Any) -> list[str]:
    """Of what `algorithm.loss` names by a dotted path."""
    name = getattr(found, "__name__", "it")
    if inspect.iscoroutinefunction(found):
        return [f"{name} is async; expected `def {name}(x: LossInputs) -> LossTerms`"]
    return _call_problem(found, name, 1, "(x: LossInputs) -> LossTerms")


_REWARD_MEMBERS: Mapping[str, tuple[int, str]] = {
    "__init__": (2, "(self, config: Config, resources: Resources) -> None"),
    "num_questions": (1, "(cls, config: Config) -> int"),
    "problems": (2, "(cls, config: Config, run: RunConfig) -> Iterable[str]"),
    "parameter_counts": (1, "(cls, config: Config) -> Mapping[str, float]"),
    "activation_counts": (1, "(cls, config: Config) -> Mapping[str, float]"),
    "close": (0, "(self) -> None"),
    "take_metrics": (0, "(self) -> Mapping[str, float]"),
}
"""Member -> (arguments it is called with, its signature)."""
_SOURCE_MEMBERS: Mapping[str, tuple[int, str]] = {
    "__init__": (2, "(self, config: Config, rules: RowRules) -> None"),
    "__len__": (0, "(self) -> int"),
    "__getitem__": (1, "(self, index: int) -> Sample"),
    "provides": (1, "(cls, config: Config) -> frozenset[str]"),
    "count": (1, "(cls, config: Config) -> int | None"),
    "problems": (2, "(cls, config: Config, rules: RowRules) -> Iterable[str]"),
    "take_metrics": (0, "(self) -> Mapping[str, float]"),
}
_SOURCE_VERBS = {"__len__": "(self) -> int", "__getitem__": "(self, index: int) -> Sample"}


def _members(cls: type[PlugBase[Any]], members: Mapping[str, tuple[int, str]]) -> list[str]:
    config = cls.Config
    wrong = []
    if not (isinstance(config, type) and issubclass(config, Section)):
        wrong.append(f"{cls.__name__}.Config is {shown(config)}; derive it from PlugConfig")
    elif "type" not in config.model_fields:
        wrong.append(f"{cls.__name__}.Config has no field 'type'; derive it from PlugConfig")
    for member, (num_given, signature) in members.items():
        static = inspect.getattr_static(cls, member)
        bound = isinstance(static, classmethod | staticmethod)
        if signature.startswith("(cls") and not bound:
            wrong.append(
                f"{cls.__name__}.{member} is no classmethod; expected "
                f"`@classmethod def {member}{signature}`"
            )
            continue
        given = num_given if bound else num_given + 1
        wrong += _call_problem(getattr(cls, member), f"{cls.__name__}.{member}", given, signature)
    return wrong + _metrics(cls)


def _metrics(cls: type[PlugBase[Any]]) -> list[str]:
    """Whether what it declares to report can be a row, and is ever reported."""
    member, declared = f"{cls.__name__}.metrics", cls.metrics
    example = "{'name': Metric('0..1', 'what it is')}"
    if not isinstance(declared, Mapping):
        return [f"{member} is {shown(declared)}; expected a mapping, {example}"]
    wrong = [
        f"{member}: {name!r} is {UNUSABLE_NAME}"
        for name in declared
        if not isinstance(name, str) or not PART_NAME.fullmatch(name)
    ]
    wrong += [
        f"{member}: {name!r} is {shown(metric)}; expected {example}"
        for name, metric in declared.items()
        if not isinstance(metric, Metric)
    ]
    reports = cls.take_metrics is not PlugBase.take_metrics
    if declared and not reports:
        wrong.append(
            f"{cls.__name__} declares metrics and reports none; expected "
            "`def take_metrics(self) -> Mapping[str, float]`"
        )
    if reports and not declared:
        wrong.append(
            f"{cls.__name__} has take_metrics and declares none; expected metrics = {example}"
        )
    return wrong


def _verb(cls: type[Reward]) -> list[str]:
    member = "score_group" if cls.scores_groups() else "grade"
    signature = (
        "(self, inputs_G: Sequence[RewardInput]) -> list[RewardOutput]"
        if cls.scores_groups()
        else "(self, x: RewardInput) -> RewardOutput"
    )
    verb = getattr(cls, member)
    if verb is Reward.grade:
        return [f"{cls.__name__} has no grade; expected `async def grade{signature}`"]
    given = 1 if isinstance(inspect.getattr_static(cls, member), staticmethod) else 2
    return _call_problem(verb, f"{cls.__name__}.{member}", given, signature)


def _call_problem(
    function: Callable[..., Any], name: str, num_given: int, signature: str
) -> list[str]:
    """Whether it can be called with so many arguments by position."""
    expected = f"expected `def {name.rpartition('.')[2]}{signature}`"
    if not callable(function):
        return [f"{name} is {shown(function)}; {expected}"]
    if inspect.isasyncgenfunction(function):
        return [f"{name} yields; {expected}, which returns"]
    try:
        found = inspect.signature(function)
    except ValueError:  # built in: its own C code says what it takes
        return []
    try:
        found.bind(*range(num_given))
    except TypeError:
        return [f"{name} is `def {name.rpartition('.')[2]}{found}`; {expected}"]
    return []


def _declared(cls: type[Reward]) -> list[str]:
    wrong = []
    for member in ("needs", "unit_parts"):
        names = getattr(cls, member)
        if not isinstance(names, AbstractSet) or not all(isinstance(name, str) for name in names):
            wrong.append(
                f"{cls.__name__}.{member} is {shown(names)}; expected a set of names, {{'image'}}"
            )
        elif member == "unit_parts":
            bad = sorted(name for name in names if not PART_NAME.fullmatch(name))
            wrong += [f"{cls.__name__}.unit_parts: {name!r} is {UNUSABLE_NAME}" for name in bad]
    for member in ("needs_judge", "runs_model", "diagnostic"):
        flag = getattr(cls, member)
        if not isinstance(flag, bool):
            wrong.append(f"{cls.__name__}.{member} is {shown(flag)}; expected True or False")
    own = inspect.getattr_static(cls, "num_questions")
    if cls.needs_judge is True and own is inspect.getattr_static(Reward, "num_questions"):
        wrong.append(
            f"{cls.__name__} needs the judge and does not say how often it asks; expected "
            "`@classmethod def num_questions(cls, config: Config) -> int`"
        )
    return wrong
