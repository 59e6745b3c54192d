"""Recipes: what `recipe=NAME` runs. Each is one short file: check, build, drive, finish."""
