"""The learner: forward, optimizer, checkpoints, and the loop. Plain classes.

It imports `distill` alone and knows neither the actors nor Ray: the loop is given a source of
groups and a `publish` callable.
"""
