"""The forward pass: loading, attention over shared prefixes, log-probs at T."""
