"""The stages that make `tiny_world/weights`, in order: tokenizer, vae, policy, editor.

Run by `scripts/build_tiny_world.py`; nothing in `rl/` imports this.
"""
