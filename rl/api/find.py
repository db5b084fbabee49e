"""Finds a plugin by its name, and explains what is wrong with it."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from rl.api import loss, types
from rl.api.plugin import PluginBase, brief
from rl.api.reward import Reward, RewardFunction
from rl.config.schema import Section

T = TypeVar("T")
PluginT = TypeVar("PluginT", bound=PluginBase[Any])

ValueAndProblems = tuple[Any, list[str]]


_LIBRARIES = tuple(
    {
        str(Path(__file__).parents[1]) + "/",
        *(sysconfig.get_path(name) + "/" for name in ("stdlib", "purelib", "platlib")),
        "<",
    }
)


def described(error: BaseException, code: object = None) -> str:
    """'ValueError: text (file.py, line 3); remedy', on one line. The line is the innermost one in
    the user's code or, if there is none, the first line of `code`, the user's function."""
    lines = traceback.format_exception_only(error)  # notes last; of a SyntaxError the code first
    text = " ".join(lines[-1 if isinstance(error, SyntaxError) else 0].split())
    calls = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    user_calls = [call for call in calls if not call[0].startswith(_LIBRARIES)]
    first_line = getattr(inspect.unwrap(code), "__code__", None) if callable(code) else None
    if isinstance(error, SyntaxError):
        calls = [(str(error.filename), error.lineno)]
    elif user_calls:
        calls = user_calls
    elif first_line is not None:
        calls = [(first_line.co_filename, first_line.co_firstlineno)]
    else:
        calls = [call for call in calls if "importlib" not in call[0]]
    location = f" ({calls[-1][0]}, line {calls[-1][1]})" if calls else ""
    return "; ".join([text + location, *_remedies(error)])


def reraise_ctrl_c(error: BaseException) -> None:
    """Raise a KeyboardInterrupt of Ctrl-C again. One of a plugin has a `raise` in its last line."""
    if isinstance(error, KeyboardInterrupt):
        last = traceback.extract_tb(error.__traceback__)[-1]
        if "raise" not in (last.line or ""):
            raise error


def attempt(label: str, code: object, run: Callable[[], T]) -> tuple[T | None, list[str]]:
    """(result of `run`, []), or (None, ["`label` raises ..."]), whatever a plugin's code raises.
    `code` as in `described`."""
    try:
        return run(), []
    except BaseException as error:
        reraise_ctrl_c(error)
        return None, [f"{label} raises {described(error, code)}"]


def _remedies(error: BaseException) -> Iterator[str]:
    """Hints for errors that nearly always have the same cause."""
    text, obj = str(error), getattr(error, "obj", None)
    match = re.search(r"'(\w+)' object", text)
    record = match and {**vars(types), **vars(loss)}.get(match[1])
    if match and is_dataclass(record):
        members = {*record.__dataclass_fields__, *vars(record)}
        known = ", ".join(sorted(name for name in members if not name.startswith("_")))
        yield f"its argument is a {match[1]}, which has {known}"
    if "'NoneType' object has no attribute 'ask'" in text:
        yield "a reward that asks the judge sets `needs_judge = True`"
    if "has no attribute 'resources'" in text and isinstance(obj, PluginBase):
        yield "__init__(self, config, resources) receives them; store what you need in an attribute"
    if "'coroutine' object" in text:
        yield "write `async def`, and `await` what has to be awaited"
    if isinstance(obj, PluginBase) and "__init__" in vars(type(obj)) and "has no attribute" in text:
        yield "does its __init__ call super().__init__ with all its arguments?"
    paths = [path for path in sys.path if path and Path(path) != Path.cwd()]
    for name in re.findall(r"'(\w+)", text):
        file = getattr(sys.modules.get(name), "__file__", None) or ""
        is_own = Path(file.removesuffix("/__init__.py")).parent == Path.cwd()
        if is_own and (name in sys.stdlib_module_names or PathFinder.find_spec(name, paths)):
            yield f"{file} hides the module {name!r} that other code imports; rename it"


def is_dotted_path(name: str) -> bool:
    """'my_package.my_plugin': Python names, joined by dots."""
    return "." in name and all(part.isidentifier() for part in name.split("."))


def import_plugin(dotted: str) -> ValueAndProblems:
    """The module `dotted`, or the attribute of that name in its parent module."""
    path, _, name = dotted.rpartition(".")
    module, _, problem = _import(path)
    if module is None:
        return None, [problem]
    target, missing, problem = _import(dotted)
    if target is not None or missing != dotted:
        return target, [problem] if problem else []
    if not hasattr(module, name):
        location = f" ({module.__file__})" if module.__file__ else ""
        remedy = f"; drop '.py': {path!r}" if name == "py" else ""
        return None, [f"module {path} holds no {name!r}{location}{remedy}"]
    return getattr(module, name), []


def _import(dotted: str) -> tuple[ModuleType | None, str, str]:
    """(the module, the first part of its path that does not exist, the problem)."""
    try:
        return importlib.import_module(dotted), "", ""
    except BaseException as error:
        reraise_ctrl_c(error)
        missing = (isinstance(error, ModuleNotFoundError) and error.name) or ""
        if missing and f"{dotted}.".startswith(f"{missing}."):
            problem = f"no module {missing!r} is installed or in {Path.cwd()}"
            return None, missing, problem
        if missing and missing.partition(".")[0] not in sys.modules:
            return None, "", f"{dotted} imports {missing!r}, which is not installed"
        return None, "", f"importing {dotted} raises {described(error)}"


def _public(module: ModuleType) -> dict[str, Any]:
    """name -> value of the module's public names, without those imported from outside it."""
    return {
        name: value
        for name, value in vars(module).items()
        for origin in [getattr(value, "function", value)]  # a `RewardFunction` wraps one
        if not name.startswith("_")
        and f"{getattr(origin, '__module__', '')}.".startswith(f"{module.__name__}.")
    }


def plugin_class(target: Any, base: type[PluginT]) -> tuple[type[PluginT] | None, list[str]]:
    """The plugin class in `target`, the object that a section's `type` names: a class derived from
    `base`, a module with one such class, or a reward function. Its members are checked here."""
    if base is Reward and (isinstance(target, RewardFunction) or inspect.isroutine(target)):
        reward_function = target if isinstance(target, RewardFunction) else RewardFunction(target)
        name = getattr(reward_function.function, "__name__", "the function")
        wrong = _call_problem(reward_function.function, name, 1, "(x: RewardInput) -> float")
        cls: type[Any] = reward_function.as_class()
    else:
        plugin, wrong = _class_in(target, base)
        if plugin is None:
            return None, wrong
        cls, wrong = plugin, [*_members(plugin, base)]
    wrong += _variables(cls, base)
    if not wrong and cls.metrics and cls.take_metrics is PluginBase.take_metrics:
        wrong.append(
            f"{cls.__name__} declares metrics and reports none; expected "
            "`def take_metrics(self) -> Mapping[str, float]`"
        )
    if not wrong and issubclass(cls, Reward):
        defined = inspect.getattr_static(cls, "num_questions") is not vars(Reward)["num_questions"]
        if cls.needs_judge and not defined:
            wrong.append(
                f"{cls.__name__} needs the judge and does not say how often it asks; expected "
                "`@classmethod def num_questions(cls, config: Config) -> int`"
            )
    return (None if wrong else cls), wrong


def _class_in(target: Any, base: type[PluginT]) -> tuple[type[PluginT] | None, list[str]]:
    derive = f"derive from {base.__module__}.{base.__name__}"
    if isinstance(target, ModuleType):
        classes = (value for value in _public(target).values() if isinstance(value, type))
        plugins = list(dict.fromkeys(cls for cls in classes if issubclass(cls, base)))
        if len(plugins) == 1:
            return plugins[0], []
        if plugins:
            names = ", ".join(cls.__name__ for cls in plugins)
            return None, [f"module {target.__name__} holds {names}; name one of them after a dot"]
        text = f"module {target.__name__} holds no {base.__name__}: {derive}"
        if base is Reward:
            text += f", or name a function in it after a dot{_functions_of(target)}"
        if modules := [part.name for part in pkgutil.iter_modules(getattr(target, "__path__", ()))]:
            text += f"; it is a package: name one of its modules, {', '.join(modules)}, after a dot"
        return None, [text]
    if isinstance(target, type) and issubclass(target, base):
        return target, []
    label = f"class {target.__name__}" if isinstance(target, type) else brief(target)
    return None, [f"{label} is not a {base.__name__}: {derive}"]


def _functions_of(module: ModuleType) -> str:
    """' (f, g)': the functions that the module defines; '' if there are none."""
    kinds = (RewardFunction, type(_functions_of))
    names = [name for name, value in _public(module).items() if isinstance(value, kinds)]
    return f" ({', '.join(names)})" if names else ""


def loss_problems(target: Any) -> list[str]:
    """The problems of `target`, the object that `algorithm.loss` names by a dotted path."""
    if isinstance(target, ModuleType):
        functions = _functions_of(target)
        return [f"{target.__name__} is a module; name a function in it after a dot{functions}"]
    name = getattr(target, "__name__", "it")
    if inspect.iscoroutinefunction(target):
        return [f"{name} is async; expected `def {name}(x: LossInputs) -> LossTerms`"]
    return _call_problem(target, name, 1, "(x: LossInputs) -> LossTerms")


_GRADE = "(self, x: RewardInput) -> RewardOutput"


def _owners(base: type[PluginBase[Any]]) -> list[type]:
    return [cls for cls in base.__mro__ if issubclass(cls, PluginBase)]


@cache  # memory hints read a config hundreds of times
def _members(cls: type[PluginBase[Any]], base: type[PluginBase[Any]]) -> tuple[str, ...]:
    """Problems: a wrong `Config`, missing methods, signatures that differ from the base's."""
    return tuple(_member_problems(cls, base))


def _member_problems(cls: type[PluginBase[Any]], base: type[PluginBase[Any]]) -> Iterator[str]:
    label, config, expected = cls.__name__, cls.Config, base.Config
    if not (isinstance(config, type) and issubclass(config, Section)):
        yield f"{label}.Config is {brief(config)}; derive it from {expected.__name__}"
    elif missing := sorted(expected.model_fields.keys() - config.model_fields.keys()):
        yield f"{label}.Config has no field {missing[0]!r}; derive it from {expected.__name__}"
    for member in sorted(getattr(cls, "__abstractmethods__", ())):
        yield f"{label} has no {member}; expected `def {member}{_signature(getattr(base, member))}`"
    if issubclass(cls, Reward) and cls.scores_groups() == (cls.grade is not Reward.grade):
        if cls.scores_groups():
            yield f"{label} has grade and score_group; keep only one"
        else:
            yield f"{label} has no grade; expected `async def grade{_GRADE}`, or score_group"
    for member in sorted(_methods(base)):
        own_member, base_member = (inspect.getattr_static(one, member) for one in (cls, base))
        if own_member is base_member:
            continue
        name, signature = f"{cls.__name__}.{member}", _signature(getattr(base, member))
        is_bound = isinstance(own_member, classmethod | staticmethod)
        is_class_method = isinstance(base_member, classmethod)
        is_async = inspect.iscoroutinefunction(own_member) or inspect.isasyncgenfunction(own_member)
        if is_class_method and not is_bound:
            yield f"{name} is not a classmethod; expected `@classmethod def {member}{signature}`"
        elif is_async and member not in ("grade", "score_group"):
            yield f"{name} is async; expected `def {member}{signature}`"
        else:
            num_arguments = len(inspect.signature(getattr(base, member)).parameters)
            num_arguments -= is_bound and not is_class_method
            yield from _call_problem(getattr(cls, member), name, num_arguments, signature)


@cache
def _methods(base: type[PluginBase[Any]]) -> set[str]:
    """Names of the methods that a plugin of this base may define, the constructor included."""
    return {
        name
        for cls in _owners(base)
        for name, value in vars(cls).items()
        if (inspect.isfunction(value) or isinstance(value, classmethod))
        and (not name.startswith("_") or name in ("__init__", "__len__", "__getitem__"))
    }


def _signature(function: Callable[..., Any]) -> str:
    """The signature as in the source: '(cls, config: Config) -> int'."""
    if function is Reward.grade:
        return _GRADE
    signature = inspect.signature(function)
    if inspect.ismethod(function):
        first = inspect.Parameter("cls", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        signature = signature.replace(parameters=[first, *signature.parameters.values()])
    return re.sub(r"\bPolicyConfigT\b|\bConfigT\b", "Config", str(signature).replace("'", ""))


def _call_problem(
    function: Callable[..., Any], name: str, num_arguments: int, signature: str
) -> list[str]:
    """[] if `function` can be called with `num_arguments` positional arguments, else [why not]."""
    expected = f"expected `def {name.rpartition('.')[2]}{signature}`"
    if not callable(function):
        return [f"{name} is {brief(function)}; {expected}"]
    if inspect.isasyncgenfunction(function):
        return [f"{name} is an async generator; {expected}, without `yield`"]
    try:
        actual = inspect.signature(function)
    except ValueError:  # a built-in without a signature
        return []
    try:
        actual.bind(*range(num_arguments))
    except TypeError:
        return [f"{name} is `def {name.rpartition('.')[2]}{actual}`; {expected}"]
    return []


@cache
def _annotated(base: type[PluginBase[Any]]) -> dict[str, tuple[type, str]]:
    """Variables that a base declares: name -> (the class that declares it, its annotation)."""
    return {
        name: (cls, text)
        for cls in reversed(_owners(base))
        for name, text in vars(cls).get("__annotations__", {}).items()
        if name != "Config"
    }


def _variables(cls: type[PluginBase[Any]], base: type[PluginBase[Any]]) -> Iterator[str]:
    """Problems: class variables that are missing, or not of the base's type."""
    for name, (owner, text) in _annotated(base).items():
        value = inspect.getattr_static(cls, name, inspect.Parameter.empty)
        is_fixed = text.startswith("ClassVar[")
        if value is inspect.Parameter.empty:
            if is_fixed:
                yield f"{cls.__name__} has no {name}; expected {_readable(text)}"
        elif is_fixed or not hasattr(type(value), "__get__"):  # skip a property: no instance yet
            yield from _misfit(f"{cls.__name__}.{name} is", value, owner, text)


def misspelt(cls: type[PluginBase[Any]], base: type[PluginBase[Any]]) -> Iterator[str]:
    """'name: why' for each member of a user's class that nothing reads, if its name is close to
    the name of one that is read."""
    known = {*_methods(base), *_annotated(base)}
    for owner in cls.__mro__:
        for name in () if owner.__module__.startswith(("rl.", "abc", "typing")) else vars(owner):
            if name not in known and not name.startswith("_"):
                for near in get_close_matches(name, known, n=1, cutoff=0.8):
                    yield f"{owner.__name__}.{name}: nothing reads it; did you mean {near!r}?"


@cache
def section_methods(base: type[PluginBase[Any]]) -> list[str]:
    """Names of the class methods whose only argument is the plugin's section."""
    methods = ((name, getattr(base, name)) for name in sorted(_methods(base)))
    return [
        name
        for name, member in methods
        if inspect.ismethod(member) and list(inspect.signature(member).parameters) == ["config"]
    ]


def ask(cls: type[PluginBase[Any]], member: str, *arguments: object) -> ValueAndProblems:
    """(a class method's result, []) if it fits the base's return annotation, else (None, why)."""
    method = getattr(cls, member)
    bases = (one for one in _owners(cls) if one.__module__.startswith("rl.api."))
    owner = next(one for one in bases if member in vars(one))
    text = vars(owner)[member].__func__.__annotations__["return"]

    def call() -> Any:
        answer = method(*arguments)
        is_list = text.startswith("Iterable[") and isinstance(answer, Iterator)
        return list(answer) if is_list else answer

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
        why = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
        item = f"{brief(first['input'])}: " if first["loc"] else ""
        yield f"{label} {brief(value)}; expected {_readable(text)} ({item}{why})"


@cache
def _adapter(owner: type, text: str) -> TypeAdapter[Any]:
    holder = type("Holder", (), {"__annotations__": {"it": text}})
    hint = get_type_hints(holder, vars(sys.modules[owner.__module__]), include_extras=True)["it"]
    if get_origin(hint) is ClassVar:
        [hint] = get_args(hint)
    if get_origin(hint) is Iterable:  # pydantic does not check the items of an Iterable
        hint = list[get_args(hint)]  # type: ignore[misc]
    return TypeAdapter(hint)


_EXAMPLES = {
    "Set[str]": "{'source'}",
    "Mapping[str, Metric]": "{'a': Metric('0..1', 'what it is')}",
}


def _readable(text: str) -> str:
    """'ClassVar[Set[ActionKind]]' -> "Set['hidden_states' | 'text' | 'image_tokens']"."""
    text = re.sub(r"^ClassVar\[(.*)\]$", r"\1", text)
    text = re.sub(r"\b(MetricName|Carried)\b", "str", text).replace("Count", "int >= 0")
    for kind, example in _EXAMPLES.items():
        text += f", as {example}" if text == kind else ""
    return re.sub(r"\w+Kind\b", lambda m: " | ".join(map(repr, get_args(vars(types)[m[0]]))), text)
