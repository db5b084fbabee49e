"""Plug room: trainable models that read prompts and write completions.

A plug exports `Config`, `EMITS` (the kinds of action it can hand to a renderer) and `build`;
`rl.api.contracts.Policy` is what it builds. Files with a leading underscore are shared parts, not
plugs.
"""
