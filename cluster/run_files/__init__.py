"""Files in `out/`: the run's directory, steps for a replay, progress and tracking."""
