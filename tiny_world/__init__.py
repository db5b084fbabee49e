"""A toy world of coloured shapes and tiny models, in which a laptop runs the real loop in minutes.

`scenes` draws 64x64 pictures and writes instructions, `pixel_judge` grades an edited picture as
VIEScore does, `judge_server` does so over HTTP, `data/` has data plugins, and `weights/` has models
of the real classes at tiny size (built by `python -m tiny_world.builder`).

This is a third-party package: configs name its plugins by dotted path, and `rl/` never imports it.
Its modules need only numpy and PIL; the data plugins also need `rl`.
"""
