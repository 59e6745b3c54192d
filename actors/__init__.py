"""Engines, the teacher, the rollout worker, the evaluator. Plain classes.

They import `distill` alone. Ray is a way to place them and is applied in `cluster`, so every class
here runs, and is tested, in one process.
"""
