"""Handles of actors, on Ray or in this process, and waiting for their calls."""
