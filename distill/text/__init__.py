"""Texts longer than the context: pieces of them, their words, fewer tokens."""
