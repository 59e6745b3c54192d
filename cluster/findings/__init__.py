"""What a run finds wrong with itself: detectors over its metrics, with evidence and a remedy."""
