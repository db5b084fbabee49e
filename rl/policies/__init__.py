"""Policy plugins: trainable models that write completions, each an `rl.api.policy.Policy`."""
