"""Fault campaigns: `python -m benchmarks.faults` and `python -m benchmarks.faults.saves`."""
