"""The README tells the truth about what is logged and what is there."""

from __future__ import annotations

import re
from pathlib import Path

from rl.run.metric_table import markdown_table

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_metric_table_is_the_one_in_the_code() -> None:
    assert markdown_table() in README, "paste rl.run.metric_table.markdown_table() there"


def test_every_file_it_names_exists() -> None:
    named = set(
        re.findall(r"(?:configs|scripts|rl)/[\w/.]*\w\.(?:jsonnet|libsonnet|sh|py)", README)
    )
    assert len(named) >= 8
    assert [path for path in sorted(named) if not (ROOT / path).is_file()] == []
