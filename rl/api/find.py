"""Finds a plugin by its name, and explains what is wrong with it."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import is_dataclass
from difflib import get_close_matches
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


def described(error: BaseException, code: Any = None) -> str:
    """'ValueError: text (file.py, line 3); remedy', on one line. The line is the innermost one in
    the user's code or, if there is none, the first line of `code`, the user's function."""
    lines = traceback.format_exception_only(error)  # notes last; of a SyntaxError the code first
    text = " ".join(lines[-1 if isinstance(error, SyntaxError) else 0].split())
    calls = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    calls = [call for call in calls if not call[0].startswith(_LIBRARIES)]
    function = getattr(inspect.unwrap(code), "__code__", None)
    if isinstance(error, SyntaxError):
        calls = [(str(error.filename), error.lineno)]
    elif function is not None and not calls:
        calls = [(function.co_filename, function.co_firstlineno)]
    location = f" ({calls[-1][0]}, line {calls[-1][1]})" if calls else ""
    remedies = [remedy for part, remedy in _REMEDIES.items() if part in text]
    record = getattr(error, "obj", None)
    if is_dataclass(record) and type(record).__module__.startswith("rl.api."):
        known = ", ".join(name for name in dir(record) if not name.startswith("_"))
        remedies.append(f"its argument is a {type(record).__name__}, which has {known}")
    return "; ".join([text + location, *remedies])


def attempt(label: str, code: object, run: Callable[[], T]) -> tuple[T | None, list[str]]:
    """(result of `run`, []), or (None, ["`label` raises ..."]), whatever a plugin's code raises but
    Ctrl-C. `code` as in `described`."""
    try:
        return run(), []
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return None, [f"{label} raises {described(error, code)}"]


# ---- from a name to a class ----------------------------------------------------------------------


def is_dotted_path(name: str) -> bool:
    """'my_package.my_plugin': Python names, joined by dots."""
    return "." in name and all(part.isidentifier() for part in name.split("."))


def import_plugin(dotted: str) -> ValueAndProblems:
    """The attribute `dotted` of its module, or the module of that name."""
    parent, _, name = dotted.rpartition(".")
    try:
        module = importlib.import_module(parent)
        if hasattr(module, name):
            return getattr(module, name), []
        return importlib.import_module(dotted), []
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        missing = (isinstance(error, ModuleNotFoundError) and error.name) or ""
        if missing == dotted:
            remedy = f"; drop '.py': {parent!r}" if name == "py" else ""
            return None, [f"module {parent} holds no {name!r}{remedy}"]
        if missing and f"{parent}.".startswith(f"{missing}."):
            return None, [f"no module {missing!r} is installed or in {Path.cwd()}"]
        return None, [f"importing {dotted} raises {described(error)}"]


def plugin_class(target: Any, base: type[PluginT]) -> tuple[type[PluginT] | None, list[str]]:
    """The plugin class in `target`, the object that a section's `type` names: a class derived from
    `base`, a module with one such class, or a reward function. Its members are checked here."""
    if base is Reward and inspect.isroutine(target):
        cls: Any = class_of(target)
        wrong = _mismatch(cls.__name__, target, _reward, may_await=True)
        wrong += _variable_problems(cls, base)
    else:
        cls, wrong = _class_in(target, base)
        wrong = list(_class_problems(cls, base)) if cls else wrong
    return (None if wrong else cls), wrong


def _class_in(target: Any, base: type[PluginT]) -> tuple[type[PluginT] | None, list[str]]:
    derive = f"derive from {base.__module__}.{base.__name__}"
    if isinstance(target, type) and issubclass(target, base):
        return target, []
    if not isinstance(target, ModuleType):
        label = f"class {target.__name__}" if isinstance(target, type) else brief(target)
        return None, [f"{label} is not a {base.__name__}: {derive}"]
    classes = (value for value in _public(target).values() if isinstance(value, type))
    plugins = list(dict.fromkeys(cls for cls in classes if issubclass(cls, base)))
    if len(plugins) == 1:
        return plugins[0], []
    names = ", ".join(cls.__name__ for cls in plugins)
    text = f"module {target.__name__} holds {names}; name one of them after a dot"
    if not plugins:
        text = f"module {target.__name__} holds no {base.__name__}: {derive}"
        if base is Reward:
            text += f", or name a function in it after a dot{_functions_of(target)}"
    return None, [text]


def loss_problems(target: Any) -> list[str]:
    """The problems of `target`, the object that `algorithm.loss` names by a dotted path."""
    if isinstance(target, ModuleType):
        functions = _functions_of(target)
        return [f"{target.__name__} is a module; name a function in it after a dot{functions}"]
    return _mismatch(getattr(target, "__name__", "it"), target, _loss)


def _functions_of(module: ModuleType) -> str:
    """' (f, g)': the functions that the module defines; '' if there are none."""
    names = [name for name, value in _public(module).items() if inspect.isfunction(value)]
    return f" ({', '.join(names)})" if names else ""


def _public(module: ModuleType) -> dict[str, Any]:
    """name -> value of the module's public names, without those imported from outside it."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and f"{getattr(value, '__module__', '')}.".startswith(f"{module.__name__}.")
    }


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


@cache
def _variables(base: type[PluginBase[Any]]) -> Mapping[str, tuple[type, str]]:
    """Class variables that a base declares: name -> (the class that does, its annotation)."""
    return {
        name: (cls, text)
        for cls in reversed(_owners(base))
        for name, text in vars(cls).get("__annotations__", {}).items()
        if text.startswith("ClassVar[") and name != "Config"
    }


@cache  # memory hints read a config hundreds of times
def _class_problems(cls: type[PluginBase[Any]], base: type[PluginBase[Any]]) -> tuple[str, ...]:
    return (
        *_config_problems(cls, base),
        *_method_problems(cls, base),
        *_variable_problems(cls, base),
    )


def _config_problems(cls: type[PluginBase[Any]], base: type[PluginBase[Any]]) -> Iterator[str]:
    config, wanted = cls.Config, base.Config
    for missing in sorted(wanted.model_fields.keys() - getattr(config, "model_fields", {}))[:1]:
        problem = f"{cls.__name__}.Config is {brief(config)} and has no field {missing!r}"
        yield f"{problem}; derive it from {wanted.__name__}"


def _method_problems(cls: type[PluginBase[Any]], base: type[PluginBase[Any]]) -> Iterator[str]:
    """Methods that are missing, or that cannot be called as the base's can."""
    label, methods = cls.__name__, _methods(base)
    lacking = [name for name in methods if getattr(getattr(cls, name), "__isabstractmethod__", 0)]
    if issubclass(cls, Reward):
        if cls.scores_groups() and cls.grade is not Reward.grade:
            yield f"{label} has grade and score_group; keep only one"
        if not cls.scores_groups() and cls.grade is Reward.grade:
            lacking.append("grade")
        if cls.needs_judge and "num_questions" not in _defined(cls, base):
            lacking.append("num_questions")
    if cls.metrics and "take_metrics" not in _defined(cls, base):
        lacking.append("take_metrics")
    for name in lacking:
        yield f"{label} has no {name}; expected {_written(name, methods[name])}"
    for name in _defined(cls, base):
        member, may_await = inspect.getattr_static(cls, name), name in ("grade", "score_group")
        yield from _mismatch(f"{label}.{name}", member, methods[name], may_await)


def _defined(cls: type[PluginBase[Any]], base: type[PluginBase[Any]]) -> list[str]:
    """The base's methods that the class defines anew."""
    methods = _methods(base).items()
    return [name for name, member in methods if inspect.getattr_static(cls, name) is not member]


def _reward(x: RewardInput) -> float: ...  # type: ignore[empty-body]
def _loss(x: LossInputs) -> LossTerms: ...  # type: ignore[empty-body]


def _mismatch(name: str, found: Any, expected: Any, may_await: bool = False) -> list[str]:
    """[] if `found` can be called as `expected`, else [why not]. Both are functions, or members as
    the `__dict__` of a class has them. `may_await`: it may be `async`."""
    is_bound = isinstance(found, classmethod | staticmethod)
    function = found.__func__ if is_bound else found
    fits = callable(function) and (is_bound or not isinstance(expected, classmethod))
    if fits:
        wanted = inspect.signature(getattr(expected, "__func__", expected)).parameters
        num_arguments = len(wanted) - isinstance(found, staticmethod)
        try:
            inspect.signature(function).bind(*range(num_arguments))
            fits = may_await or not _is_async(function)
        except TypeError:
            fits = False
        except ValueError:  # a built-in without a signature
            pass
    if fits:
        return []
    own_name = name.rpartition(".")[2]
    return [f"{name} is {_written(own_name, found)}; expected {_written(own_name, expected)}"]


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def _written(name: str, member: Any) -> str:
    """A method as in the source: '`@classmethod def f(cls, config: Config) -> int`'."""
    function = getattr(member, "__func__", member)
    if not callable(function):
        return brief(member)
    text = "@classmethod " if isinstance(member, classmethod) else ""
    text += "async def " if _is_async(function) else "def "
    signature = str(inspect.signature(function)).replace("'", "")
    signature = re.sub(r"\bPolicyConfigT\b|\bConfigT\b", "Config", signature)
    return f"`{text}{name}{signature}`"


def _variable_problems(cls: type[PluginBase[Any]], base: type[PluginBase[Any]]) -> Iterator[str]:
    """Class variables that are missing, or not of the base's type."""
    for name, (owner, text) in _variables(base).items():
        value = inspect.getattr_static(cls, name, inspect.Parameter.empty)
        if value is inspect.Parameter.empty:
            yield f"{cls.__name__} has no {name}; expected {_readable(owner, text)}"
        else:
            yield from _misfit(f"{cls.__name__}.{name} is", value, owner, text)


def misspelt(cls: type[PluginBase[Any]], base: type[PluginBase[Any]]) -> Iterator[str]:
    """'name: why' for each member of a user's class that nothing reads, if its name is close to
    the name of one that is read."""
    known = {
        *dir(base),
        *(name for one in _owners(base) for name in vars(one).get("__annotations__", ())),
    }
    for owner in cls.__mro__:
        for name in () if owner.__module__.startswith(("rl.", "abc", "typing")) else vars(owner):
            if name not in known and not name.startswith("_"):
                for near in get_close_matches(name, known, n=1, cutoff=0.8):
                    yield f"{owner.__name__}.{name}: nothing reads it; did you mean {near!r}?"


# ---- what a class method answers -----------------------------------------------------------------


def section_problems(
    cls: type[PluginBase[Any]], base: type[PluginBase[Any]], config: Any
) -> list[str]:
    """Call each class method whose only argument is the plugin's section; what is wrong with it."""
    problems = []
    for name, member in _methods(base).items():
        parameters = inspect.signature(getattr(member, "__func__", member)).parameters
        if list(parameters) == ["cls", "config"]:
            problems += ask(cls, name, config)[1]
    return problems


def ask(cls: type[PluginBase[Any]], member: str, *arguments: object) -> ValueAndProblems:
    """(a class method's result, []) if it fits the base's return annotation, else (None, why)."""
    method = getattr(cls, member)
    bases = (one for one in _owners(cls) if one.__module__.startswith("rl.api."))
    owner = next(one for one in bases if member in vars(one))
    text = vars(owner)[member].__func__.__annotations__["return"]

    def call() -> Any:
        answer = method(*arguments)
        return list(answer) if isinstance(answer, Iterator) else answer

    answer, wrong = attempt(method.__qualname__, method, call)
    wrong = wrong or list(_misfit(f"{method.__qualname__} returns", answer, owner, text))
    return (None if wrong else answer), wrong


def _misfit(label: str, value: Any, owner: type, text: str) -> Iterator[str]:
    """Why `value` does not fit the annotation `text` in the class `owner`."""
    plain = frozenset(value) if isinstance(value, AbstractSet) else value
    try:
        _adapter(owner, text).validate_python(plain, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        item = f"{brief(first['input'])}: " if first["loc"] else ""
        why = f"{item}{first['msg'].removeprefix('Value error, ').removeprefix('Input ')}"
        yield f"{label} {brief(value)}; expected {_readable(owner, text)} ({why})"


@cache
def _adapter(owner: type, text: str) -> TypeAdapter[Any]:
    # pydantic does not check the items of an Iterable.
    return TypeAdapter(_hint(owner, text.replace("Iterable[", "Sequence["), include_extras=True))


def _readable(owner: type, text: str) -> str:
    """'ClassVar[Set[ActionKind]]' -> "Set[Literal['hidden_states', 'text', 'image_tokens']]"."""
    hint = _hint(owner, text, include_extras=False)
    name = hint.__name__ if isinstance(hint, type) and not hasattr(hint, "__args__") else str(hint)
    return re.sub(r"\b(typing|collections\.abc|rl\.api\.\w+)\.", "", name)


def _hint(owner: type, text: str, include_extras: bool) -> Any:
    """The evaluated annotation. (`get_type_hints` of the class would read the others, too, and
    their names may be imported for type checkers only.)"""
    text = re.sub(r"^ClassVar\[(.*)\]$", r"\1", text)
    holder = type("Holder", (), {"__annotations__": {"it": text}})
    names = vars(sys.modules[owner.__module__])
    return get_type_hints(holder, names, include_extras=include_extras)["it"]
