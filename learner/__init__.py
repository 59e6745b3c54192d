"""The learner: forward, optimizer, checkpoints, and the loop. Plain classes.

The package imports only `distill`, neither `actors` nor Ray: the loop receives a source of groups
and a `publish` callable.
"""
