"""Data types, sampling, environments and the mathematics of the objective.

The lowest layer. It may use torch, transformers and numpy; it never imports ray, sglang,
`actors`, `learner` or `cluster`, and it never opens a network connection.
"""
