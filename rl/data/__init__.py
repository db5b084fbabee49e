"""Plug room: where samples come from.

A plug is a class derived from `rl.api.data.DataSource`, one a file: a finite list, read by index.
The order of prompts is `rl/rollout/prompt_order.py`'s.
"""
