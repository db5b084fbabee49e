"""Plug room: samplers that hold a copy of the policy's weights.

A plug exports `Config` and `build`; `rl.api.contracts.Engine` is what it builds. `vllm` samples
fast, `transformers` slowly and obviously: tests hold one against the other.
"""
