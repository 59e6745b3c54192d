"""The handshake: every party scores the same tokens, at T and at a second T, and must agree."""
