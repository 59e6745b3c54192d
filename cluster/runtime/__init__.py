"""The driver's loop: steps, membership, the learner's seat, stalls, scaling."""
