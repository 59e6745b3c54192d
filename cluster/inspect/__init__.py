"""Finished runs, read: audit, report, pictures, rollouts as data."""
