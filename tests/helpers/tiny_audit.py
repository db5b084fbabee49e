"""The audit at a run's start (`rl judge audit`), of 3 cases, one of them read again."""

from __future__ import annotations

import sys

from rl.tools.commands import audit_judge

if __name__ == "__main__":
    audit_judge.NUM_CASES, audit_judge.NUM_REPEATED = 3, 1
    sys.exit(audit_judge.main())
