"""Files in `out/`: the run's directory, kept rollouts, progress and tracking."""
