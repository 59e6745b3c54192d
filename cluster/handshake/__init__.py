"""The handshake: every party scores the same tokens, at T and beside it, and must agree."""
