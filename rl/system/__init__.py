"""All side effects: ranks, signals, disk, network, screen. No arithmetic of the algorithm."""
