"""Names the rank that failed first, and decides whether the run is started again."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tiny_config
from tiny_messages import refusal

from rl import simple_launch
from rl.ranks import supervision
from rl.ranks.supervision import Ending

KILLED = Ending(137, "rank 1 was killed by SIGKILL", ("rank 1 was killed by SIGKILL",))
HUNG = Ending(124, "rank 1 hung")
REFUSED = Ending(1, "rank 0 failed: exit code 1")
EXITED = Ending(255, "rank 0 failed: exit code 255")
DONE = Ending(0, "it is done")
STOPPED = Ending(143, "", ("stopped by SIGTERM",))


@pytest.mark.parametrize(
    ("failures", "notes", "description", "code"),
    [
        ({1: (-9, True)}, {}, "rank 1 was killed by SIGKILL", 137),
        (
            {1: (-11, True), 0: (1, False)},
            {0: {"ended_ns": 1}},
            "rank 1 was killed by SIGSEGV",
            139,
        ),
        # Rank 1 failed first; rank 0 received its error, rank 2 was terminated, rank 3 killed.
        (
            {0: (1, True), 1: (1, False), 2: (-15, False), 3: (-9, False)},
            {0: {"ended_ns": 1, "only_heard": True}, 1: {"ended_ns": 2, "reason": "bad row"}},
            "rank 1 failed: exit code 1",
            1,
        ),
        ({0: (1, True)}, {0: {"ended_ns": 1}}, "rank 0 failed", 1),
        ({0: (-15, True)}, {}, "rank 0 was killed by SIGTERM", 143),
        ({0: (-2, True)}, {}, "rank 0 was killed by SIGINT", 130),
    ],
)
def test_the_rank_that_failed_first_is_named(
    tmp_path: Path,
    failures: dict[int, tuple[int, bool]],
    notes: dict[int, dict[str, object]],
    description: str,
    code: int,
) -> None:
    for rank, note in notes.items():
        (tmp_path / f"rank_{rank}.json").write_text(json.dumps(note))
    codes = {rank: code for rank, (code, _) in failures.items()}
    first = [rank for rank, (_, is_first) in failures.items() if is_first]
    ending = supervision.of_failure(first, codes, tmp_path, Path("logs"))
    assert description in ending.what and ending.code == code
    assert ending.lines[0].endswith("; logs: logs")
    assert notes.get(1, {}).get("reason", "") in ending.lines[-1]


@pytest.mark.parametrize(
    ("retries", "starts", "code", "pattern"),
    [
        (0, [(KILLED, 3)], 137, "SIGKILL"),
        (2, [(DONE, 4)], 0, ""),
        (2, [(KILLED, 1), (HUNG, 2), (DONE, 4)], 0,
         "SIGKILL; started again, 1 of 2: .*SIGKILL; started again, 2 of 2: rank 1 hung"),
        (1, [(KILLED, 1), (HUNG, 2)], 124, "1 of 1.*rank 1 hung.*--retries"),
        (3, [(KILLED, 1), (KILLED, 1)], 137, "not started again.*saved before: 1, now: 1"),
        (3, [(KILLED, 0)], 137, "not started again.*saved before: 0, now: 0"),
        (3, [(STOPPED, 2)], 143, "^stopped by SIGTERM; $"),
        (3, [(REFUSED, 2)], 1, "not started again: rank 0 failed"),
        (3, [(KILLED, 1), (REFUSED, 2)], 1, "1 of 3: .*not started again: rank 0 failed"),
        (3, [(EXITED, 2)], 255, "not started again: rank 0 failed"),
    ],
)  # fmt: skip
def test_a_run_is_restarted_only_after_a_machine_failure_and_with_progress(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    retries: int,
    starts: list[tuple[Ending, int]],
    code: int,
    pattern: str,
) -> None:
    """`starts`: the ending of each start, and the iterations on disk after it."""
    on_disk, remaining = [0], iter(starts)

    def one_start(*_: object) -> Ending:
        ending, on_disk[0] = next(remaining)
        return ending

    monkeypatch.setattr(simple_launch, "_one_start", one_start)
    monkeypatch.setattr(simple_launch, "_iterations_on_disk", lambda _: on_disk[0])
    config = tiny_config.write(tmp_path, tiny_config.nothing(tmp_path))
    script = tmp_path / "script.py"
    script.touch()
    words = ["--retries", str(retries), str(script), str(config)]
    errors = refusal(simple_launch.main, words, code).replace("\n", "; ")
    assert not list(remaining)
    assert re.search(pattern, errors), errors
    assert retries or "started again" not in errors
