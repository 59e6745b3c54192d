"""Actors that host the plain classes: applies `ray.remote`, and builds actors and their handles."""
