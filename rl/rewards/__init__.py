"""Rewards: what an episode is worth, in [0, 1].

A plugin is a class derived from `rl.api.reward.Reward`, one a file. A reward that could not be had
is a `RewardOutput` without a value, never a zero.
"""
