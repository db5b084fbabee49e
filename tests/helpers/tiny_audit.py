"""The audit at a run's start (`rl judge audit`), of 3 cases, one of them read again."""

from __future__ import annotations

import sys

from rl.tools import judge_audit
from rl.tools.commands import audit_judge

if __name__ == "__main__":
    judge_audit.NUM_CASES, judge_audit.NUM_REPEATED = 3, 1
    sys.exit(audit_judge.main())
