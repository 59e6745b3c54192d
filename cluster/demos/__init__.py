"""Demonstrations, whole: their tasks and data, their runs, what these must show."""
