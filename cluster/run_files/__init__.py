"""What `out/` holds: the run's directory, kept rollouts, progress and tracking."""
