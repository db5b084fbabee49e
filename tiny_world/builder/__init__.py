"""The stages that make `tiny_world/weights`, in order: tokenizer, vae, policy, editor.

Run by `rl build-tiny-world`; nothing in `rl/` imports this.
"""
