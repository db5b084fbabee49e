"""What a run does when something breaks: `python -m benchmarks.faults` and `.saves`."""
