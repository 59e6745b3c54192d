"""Examples: configs to copy, and programs that make their own small worlds."""
