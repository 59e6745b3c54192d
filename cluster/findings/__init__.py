"""Findings of a run about itself: detectors over its metrics, with evidence and a remedy."""
