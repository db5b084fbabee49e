"""Every call of another library fits that library's real signature or operator schema.

Nothing is replaced here. Kernels that only a GPU chooses are called on meta tensors, and each call
in the source is bound, argument by argument, to what the installed library declares. An argument
that this version does not know fails here, on a CPU, instead of at the first step on a GPU.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_config import REPO

from rl.algorithm.attention_kernels import VARLEN
from rl.policies.attention import Packing, attention
from rl.tools import gpu_steps
from rl.tools.commands import check_gpu

FILES = [*sorted((REPO / "rl").rglob("*.py")), *sorted((REPO / "benchmarks").rglob("*.py"))]
ENGINES = REPO / "rl" / "engines"
KERNELS = "algorithm/attention_kernels.py"
OBJECTS = {
    (ENGINES / "vllm.py", "self._llm"): "vllm.LLM",
    (ENGINES / "vllm.py", "engine"): "vllm.v1.engine.llm_engine.LLMEngine",
    (ENGINES / "vllm.py", "self._llm.llm_engine"): "vllm.v1.engine.llm_engine.LLMEngine",
    (ENGINES / "vllm_process.py", "manager"): "vllm.lora.model_manager.LoRAModelManager",
    (ENGINES / "vllm_process.py", "helper"): "vllm.lora.peft_helper.PEFTHelper",
    (ENGINES / "vllm_process.py", "worker.model_runner"): (
        "vllm.v1.worker.gpu.model_runner.GPUModelRunner"
    ),
    (ENGINES / "vllm_process.py", "core"): "vllm.v1.engine.core_client.InprocClient",
}
"""(file, expression) -> the class of the object, where an import does not tell it."""


# Binding


@lru_cache
def found(path: str) -> Any:
    """The object at a dotted path; an attribute that does not exist raises AttributeError."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            thing = getattr(thing, part)
        return thing
    raise AttributeError(path)


def names_of(tree: ast.Module) -> dict[str, str]:
    """Name -> dotted path of what the file imports, wherever it does, and of their aliases."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                package = alias.name.split(".")[0]
                names[alias.asname or package] = alias.name if alias.asname else package
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
            path, target = dotted(node.value, names), node.targets[0]
            if path and isinstance(target, ast.Name):
                names[target.id] = path
    return names


def dotted(node: ast.expr, names: dict[str, str]) -> str:
    """The path of an expression that begins with an import; else ''."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute):
        head = dotted(node.value, names)
        return f"{head}.{node.attr}" if head else ""
    return ""


def calls(file: Path, text: str, library: str) -> Iterator[tuple[str, ast.Call]]:
    """(path of the function, call) for each call of the library that can be resolved."""
    tree = ast.parse(text)
    names = names_of(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        path = dotted(node.func, names)
        if not path and isinstance(node.func, ast.Attribute):
            owner = OBJECTS.get((file, ast.unparse(node.func.value)))
            path = f"{owner}.{node.func.attr}:method" if owner else ""
        if path.split(".")[0] == library:
            yield path, node


def problem(path: str, call: ast.Call) -> str | None:
    """Why the call does not fit; '' if it does, None if the function declares no signature."""
    path, _, is_method = path.partition(":")
    try:
        signature = signature_of(found(path))
    except AttributeError:
        return f"there is no {path}"
    except (TypeError, ValueError):  # a built-in function
        return None
    positional = [argument for argument in call.args if not isinstance(argument, ast.Starred)]
    keywords = [keyword.arg for keyword in call.keywords if keyword.arg]
    is_whole = [len(positional), len(keywords)] == [len(call.args), len(call.keywords)]
    bind = signature.bind if is_whole else signature.bind_partial
    try:
        bind(*[None] * (len(positional) + bool(is_method)), **dict.fromkeys(keywords))
    except TypeError as error:
        return f"{path}{signature}: {error}"
    return ""


def signature_of(function: Any) -> inspect.Signature:
    """Of a function, or of an operator by its schema."""
    operator = getattr(function, "_opoverload", function)  # of `torch.library.custom_op`
    if isinstance(operator, torch._ops.OpOverloadPacket):
        operator = operator.default
    if not isinstance(operator, torch._ops.OpOverload):
        return inspect.signature(function)
    one = inspect.Parameter
    return inspect.Signature(
        [
            one(
                "self_" if argument.name == "self" else argument.name,
                one.KEYWORD_ONLY if argument.kwarg_only else one.POSITIONAL_OR_KEYWORD,
                default=argument.default_value if argument.has_default_value() else one.empty,
            )
            for argument in operator._schema.arguments
        ]
    )


def faults(library: str, files: dict[Path, str]) -> tuple[list[str], int]:
    """(the calls that do not fit, how many do)."""
    wrong, num_right = [], 0
    for file, text in files.items():
        for path, call in calls(file, text, library):
            why = problem(path, call)
            num_right += why == ""
            wrong += [f"{file.relative_to(REPO)}:{call.lineno}: {why}"] if why else []
    return wrong, num_right


@pytest.mark.parametrize(
    ("library", "at_least"),
    [
        ("torch", 120),
        pytest.param("diffusers", 15, marks=pytest.mark.slow),  # 5 to 15 s to import each
        pytest.param("transformers", 30, marks=pytest.mark.slow),
        pytest.param("peft", 4, marks=pytest.mark.slow),
        pytest.param("vllm", 30, marks=pytest.mark.slow),
        pytest.param("deepspeed", 7, marks=pytest.mark.slow),
    ],
)
def test_calls_fit_the_installed_library(library: str, at_least: int) -> None:
    pytest.importorskip(library)
    wrong, num_right = faults(library, {file: file.read_text() for file in FILES})
    assert not wrong, "\n".join(wrong)
    assert num_right >= at_least, "calls are no longer found in the source"


@pytest.mark.parametrize(
    ("file", "call", "planted", "why"),
    [
        (KERNELS, "causal=runs.causal)", "causal=runs.causal, sink=1)", "sink"),
        (KERNELS, "runs.causal, random_state)", "runs.causal, random_state, state=1)", "state"),
        (KERNELS, "_varlen_attn(", "_varlen_attention(", "there is no"),
        pytest.param(
            "engines/vllm.py", "sleep(level=1)", "sleep(depth=1)", "depth", marks=pytest.mark.slow
        ),
    ],
)
def test_a_planted_wrong_argument_is_found(file: str, call: str, planted: str, why: str) -> None:
    path = REPO / "rl" / file
    text = path.read_text()
    assert text.count(call) >= 1
    library = "vllm" if "vllm" in file else "torch"
    [wrong, *_], _ = faults(library, {path: text.replace(call, planted)})
    assert why in wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", ["requests.V1Grammar", "requests.V2Grammar"])
def test_methods_that_vllm_calls_take_what_it_passes(name: str) -> None:
    pytest.importorskip("vllm")
    ours = found(f"rl.engines.vllm_{name}")
    [base] = ours.__bases__
    for method in vars(ours):
        if inspect.isfunction(inspect.getattr_static(base, method, None)):
            expected = inspect.signature(getattr(base, method)).parameters
            arguments = [None for p in expected.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
            inspect.signature(getattr(ours, method)).bind(*arguments)


@pytest.mark.parametrize("heads", gpu_steps.HEADS.values())
def test_the_gpus_attention_runs_on_meta_tensors(heads: tuple[int, int, int]) -> None:
    """Forward and backward of packed rows: the real operators, with a GPU's dtype and heads."""
    num_heads, num_key_heads, width = heads
    packing = Packing(gpu_steps.groups_of([(5, (3, 1)), (2, (0, 4))]), VARLEN)
    query, key, value = (
        torch.empty(1, n, 15, width, device="meta", dtype=torch.bfloat16, requires_grad=True)
        for n in (num_heads, num_key_heads, num_key_heads)
    )
    out, _ = attention(None, query, key, value, None, packing=packing)
    grads = torch.autograd.grad(out, (query, key, value), torch.empty_like(out))
    assert out.shape == (1, 15, num_heads, width)
    assert [grad.shape for grad in grads] == [query.shape, key.shape, value.shape]


def test_the_pinned_versions_are_among_those_that_were_tried() -> None:
    pinned = (REPO / "pyproject.toml").read_text()
    for package, versions in check_gpu.TRIED.items():
        assert f'"{package}=={versions[0]}"' in pinned
