"""Runs in processes of their own: each test leaves the machine as it was."""

from tests.leftovers import nothing_left_over

__all__ = ["nothing_left_over"]
