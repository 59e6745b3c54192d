"""A model's weights as named buffers: layouts, portions, memory that processes share."""
