"""The handshake's arithmetic: comparisons with tolerances, facts that must agree."""
