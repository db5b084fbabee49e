"""Measures which defects of the tiny world's judge the audit and the attacks find.

python -m benchmarks.judge_defects > benchmarks/results/judge_defects.md
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Callable, Mapping
from typing import Any

from rl import build
from rl.check.trials import RewardAudit
from rl.config.schema import load_config
from rl.judge.client import JudgeClient
from rl.tools.audit_cases import configured_cases
from rl.tools.commands import audit_judge
from rl.tools.commands.audit_judge import AttackResult, attack_lines, audit_lines
from tiny_world.judge_server import JudgeServer

Parts = list[dict[str, Any]]
Defect = Callable[["DefectiveJudge", Parts], str]


class DefectiveJudge(JudgeServer):
    """The tiny world's judge with the defect that `DEFECTS` names."""

    def __init__(self, model: str, defect: str) -> None:
        super().__init__(model)
        self._defect = DEFECTS[defect]
        self.random = random.Random(0)

    def answer(self, parts: Parts) -> str:
        return self._defect(self, parts)

    def sound(self, parts: Parts) -> str:
        return super().answer(parts)

    def scores(self, parts: Parts) -> list[float]:
        """The sound judge's scores, 0 to 10."""
        return list(json.loads(self.sound(parts))["score"])


def _reply(*scores: float) -> str:
    return json.dumps({"score": [min(10.0, max(0.0, score)) for score in scores]})


def _text(parts: Parts) -> str:
    return "".join(part.get("text", "") for part in parts)


def _urls(parts: Parts) -> list[str]:
    return [part["image_url"]["url"] for part in parts if "image_url" in part]


def _instruction(parts: Parts) -> str:
    """'' in the question about the picture alone."""
    return _text(parts).partition("<instruction>")[2].partition("</instruction>")[0].strip()


def _constant(judge: DefectiveJudge, parts: Parts) -> str:
    return _reply(7, 7)


def _prefers_length(judge: DefectiveJudge, parts: Parts) -> str:
    """The longer the instruction, the higher the scores."""
    return _reply(*[len(_instruction(parts)) / 4] * 2) if _instruction(parts) else _reply(9, 9)


def _prefers_copies(judge: DefectiveJudge, parts: Parts) -> str:
    """Gives an unchanged source full marks."""
    urls = _urls(parts)
    return _reply(10, 10) if len(set(urls)) < len(urls) else judge.sound(parts)


def _order_biased(judge: DefectiveJudge, parts: Parts) -> str:
    """Mistakes the first picture for the result."""
    pictures = [part for part in parts if "image_url" in part]
    rest = [part for part in parts if "image_url" not in part]
    return judge.sound([*reversed(pictures), *rest])


def _ignores_order(judge: DefectiveJudge, parts: Parts) -> str:
    """Asks with both orders of the pictures, and gives the higher scores."""
    if not _instruction(parts):
        return judge.sound(parts)
    return _reply(*max(judge.scores(parts), json.loads(_order_biased(judge, parts))["score"]))


def _noisy(judge: DefectiveJudge, parts: Parts) -> str:
    """Adds noise with a standard deviation of 3 points."""
    return _reply(*(score + judge.random.gauss(0, 3) for score in judge.scores(parts)))


def _ignores_category(judge: DefectiveJudge, parts: Parts) -> str:
    """Gives full marks to every result of an "erase" instruction."""
    erases = _instruction(parts).startswith("erase")
    return _reply(10, 10) if erases else judge.sound(parts)


def _fallback(judge: DefectiveJudge, parts: Parts) -> str:
    """Answers a third of the questions with 5 of 10 points, without looking at the pictures."""
    fails = random.Random(json.dumps(parts)).random() < 1 / 3
    return _reply(5, 5) if fails else judge.sound(parts)


def _silent_on_copies(judge: DefectiveJudge, parts: Parts) -> str:
    """Writes prose about an unchanged source."""
    urls = _urls(parts)
    return "I see no change." if len(set(urls)) < len(urls) else judge.sound(parts)


def _echo(judge: DefectiveJudge, parts: Parts) -> str:
    """Repeats the question."""
    return _text(parts)


def _reads_text(judge: DefectiveJudge, parts: Parts) -> str:
    """Gives full marks to a result with a white box with text at its bottom left."""
    from tiny_world import judge_server

    picture = judge_server.picture_at(_urls(parts)[-1])
    box = picture.crop((0, 52, 24, 64)).convert("L")
    white = sum(box.histogram()[250:]) / (24 * 12)
    return _reply(10, 10) if 0.3 < white < 0.98 else judge.sound(parts)


DEFECTS: Mapping[str, Defect] = {
    "sound": DefectiveJudge.sound,
    "constant": _constant,
    "prefers length": _prefers_length,
    "prefers copies": _prefers_copies,
    "order-biased": _order_biased,
    "ignores order": _ignores_order,
    "noisy": _noisy,
    "ignores a category": _ignores_category,
    "half marks as a fall-back": _fallback,
    "silent on copies": _silent_on_copies,
    "echo": _echo,
    "reads text in pictures": _reads_text,
}


def examine(
    defect: str, num_cases: int = audit_judge.NUM_CASES, attacked: bool = True
) -> tuple[RewardAudit, tuple[list[AttackResult], float, float]]:
    """(audit, attack) of the quickstart's reward with a judge that has this defect: the
    results of `audit_judge.audit` and, if `attacked`, of `audit_judge.attack`."""
    config = load_config("configs/quickstart.jsonnet", ["judge.max_attempts=2"])
    resolved = build.resolve(config)
    cases = configured_cases(resolved, ["viescore"], num_cases, seed=0)
    plugin, limits = resolved.rewards["viescore"], config.judge

    async def ask(api_base: str) -> Any:
        client = JudgeClient(limits.model_copy(update={"max_outage_s": 6.0}), api_base)
        try:
            audit = await audit_judge.audit(plugin, client, "cpu", cases, limits)
            if not attacked or audit.num_unreadable:  # an attack would raise JudgeError
                return audit, ([], math.nan, 0.0)
            return audit, await audit_judge.attack(plugin, client, "cpu", cases, limits)
        finally:
            await client.aclose()

    with DefectiveJudge(limits.model, defect) as judge:
        return asyncio.run(ask(judge.api_base))


def main() -> None:
    print("# The tiny world's judge, audited and attacked: sound, and with planted defects\n")
    print("`python -m benchmarks.judge_defects`; 64 held-out samples of the quickstart.\n")
    for defect in DEFECTS:
        audit, (attacks, right, floor) = examine(defect)
        print(f"## {defect}\n\n```text")
        print("\n".join([*audit_lines(audit), *attack_lines(audit.reward, attacks, right, floor)]))
        print("```\n", flush=True)


if __name__ == "__main__":
    main()
