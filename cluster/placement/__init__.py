"""Placement of actors on the cluster: connection, roles, resources and shared storage."""
