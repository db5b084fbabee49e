"""RL for vision-language models that write the edit while a frozen generator draws it.

    from rl import check, train, load_run, Editor

docs/python.md describes them. `import rl` imports none of them, and no torch.
"""

import gc
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if not (3, 11, 4) <= sys.version_info[:3] < (3, 14):  # no f-string: any Python gets this far
    found = sys.version.split()[0] + " (" + sys.executable + ")"
    sys.exit("rl needs Python 3.11.4 to 3.13; this is " + found + ". Start it with one of those.")

if sys.argv[:1] == ["-m"]:  # a program of this package starts: no traceback for an early Ctrl-C
    gc.set_threshold(10_000)  # with 700, importing vLLM and the like takes a tenth longer
    _hook = sys.excepthook
    sys.excepthook = lambda kind, *rest: (
        print("interrupted", file=sys.stderr)
        if issubclass(kind, KeyboardInterrupt)
        else _hook(kind, *rest)
    )

if TYPE_CHECKING:
    from rl.tools.editor import Editor
    from rl.tools.notebook import check, load_run, train

__all__ = ["Editor", "check", "load_run", "train"]


class _Callable(ModuleType):
    """The modules `rl.check` and `rl.train`: a call of one calls the function of that name in
    `rl.tools.notebook`."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return _function(self.__name__.partition(".")[2])(*arguments, **options)


class _Package(ModuleType):
    """Imports what `__all__` names when it is first used."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in __all__ and type(value) is ModuleType:  # Python binds an imported submodule
            value.__class__ = _Callable
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in __all__:
            return _function(name)
        raise AttributeError("module 'rl' has no attribute " + repr(name))


def _function(name: str) -> Any:
    module = "rl.tools.editor" if name == "Editor" else "rl.tools.notebook"
    return getattr(import_module(module), name)


sys.modules[__name__].__class__ = _Package
