"""The driver's loop: steps, membership, the learner's lifecycle, stalls, scaling."""
