"""`make gpu`: measurements that need a GPU, in ten minutes; the same checks run small on a CPU."""
