"""How often an audit passes, fails or cannot decide, for judges whose AUROC is known.

python -m benchmarks.audit_power --audits 200 > benchmarks/results/audit_power.md
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from rl.api.types import Sample
from rl.audit.audit_cases import CORRECT, KINDS, Case
from rl.audit.judge_audit import Asked, RewardAudit, measured
from rl.config.schema import JudgeConfig

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
    values = {}
    for kind, apart in {CORRECT: 0.0, **distances}.items():
        scores = rng.normal(max(distances.values()) / 2 - apart, size=num_cases)
        for case, value in enumerate(np.searchsorted(steps, scores) / len(steps)):
            values[case, kind] = (float(value),)
    cases = [Case(Sample(str(number), ""), {}) for number in range(num_cases)]
    return measured("simulated", cases, Asked(values, dict.fromkeys(values, ())), JudgeConfig())


def verdict(result: RewardAudit) -> str:
    return "fail" if result.failures else "undecided" if result.doubts else "pass"


def rates(
    scale: str, auroc: float, kinds: Sequence[str], num_cases: int, num_audits: int, blind: str = ""
) -> Counter[str]:
    """Verdict -> number of audits. `blind`: a kind whose wrong results score like right ones; its
    failures count as `named` if a failure names it and no other kind."""
    steps = SCALES[scale]
    distances = {kind: distance(0.5 if kind == blind else auroc, steps) for kind in kinds}
    rng = np.random.default_rng(0)
    counts: Counter[str] = Counter()
    for _ in range(num_audits):
        result = audit(rng, distances, steps, num_cases)
        counts[verdict(result)] += 1
        told = {text.partition(":")[0] for text in result.failures}
        counts["named"] += told - {"all kinds"} == {blind}
    return counts


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.audit_power", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--audits", type=int, default=200, help="per number of the table")
    num = parser.parse_args(argv).audits
    print("# How often an audit of a judge of known AUROC passes, is undecided, or fails\n")
    print(
        f"`python -m benchmarks.audit_power --audits {num}`: {num} simulated audits per number, in"
    )
    print("%; a share of 5 (50) % has a standard error of", end=" ")
    print(f"{100 * (0.05 * 0.95 / num) ** 0.5:.1f} ({50 / num**0.5:.1f}) points.\n")
    print(
        "| scale | kinds | AUROC |", *(f"{n} cases: pass / undecided / fail |" for n in NUM_CASES)
    )
    print("|---" * 6 + "|")
    for scale in SCALES:
        for kinds in (["worse"], WRONG):
            for auroc in AUROCS:
                cells = []
                for num_cases in NUM_CASES:
                    counts = rates(scale, auroc, kinds, num_cases, num)
                    shares = [counts[each] / num for each in ("pass", "undecided", "fail")]
                    cells.append(" / ".join(f"{100 * share:.1f}" for share in shares))
                print(f"| {scale} | {len(kinds)} | {auroc} |", " | ".join(cells), "|", flush=True)
    print(
        f"\nAUROC 0.99, but 0.5 for one kind of {len(WRONG)}, `{BLIND_TO}`: fails, and names it and"
    )
    print("no other kind.\n\n| scale |", *(f"{n} cases |" for n in NUM_CASES))
    print("|---" * 4 + "|")
    for scale in SCALES:
        named = [rates(scale, 0.99, WRONG, n, num, BLIND_TO)["named"] / num for n in NUM_CASES]
        print(f"| {scale} |", " | ".join(f"{100 * share:.1f}" for share in named), "|")


if __name__ == "__main__":
    main()
