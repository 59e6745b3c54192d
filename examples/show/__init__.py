"""Recipes on small tasks, with generated data and models."""
