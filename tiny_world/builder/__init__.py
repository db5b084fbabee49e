"""The stages that make `rl/tiny_world/weights`, in order: tokenizer, vae, policy, editor.

Run by `rl build-tiny-world`; nothing in `rl/` imports this.
"""
