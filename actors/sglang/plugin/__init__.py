"""Plugin that SGLang itself loads: input log-probs at T, weights out of shared memory."""
