"""Engines, teacher scoring, rollout worker and evaluator, as plain classes.

The package imports only `distill`. `cluster` adds Ray, so every class runs, and is tested, in one
process.
"""
