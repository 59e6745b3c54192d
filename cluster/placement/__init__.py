"""Placement on the cluster: connecting, roles, resources, storage that its nodes share."""
