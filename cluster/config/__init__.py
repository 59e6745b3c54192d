"""Settings of commands and recipes, and their validation."""
