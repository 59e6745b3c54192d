"""Check that no test leaves anything on the machine."""

from tests.leftovers import nothing_left_over

__all__ = ["nothing_left_over"]
