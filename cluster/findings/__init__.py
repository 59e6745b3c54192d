"""Findings: faults that detectors find in a run's metrics, with evidence and a remedy."""
