"""Rewards: what an episode is worth, in [0, 1]. A plugin is a class, one a file."""
