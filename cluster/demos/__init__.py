"""The demonstration: its task and data, its runs, and the results that they must reach."""
