"""Outcomes of a run, and parts that every folder of `cluster` uses."""
