"""Actors around the plain classes: `ray.remote` is applied here; what each hosts, its handles."""
