"""Reward plugins, each an `rl.api.reward.Reward` that grades episodes in [0, 1]."""
