"""Values as a classic script may hold them: a page on a disk has no modules and no `fetch`."""

from __future__ import annotations

import json
import re
from typing import Any

_CALL = re.compile(r'page\.data\("[a-z0-9_]+",(.*)\);\n', re.DOTALL)
"""As `call` writes it."""
_SPECIAL = re.compile("[<>&\u2028\u2029\x7f\ud800-\udfff]")


def literal(value: Any) -> str:
    """`value` as JSON that is also JavaScript, and ends no `<script>` that it stands in, whatever
    text it holds."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _SPECIAL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def call(name: str, value: Any) -> str:
    """The data page `name`: hands its value to `rl/report/page/base.js`."""
    return f"page.data({literal(name)},{literal(value)});\n"


def value_of(script: str) -> Any:
    """What a data page holds. Raises ValueError for what is none, such as one that says more."""
    found = _CALL.fullmatch(script)
    if found is None:
        raise ValueError("no data page")
    return json.loads(found[1])
