"""Plug room: where samples come from.

A plug exports `Config`, `provides`, `check` and `build`; `rl.api.contracts.DataSource` is what it
builds: a finite list, read by index. The order of prompts is `rl/rollout/prompt_order.py`'s.
"""
