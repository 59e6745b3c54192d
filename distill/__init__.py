"""Data types, sampling, environments, maths: what a token, a group, a temperature and a KL *are*.

The bottom of the house. It may use torch, transformers and numpy; it never imports ray, sglang,
`actors`, `learner` or `cluster`, and it never opens a network connection.
"""
