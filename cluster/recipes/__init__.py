"""Recipes (`recipe=NAME`): check, build, run, finish."""
