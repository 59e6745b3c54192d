"""Report of a run: its curves, and its rollouts token by token, on one HTML page."""
