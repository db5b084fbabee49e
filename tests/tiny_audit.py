"""The audit at a run's start (`rl/audit/audit_at_start.py`), of 3 cases, one of them read again."""

from __future__ import annotations

import sys

from rl.audit import audit_at_start, judge_audit

if __name__ == "__main__":
    judge_audit.NUM_CASES, judge_audit.NUM_REPEATED = 3, 1
    sys.exit(audit_at_start.main())
