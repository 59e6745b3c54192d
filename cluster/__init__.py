"""Wiring: Ray actors made of the plain classes, queue, weights, supervision, the command line.

The only package that imports ray and wandb, and the only one that knows both actors and learner.
"""
