"""Plug room: what an episode is worth, in [0, 1].

A plug exports `Config`, `NEEDS`, `NEEDS_JUDGE` and `build`; `rl.api.contracts.Reward` is what it
builds. A reward that could not be had is a `RewardOutput` without a value, never a zero.
"""
