"""A rehearsal before a run: the whole run with small random twins, and a death of each actor."""
