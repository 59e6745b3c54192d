"""Loading of data: files of rows to prompts, supervised rows and preference pairs."""
