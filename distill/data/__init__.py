"""Files of rows to prompts, supervised rows and preference pairs."""
