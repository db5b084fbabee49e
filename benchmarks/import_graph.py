"""Prints which folders of `rl/` import which, and how often.

python -m benchmarks.import_graph
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "rl"


def main() -> None:
    edges: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for file in sorted(PACKAGE.rglob("*.py")):
        here = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module[:2] == "rl":
                # `from rl import files` names the folder or file itself.
                names = node.module.split(".")[1:2] or [alias.name for alias in node.names]
                edges[here].update(name for name in names if name != here)
    for name, others in sorted(edges.items()):
        to = "  ".join(f"{other} {count}" for other, count in sorted(others.items()))
        print(f"{name:<22} -> {to}")


if __name__ == "__main__":
    main()
