"""Credit, order and delivery of prompt groups, and their journal: each exactly once."""
