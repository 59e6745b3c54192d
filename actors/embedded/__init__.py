"""Embedded engine: a transformers model in this process, with continuous batching."""
