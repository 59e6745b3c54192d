"""Rewards of whole responses and of single tokens; accuracy."""
