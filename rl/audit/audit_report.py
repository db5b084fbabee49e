"""What an audit and an attack print, and the page of an audit with the worst errors."""

from __future__ import annotations

import base64
import io
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL.Image import Image

from rl.audit.audit_cases import CORRECT, KINDS, Case
from rl.audit.audit_statistics import readings_for
from rl.audit.judge_attacks import ATTACKS
from rl.audit.judge_audit import TARGET_RELIABILITY, AttackResult
from rl.check.judge_verdict import Kind, RewardAudit
from rl.files import downscale, write_atomically
from rl.printing import load_template

NUM_WORST = 12
SIDE_PX = 256


def audit_lines(audit: RewardAudit) -> Iterable[str]:
    """At most 80 columns each."""
    yield f"{audit.reward}: mean value of the right results {audit.mean_correct:.2f}"
    yield "  wrong results     pairs right wins  ties             AUROC  mean silent"
    for kind in audit.kinds:
        yield _kind_line(kind, f"{audit.silent[kind.name][0]:.0%}")
    yield _kind_line(audit.overall)
    if len(audit.categories) > 1:
        yield "  clearly wrong results, by category"
        yield from map(_kind_line, audit.categories)
    if not math.isnan(audit.noise_sd):
        yield repeats_line(audit.noise_sd, audit.reliability)
    yield (
        f"  values: {audit.num_levels} levels, {audit.effective_levels:.1f} effective; "
        f"{audit.lowest_share:.0%} are 0, {audit.highest_share:.0%} are 1"
    )
    yield f"  ungraded: {audit.num_ungraded} of {audit.num_graded + audit.num_ungraded}"
    verdicts = [f"FAIL {text}" for text in audit.failures]
    verdicts += [f"UNDECIDED: add cases (--cases N): {text}" for text in audit.doubts]
    for text in verdicts or ["PASS"]:
        yield from textwrap.wrap(text, 80, initial_indent="  ", subsequent_indent=" " * 7)


def repeats_line(sd: float, reliability: float) -> str:
    """The noise of repeated readings, and how many readings make a reliable mean."""
    needed = readings_for(reliability, TARGET_RELIABILITY)
    return f"  repeats: sd {sd:.3f}; reliability of 1 reading {reliability:.2f}, " + (
        f"{TARGET_RELIABILITY} from {needed} reading(s)"
        if needed
        else f"{TARGET_RELIABILITY} is never reached"
    )


def _kind_line(kind: Kind, silent: str = "") -> str:
    low, high = kind.auroc_interval
    numbers = (
        f"{kind.num_pairs:>5} {kind.accuracy:>10.0%} {kind.ties:>5.0%}"
        f"  {kind.auroc:>4.2f} ({low:>4.2f}-{high:>4.2f}) {kind.mean:>5.2f} {silent:>6}".rstrip()
    )
    return f"  {kind.name[:18]:<18}" + numbers.replace("nan%", "   -").replace("nan", "  -")


def attack_lines(
    reward: str, results: Sequence[AttackResult], right: float, floor: float
) -> Iterable[str]:
    yield f"{reward}: right results {right:.2f}; unchanged or another sample's {floor:.2f}"
    for result in results:
        what = ATTACKS[result.name][0] if result.name in ATTACKS else "source and result exchanged"
        verdict = "PASS" if result.passed else "FAIL"
        gain = f"{result.gain:>5.0%}" if math.isfinite(result.gain) else "    -"
        yield f"  {verdict} {result.name:<16}{result.mean:>5.2f} gain {gain}  {what}"


def write_audit_page(
    file: Path, title: str, audits: Sequence[RewardAudit], cases: Sequence[Case]
) -> None:
    """A page without scripts: the tables, and the wrong results that scored highest against the
    right ones."""
    shown = [
        {
            "audit": audit,
            "text": "\n".join(audit_lines(audit)),
            "worst": [_shown(cases[row[0]], *row[1:]) for row in audit.worst[:NUM_WORST]],
        }
        for audit in audits
    ]
    page = load_template(Path(__file__).with_name("audit_page.html.j2"), autoescape=True)
    write_atomically(file, page.render(title=title, audits=shown))


def _shown(case: Case, kind: str, right: float, wrong: float) -> Mapping[str, Any]:
    sample, picture = case.results[kind]
    pictures = [("source", source) for source in sample.sources]
    pictures += [
        (f"right: {right:.2f}", case.results[CORRECT][1]),
        (f"wrong: {wrong:.2f}", picture),
    ]
    return {
        "instruction": sample.instruction,
        "kind": kind,
        "meaning": KINDS.get(kind, ""),
        "is_error": wrong >= right,
        "pictures": [(label, _data_url(image)) for label, image in pictures],
    }


def _data_url(picture: Image) -> str:
    file = io.BytesIO()
    downscale(picture, SIDE_PX).save(file, "WEBP", quality=80)
    return "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode()
