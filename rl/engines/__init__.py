"""Plug room: inference engines with a copy of the policy's weights, each an `rl.api.engine.Engine`.

`vllm` samples fast, `transformers` slowly and obviously: tests hold one against the other.
"""
