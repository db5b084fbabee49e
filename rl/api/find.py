"""Find a plug by its name, and say in a sentence what is wrong with it.

What: `import_plug` (a name -> a module, class or function); `plug_class` and `loss_problems`:
whether that is a plug of the room, its members as the room's base declares them.
What not: the plug's section of the config (`config/messages.py`), trying it
(`preflight/dry_run.py`). Nothing of a plug is run here but its module.

They return (what was found or None, sentences without the config's key).
"""

from __future__ import annotations

import importlib
import inspect
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard, TypeVar, get_args

from rl.api.data import DataSource
from rl.api.metric import Metric
from rl.api.plug import PlugBase, shown
from rl.api.reward import PART_NAME, UNUSABLE_NAME, Reward, RewardFunction
from rl.api.types import ActionKind
from rl.config.schema import Section

PlugT = TypeVar("PlugT", bound=PlugBase[Any])

Found = tuple[Any, list[str]]

STRANGE = (Exception, SystemExit)
"""What a stranger's code may raise without ending ours."""


def is_dotted_path(name: str) -> bool:
    """'my_package.my_plug': Python names, joined by dots."""
    return "." in name and all(word.isidentifier() for word in name.split("."))


def import_plug(dotted: str) -> Found:
    """The module of that path, or what its last word names in the module before it."""
    path, _, name = dotted.rpartition(".")
    try:
        module = _import(path)
        try:
            return _import(dotted), []
        except _NoModuleError as error:
            if str(error) != dotted:
                raise
    except _NoModuleError as error:
        return None, [_nowhere(error)]
    except _BrokenModuleError as error:
        return None, [str(error)]
    if not hasattr(module, name):
        where = f" ({module.__file__})" if module.__file__ else ""
        return None, [f"module {path} holds no {name!r}{where}"]
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
    except STRANGE as error:
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


def plug_class(found: Any, base: type[PlugT]) -> tuple[type[PlugT] | None, list[str]]:
    """Of what a section's `type` names, the plug of the room whose base is `base`: a module with
    one such class, the class, or, of a reward, a function. Its members are held to the base's."""
    if base is Reward and (isinstance(found, RewardFunction) or inspect.isroutine(found)):
        declared = found if isinstance(found, RewardFunction) else RewardFunction(found)
        name = getattr(declared.function, "__name__", "the function")
        wrong = _call_problem(declared.function, name, 1, "(x: RewardInput) -> float")
        cls: type[Any] | None = declared.as_class()
    else:
        cls, wrong = _class_in(found, base)
        if cls is not None:
            wrong = [*_config(cls, base), *_missing(cls, base), *_signatures(cls, base)]
            wrong += _metrics(cls)
    if cls is not None:
        wrong += _declared(cls, base)
    return (None if wrong else cls), wrong


def _class_in(found: Any, base: type[PlugT]) -> tuple[type[PlugT] | None, list[str]]:
    derive = f"derive from {base.__module__}.{base.__name__}"
    if isinstance(found, ModuleType):
        plugs = plugs_in(found, base)
        if len(plugs) == 1:
            return plugs[0], []
        if plugs:
            names = ", ".join(cls.__name__ for cls in plugs)
            return None, [f"module {found.__name__} holds {names}; name one of them behind a dot"]
        words = f"module {found.__name__} holds no {base.__name__}: {derive}"
        if base is Reward:
            words += f", or name a function in it behind a dot{_functions_of(found)}"
        return None, [words]
    if isinstance(found, type) and issubclass(found, base):
        return found, []
    what = f"class {found.__name__}" if isinstance(found, type) else shown(found)
    return None, [f"{what} is no {base.__name__}: {derive}"]


def _functions_of(module: ModuleType) -> str:
    """' (f, g)', its own public functions; '' where it has none."""
    own = [
        name
        for name, value in vars(module).items()
        if (inspect.isfunction(value) and value.__module__ == module.__name__)
        or isinstance(value, RewardFunction)
        if not name.startswith("_")
    ]
    return f" ({', '.join(own)})" if own else ""


def _config(cls: type[PlugBase[Any]], base: type[PlugBase[Any]]) -> Iterator[str]:
    config, expected = cls.Config, base.Config
    name = f"{cls.__name__}.Config"
    if not (isinstance(config, type) and issubclass(config, Section)):
        yield f"{name} is {shown(config)}; derive it from {expected.__name__}"
    elif missing := sorted(expected.model_fields.keys() - config.model_fields.keys()):
        yield f"{name} has no field {missing[0]!r}; derive it from {expected.__name__}"


def _missing(cls: type[PlugBase[Any]], base: type[PlugBase[Any]]) -> Iterator[str]:
    """What the base leaves to the plug."""
    for member in sorted(getattr(cls, "__abstractmethods__", ())):
        signature = _signature(getattr(base, member))
        yield f"{cls.__name__} has no {member}; expected `def {member}{signature}`"
    for member, words in _LEFT_OPEN.items():
        if member in base.__annotations__ and not hasattr(cls, member):
            yield f"{cls.__name__} has no {member}; expected {words}"
    if issubclass(cls, Reward) and cls.scores_groups() == (cls.grade is not Reward.grade):
        if cls.scores_groups():
            yield f"{cls.__name__} has grade and score_group; keep the one that is meant"
        else:
            yield f"{cls.__name__} has no grade; expected `async def grade{_GRADE}`, or score_group"


_KINDS = ", ".join(repr(kind) for kind in get_args(ActionKind))
_LEFT_OPEN = {
    "accepts": f"one of {_KINDS}",
    "emits": f"a set of {_KINDS}",
}
"""Class variables that have no default."""
_GRADE = "(self, x: RewardInput) -> RewardOutput"


def _signatures(cls: type[PlugBase[Any]], base: type[PlugBase[Any]]) -> Iterator[str]:
    """Members that cannot be called as the base's are."""
    for member in sorted(_members(base)):
        static, own = inspect.getattr_static(cls, member), getattr(base, member)
        if static is inspect.getattr_static(base, member):
            continue
        name, signature = f"{cls.__name__}.{member}", _signature(own)
        bound = isinstance(static, classmethod | staticmethod)
        if isinstance(inspect.getattr_static(base, member), classmethod) and not bound:
            yield f"{name} is no classmethod; expected `@classmethod def {member}{signature}`"
            continue
        is_async = inspect.iscoroutinefunction(static) or inspect.isasyncgenfunction(static)
        if is_async and member not in ("grade", "score_group"):
            yield f"{name} is async; expected `def {member}{signature}`"
            continue
        num_given = len(inspect.signature(own).parameters)
        if isinstance(inspect.getattr_static(base, member), classmethod):
            num_given += not bound
        else:
            num_given -= bound
        yield from _call_problem(getattr(cls, member), name, num_given, signature)


def _members(base: type[PlugBase[Any]]) -> set[str]:
    """Names of all that a base lets a plug define, its constructor among them."""
    ours = [cls for cls in base.__mro__ if issubclass(cls, PlugBase)]
    return {
        name
        for cls in ours
        for name, value in vars(cls).items()
        if (inspect.isfunction(value) or isinstance(value, classmethod))
        and (not name.startswith("_") or name in ("__init__", "__len__", "__getitem__"))
    }


def _signature(function: Callable[..., Any]) -> str:
    """As its author would write it: '(cls, config: Config) -> int'."""
    if function is Reward.grade:
        return _GRADE
    found = inspect.signature(function)
    if inspect.ismethod(function):
        first = inspect.Parameter("cls", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        found = found.replace(parameters=[first, *found.parameters.values()])
    return re.sub(r"\bPolicyConfigT\b|\bConfigT\b", "Config", str(found).replace("'", ""))


def loss_problems(found: Any) -> list[str]:
    """Of what `algorithm.loss` names by a dotted path."""
    if isinstance(found, ModuleType):
        held = _functions_of(found)
        return [f"{found.__name__} is a module; name a function in it behind a dot{held}"]
    name = getattr(found, "__name__", "it")
    if inspect.iscoroutinefunction(found):
        return [f"{name} is async; expected `def {name}(x: LossInputs) -> LossTerms`"]
    return _call_problem(found, name, 1, "(x: LossInputs) -> LossTerms")


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


def _declared(cls: type[PlugBase[Any]], base: type[PlugBase[Any]]) -> Iterator[str]:
    """Class variables of another type than the base's, or with words that mean nothing."""
    for member, default in _variables(base):
        value = getattr(cls, member)
        what = f"{cls.__name__}.{member} is {shown(value)}; expected"
        if isinstance(default, bool) and not isinstance(value, bool):
            yield f"{what} True or False"
        elif isinstance(default, AbstractSet) and not _is_names(value):
            yield f"{what} a set of names, {{'image'}}"
    kinds = set(get_args(ActionKind))
    accepts, emits = getattr(cls, "accepts", None), getattr(cls, "emits", None)
    if accepts is not None and accepts not in kinds:
        yield f"{cls.__name__}.accepts is {shown(accepts)}; expected {_LEFT_OPEN['accepts']}"
    if emits is not None and not (_is_names(emits) and emits and emits <= kinds):
        yield f"{cls.__name__}.emits is {shown(emits)}; expected {_LEFT_OPEN['emits']}"
    if issubclass(cls, DataSource):
        skipped = inspect.getattr_static(cls, "num_skipped")
        if not isinstance(skipped, property) and type(skipped) is not int:
            name = f"{cls.__name__}.num_skipped"
            yield f"{name} is {shown(skipped)}; expected an int, the rows left out"
    if issubclass(cls, Reward):
        yield from _declared_reward(cls)


def _declared_reward(cls: type[Reward]) -> Iterator[str]:
    if _is_names(cls.unit_parts):
        for name in sorted(cls.unit_parts):
            if not PART_NAME.fullmatch(name):
                yield f"{cls.__name__}.unit_parts: {name!r} is {UNUSABLE_NAME}"
    own = inspect.getattr_static(cls, "num_questions")
    if cls.needs_judge is True and own is inspect.getattr_static(Reward, "num_questions"):
        yield (
            f"{cls.__name__} needs the judge and does not say how often it asks; expected "
            "`@classmethod def num_questions(cls, config: Config) -> int`"
        )


def _variables(base: type[PlugBase[Any]]) -> list[tuple[str, Any]]:
    """(name, default) of the flags and sets of names that a base declares."""
    declared = {
        name: value
        for cls in base.__mro__
        if issubclass(cls, PlugBase)
        for name, value in vars(cls).items()
        if not name.startswith("_") and isinstance(value, bool | AbstractSet)
    }
    return list(declared.items())


def _is_names(value: Any) -> TypeGuard[AbstractSet[str]]:
    return isinstance(value, AbstractSet) and all(isinstance(name, str) for name in value)
