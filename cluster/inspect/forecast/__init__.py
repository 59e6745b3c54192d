"""A forecast of a distillation: what a pair of models answers, and what that predicts."""
