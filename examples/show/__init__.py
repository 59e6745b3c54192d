"""Recipes in small worlds of their own, from nothing."""
