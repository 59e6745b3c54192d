"""Supervision of actors: heartbeats, deaths and restarts."""
