"""Loads Jinja templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template


def load_template(file: Path, **options: Any) -> Template:
    """The template in a file; a name that `render` is not given is an error. `options`: Jinja's,
    such as `autoescape` for HTML."""
    options |= {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=FileSystemLoader(file.parent), **options)  # nosec B701
    return environment.get_template(file.name)
