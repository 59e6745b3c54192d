"""`make gpu`: what only a GPU can show, in ten minutes; the same checks run small on a CPU."""
