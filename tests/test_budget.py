"""Limits the weight of the code, not its lines: readable code with docstrings costs nothing more.

When something grows, something else leaves. `budget.json` falls with the code; to raise a limit,
edit it and explain it in CHANGELOG.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from functools import cache

import pytest
from tiny_config import REPO

WEIGHT = json.loads((REPO / "tests/budget.json").read_text(encoding="utf-8"))["weight"]
OTHER = (".js", ".css", ".html", ".j2", ".json")


@cache  # most files are in two folders of the table
def weigh(text: str) -> Counter[str]:
    """`statements` and `nodes` (expressions and statements) of a program, neither with docstrings
    and imports."""
    weight: Counter[str] = Counter(statements=0, nodes=0)
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            constant = node.value if isinstance(node, ast.Expr) else None
            is_text = isinstance(constant, ast.Constant) and isinstance(constant.value, str)
            weight["statements"] += isinstance(node, ast.stmt) and not is_text
            weight["nodes"] += isinstance(node, (ast.stmt, ast.expr)) - 2 * is_text  # and its text
    return weight


def weight_of(folder: str) -> Counter[str]:
    """The sum over a folder; `other`: lines of scripts, styles, templates and data."""
    total: Counter[str] = Counter(statements=0, nodes=0, files=0, other=0)
    for file in (REPO / folder).rglob("*"):
        if file.suffix == ".py":
            total += weigh(file.read_text()) + Counter(files=1)
        elif file.suffix in OTHER and "results" not in file.parts:
            total["other"] += file.read_bytes().count(b"\n")
    return total


@pytest.mark.parametrize("folder", WEIGHT)
def test_the_weight_is_within_its_budget(folder: str) -> None:
    """'rl - rl/tools' is the trainer."""
    whole, _, part = folder.partition(" - ")
    weight = weight_of(whole)
    if part:
        weight.subtract(weight_of(part))
    print(f"\n{folder}: {dict(weight)}")
    over = {name: n for name, n in weight.items() if n > WEIGHT[folder][name]}
    assert not over, f"{folder} may have {WEIGHT[folder]}"


def test_the_weight_of_a_program_by_hand() -> None:
    text = '"""Docstring."""\nimport os\ndef f(x):\n    "Docstring."\n    return x + 1\n'
    # def, return; and the expressions x + 1, x, 1
    assert weigh(text) == Counter(statements=2, nodes=5)
