"""A model's weights as named tensors: layouts, buckets, and memory that processes share."""
