"""How often an audit passes, fails or cannot decide, for judges whose AUROC is known.

python -m benchmarks.audit_power --audits 200 > benchmarks/results/audit_power.md
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from rl.api.types import RewardOutput, Sample
from rl.check.trials import RewardAudit
from rl.config.schema import JudgeConfig
from rl.tools.audit_cases import CORRECT, KINDS, Case
from rl.tools.commands.audit_judge import measured

SCALES = {
    "continuous": np.linspace(-8, 8, 401),
    "0..10": np.linspace(-3, 3, 10),
    "0/1": np.zeros(1),
}
"""Scale -> where a normal score of standard deviation 1 steps to the next value."""
AUROCS = (0.8, 0.85, 0.9, 0.95, 0.97, 0.99, 0.999)
NUM_CASES = (16, 32, 64)
WRONG = [kind for kind in KINDS if kind not in (CORRECT, "worse")]
BLIND_TO = "partial"


def distance(auroc: float, steps: np.ndarray) -> float:
    """How far the means of right and wrong scores lie apart, in standard deviations, so that the
    scores have this AUROC (0.5 to 0.9999) after their rounding to the scale."""
    low, high = 0.0, 16.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        right, wrong = (
            np.diff([0.0, *map(NormalDist(mean).cdf, steps), 1.0])
            for mean in (middle / 2, -middle / 2)
        )
        if (right * (np.cumsum(wrong) - wrong / 2)).sum() < auroc:
            low = middle
        else:
            high = middle
    return low


def audit(
    rng: np.random.Generator, distances: dict[str, float], steps: np.ndarray, num_cases: int
) -> RewardAudit:
    """One audit by the default limits of independent scores on a scale. `distances`: of each kind
    of wrong results from the right ones."""
    readings = {}
    for kind, apart in {CORRECT: 0.0, **distances}.items():
        scores = rng.normal(max(distances.values()) / 2 - apart, size=num_cases)
        for case, value in enumerate(np.searchsorted(steps, scores) / len(steps)):
            readings[case, kind] = [RewardOutput(float(value))]
    cases = [Case(Sample(str(number), ""), {}) for number in range(num_cases)]
    return measured("simulated", cases, readings, JudgeConfig())


def rates(
    scale: str, auroc: float, kinds: Sequence[str], num_cases: int, num_audits: int, blind: str = ""
) -> Counter[str]:
    """Verdict -> number of audits. `blind`: a kind whose wrong results score like right ones;
    `named` counts the audits that fail for this kind and for no other."""
    steps, rng = SCALES[scale], np.random.default_rng(0)
    distances = {kind: distance(0.5 if kind == blind else auroc, steps) for kind in kinds}
    counts: Counter[str] = Counter()
    for _ in range(num_audits):
        result = audit(rng, distances, steps, num_cases)
        counts["fail" if result.failures else "undecided" if result.doubts else "pass"] += 1
        told = {text.partition(":")[0] for text in result.failures}
        counts["named"] += told - {"all kinds"} == {blind}
    return counts


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.audit_power", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--audits", type=int, default=200, help="simulated per cell; 200")
    num = parser.parse_args(argv).audits
    print(
        f"# What the audit says about judges of known quality\n\n`python -m benchmarks.audit_power"
        f" --audits {num}`: {num} audits per cell. Standard error:\n"
        f"{100 * math.sqrt(0.05 * 0.95 / num):.1f} points where the table says 5 or 95 %, "
        f"{100 * math.sqrt(0.25 / num):.1f} at 50 %.\n\npass / undecided / fail, %\n\n"
        "| scale | kinds | AUROC | 16 cases | 32 cases | 64 cases |\n|---|---|---|---|---|---|"
    )
    for scale, kinds, auroc in itertools.product(SCALES, (["worse"], WRONG), AUROCS):
        found = [rates(scale, auroc, kinds, each, num) for each in NUM_CASES]
        cells = (
            " / ".join(f"{counts[each] / num:.1%}"[:-1] for each in ("pass", "undecided", "fail"))
            for counts in found
        )
        print(f"| {scale} | {len(kinds)} | {auroc} |", " | ".join(cells), "|", flush=True)
    print(
        f"\nAUROC 0.99 for eight kinds and 0.5 for `{BLIND_TO}`: fails for this kind, by name, and"
        " for no other, %\n\n| scale | 16 cases | 32 cases | 64 cases |\n|---|---|---|---|"
    )
    for scale in SCALES:
        named = [rates(scale, 0.99, WRONG, each, num, BLIND_TO)["named"] for each in NUM_CASES]
        print(f"| {scale} |", " | ".join(f"{each / num:.1%}"[:-1] for each in named), "|")


if __name__ == "__main__":
    main()
