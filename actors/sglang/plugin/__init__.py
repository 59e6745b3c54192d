"""Plugin that SGLang loads: input log-probs at T, and weights from shared memory."""
