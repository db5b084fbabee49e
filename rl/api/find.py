"""Finds a plugin by its name, and explains what is wrong with it."""

from __future__ import annotations

import importlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from rl.api.plugin import PluginBase, brief
from rl.api.reward import Reward, class_of

if TYPE_CHECKING:
    from rl.api.loss import LossInputs, LossTerms
    from rl.api.types import RewardInput

T = TypeVar("T")
PluginT = TypeVar("PluginT", bound=PluginBase[Any])

ValueAndProblems = tuple[Any, list[str]]

# ---- what a plugin raises ------------------------------------------------------------------------

_LIBRARIES = tuple(
    {
        str(Path(__file__).parents[1]) + "/",
        *(sysconfig.get_path(name) + "/" for name in ("stdlib", "purelib", "platlib")),
        "<",
    }
)
_REMEDIES = {
    "'NoneType' object has no attribute 'ask'": (
        "a reward that asks the judge sets `needs_judge = True`"
    ),
    "object has no attribute 'resources'": (
        "__init__(self, config, resources) receives them; store what you need in an attribute"
    ),
    "object has no attribute 'config'": (
        "does its __init__ call super().__init__ with all its arguments?"
    ),
    "'coroutine' object": "write `async def`, and `await` what has to be awaited",
}
"""Part of an error's text -> its usual cause."""


def described(error: BaseException) -> str:
    """'ValueError: text (file.py, line 3); remedy', on one line. The line is the innermost one in
    the user's code."""
    text = " ".join(" ".join(traceback.format_exception_only(error)).split())
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_LIBRARIES):
            text += f" ({frame.filename}, line {frame.lineno})"
            break
    return "; ".join([text, *(remedy for part, remedy in _REMEDIES.items() if part in text)])


def attempt(label: str, run: Callable[[], T]) -> tuple[T | None, list[str]]:
    """(result of `run`, []), or (None, ["`label` raises ..."]), whatever a plugin's code raises but
    Ctrl-C."""
    try:
        return run(), []
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return None, [f"{label} raises {described(error)}"]


# ---- from a name to a class ----------------------------------------------------------------------


def import_plugin(dotted: str) -> ValueAndProblems:
    """The attribute `dotted` of its module, or the module of that name."""
    parent, _, name = dotted.rpartition(".")

    def load() -> Any:
        module = importlib.import_module(parent)
        return getattr(module, name) if hasattr(module, name) else importlib.import_module(dotted)

    found, wrong = attempt(f"importing {dotted}", load)
    hint = f"; drop '.py': {parent!r}" if wrong and name == "py" else ""
    return found, [problem + hint for problem in wrong]


def plugin_class(target: Any, base: type[PluginT]) -> tuple[type[PluginT] | None, list[str]]:
    """The plugin class in `target`, the object that a section's `type` names: a class derived from
    `base`, a module with one such class, or a reward function. Its members are checked here."""
    if base is Reward and inspect.isroutine(target):
        cls: Any = class_of(target)
        wrong = _mismatch(cls.__name__, target, _reward, may_await=True)
        wrong += _variable_problems(cls, base)
        return (None if wrong else cls), wrong
    found = [target]
    if isinstance(target, ModuleType):
        public = [value for name, value in vars(target).items() if not name.startswith("_")]
        found = [v for v in public if getattr(v, "__module__", "").startswith(target.__name__)]
    plugins = {cls for cls in found if isinstance(cls, type) and issubclass(cls, base)}
    if len(plugins) != 1:
        names = ", ".join(sorted(cls.__name__ for cls in plugins)) or f"no {base.__name__}"
        remedy = f"name one class that derives from {base.__module__}.{base.__name__}"
        remedy += ", or a function" if base is Reward else ""
        label = getattr(target, "__name__", brief(target))
        return None, [f"{label} holds {names}; {remedy}"]
    [cls] = plugins
    wrong = list(_class_problems(cls, base))
    return (None if wrong else cls), wrong


def loss_problems(target: Any) -> list[str]:
    """The problems of `target`, the object that `algorithm.loss` names by a dotted path."""
    return _mismatch(getattr(target, "__name__", "it"), target, _loss)


# ---- what a base asks of a class -----------------------------------------------------------------


def _owners(base: type[PluginBase[Any]]) -> list[type]:
    return [cls for cls in base.__mro__ if issubclass(cls, PluginBase)]


@cache
def _methods(base: type[PluginBase[Any]]) -> Mapping[str, Any]:
    """What a plugin of this base may define: name -> the base's function or class method."""
    return {
        name: member
        for cls in reversed(_owners(base))
        for name, member in vars(cls).items()
        if (inspect.isfunction(member) or isinstance(member, classmethod))
        and (not name.startswith("_") or name in ("__init__", "__len__", "__getitem__"))
    }


@cache  # memory hints read a config hundreds of times
def _class_problems(cls: type[PluginBase[Any]], base: type[PluginBase[Any]]) -> tuple[str, ...]:
    problems = list(_variable_problems(cls, base))
    if not (isinstance(cls.Config, type) and issubclass(cls.Config, base.Config)):
        name = base.Config.__name__
        problems.append(f"{cls.__name__}.Config is {brief(cls.Config)}; derive it from {name}")
    if issubclass(cls, Reward) and cls.scores_groups() == (cls.grade is not Reward.grade):
        problems.append(f"{cls.__name__} has grade and score_group, or neither; keep only one")
    for name, expected in _methods(base).items():
        member = inspect.getattr_static(cls, name)
        if getattr(member, "__isabstractmethod__", False):
            problems.append(f"{cls.__name__} has no {name}; expected {_written(name, expected)}")
        elif member is not expected:
            may_await = name in ("grade", "score_group")
            problems += _mismatch(f"{cls.__name__}.{name}", member, expected, may_await)
    return tuple(problems)


def _reward(x: RewardInput) -> float: ...  # type: ignore[empty-body]
def _loss(x: LossInputs) -> LossTerms: ...  # type: ignore[empty-body]


def _mismatch(name: str, found: Any, expected: Any, may_await: bool = False) -> list[str]:
    """[] if `found` can be called as `expected`, else [why not]. Both are functions, or members as
    the `__dict__` of a class has them. `may_await`: it may be `async`."""
    own_name = name.rpartition(".")[2]
    why = [f"{name} is {_written(own_name, found)}; expected {_written(own_name, expected)}"]
    function = getattr(found, "__func__", found)
    is_bound = isinstance(found, classmethod | staticmethod)
    if isinstance(expected, classmethod) > is_bound or _is_async(function) > may_await:
        return why
    wanted = inspect.signature(getattr(expected, "__func__", expected)).parameters
    try:
        inspect.signature(function).bind(*list(wanted)[isinstance(found, staticmethod) :])
    except (TypeError, ValueError):  # it cannot be called, or is a built-in without a signature
        return why
    return []


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def _written(name: str, member: Any) -> str:
    """A method as in the source: '`@classmethod def f(cls, config: Config) -> int`'."""
    function = getattr(member, "__func__", member)
    if not callable(function):
        return brief(member)
    text = "@classmethod " if isinstance(member, classmethod) else ""
    text += "async def " if _is_async(function) else "def "
    return f"`{text}{name}{inspect.signature(function)}`".replace("'", "")


def _variable_problems(cls: type[PluginBase[Any]], base: type[PluginBase[Any]]) -> Iterator[str]:
    """Class variables that are missing, or not of the base's type."""
    for owner in _owners(base):
        for name, text in vars(owner).get("__annotations__", {}).items():
            if not text.startswith("ClassVar[") or name == "Config":
                continue
            if not hasattr(cls, name):
                yield f"{cls.__name__} has no {name}; expected {text}"
            else:
                value = inspect.getattr_static(cls, name)
                yield from _misfit(f"{cls.__name__}.{name} is", value, owner, text)


# ---- what a class method answers -----------------------------------------------------------------


def section_problems(
    cls: type[PluginBase[Any]], base: type[PluginBase[Any]], config: Any
) -> Iterator[str]:
    """Call each class method whose only argument is the plugin's section; what is wrong with it."""
    for name, member in _methods(base).items():
        parameters = inspect.signature(getattr(member, "__func__", member)).parameters
        if list(parameters) == ["cls", "config"]:
            yield from ask(cls, name, config)[1]


def ask(cls: type[PluginBase[Any]], member: str, *arguments: object) -> ValueAndProblems:
    """(a class method's result, []) if it fits the base's return annotation, else (None, why)."""
    method = getattr(cls, member)
    bases = (one for one in _owners(cls) if one.__module__.startswith("rl.api."))
    owner = next(one for one in bases if member in vars(one))
    text = vars(owner)[member].__func__.__annotations__["return"]

    def call() -> Any:
        answer = method(*arguments)
        return list(answer) if isinstance(answer, Iterator) else answer

    answer, wrong = attempt(method.__qualname__, call)
    wrong = wrong or list(_misfit(f"{method.__qualname__} returns", answer, owner, text))
    return (None if wrong else answer), wrong


def _misfit(label: str, value: Any, owner: type, text: str) -> Iterator[str]:
    """Why `value` does not fit the annotation `text` in the class `owner`."""
    plain = frozenset(value) if isinstance(value, AbstractSet) else value
    try:
        _adapter(owner, text).validate_python(plain, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        yield f"{label} {brief(value)}; expected {text} ({brief(first['input'])}: {first['msg']})"


@cache
def _adapter(owner: type, text: str) -> TypeAdapter[Any]:
    """For the annotation alone: those beside it may have names that only type checkers import."""
    # pydantic does not check the items of an Iterable.
    text = text.removeprefix("ClassVar").replace("Iterable[", "Sequence[")
    text = text[1:-1] if text.startswith("[") else text
    holder = type("Holder", (), {"__annotations__": {"it": text}})
    names = vars(sys.modules[owner.__module__])
    return TypeAdapter(get_type_hints(holder, names, include_extras=True)["it"])
