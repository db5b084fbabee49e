"""A world of coloured shapes, small enough that a laptop runs the real loop in minutes.

`scenes` draws 64x64 pictures and the instructions that go with them, `pixel_judge` grades an
edited picture the way VIEScore does, and `weights/` holds a policy and an image editor of the
real classes at tiny size (made by `scripts/build_tiny_world.py`).

Importing anything here needs numpy and PIL only.
"""
