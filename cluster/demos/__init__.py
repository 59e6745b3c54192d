"""The demonstration: its task and data, its runs, what these must show."""
