"""A world of coloured shapes, small enough that a laptop runs the real loop in minutes.

`scenes` draws 64x64 pictures and the instructions that go with them, `pixel_judge` grades an
edited picture the way VIEScore does, `judge_server` does so over HTTP, `data/` holds data plugins,
and `weights/` models of the real classes at tiny size (made by `python -m tiny_world.builder`).

An outsider's package: configs name its plugins by dotted path and start its judge, and nothing in
`rl/` knows of it. Importing anything here needs numpy and PIL only; the data plugins need `rl` too.
"""
