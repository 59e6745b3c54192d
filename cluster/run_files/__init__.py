"""Files in `out/`: the run's directory, its lock, progress and tracking."""
