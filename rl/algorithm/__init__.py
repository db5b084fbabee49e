"""GRPO's arithmetic: pure functions, values in, values out, each with its equation and source."""
