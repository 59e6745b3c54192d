"""Supervision of actors: failures classified, heartbeats, deaths and restarts."""
