"""The stages that make `tiny_world/weights`, in order: tokenizer, vae, policy, editor.

Run by `python -m tiny_world.builder`; nothing in `rl/` imports this.
"""
