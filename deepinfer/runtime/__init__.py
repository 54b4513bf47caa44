"""The engine room: what runs next (scheduler), how it runs (worker), and how the host stays one step ahead (loop).

`request`, `sequence`, `ids`, `plan`, `release` and `scheduler` use no torch: they can be run by hand.
"""
