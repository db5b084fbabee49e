"""Rewards: what an episode is worth, in [0, 1]. Each plugin is one class in a file of its own."""
