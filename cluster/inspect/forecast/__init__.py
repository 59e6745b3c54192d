"""Forecast of a distillation from the answers of a student and a teacher to some prompts."""
