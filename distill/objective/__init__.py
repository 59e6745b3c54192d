"""The algorithm: settings, advantages, rows, divergences, losses, metrics."""
