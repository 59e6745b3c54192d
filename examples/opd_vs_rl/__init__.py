"""Optimizer steps that distillation and RL need, by the length of the answer."""
